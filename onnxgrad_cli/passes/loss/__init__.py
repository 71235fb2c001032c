"""Append the loss to the model.

- `append`: the pass. It adds the label inputs and writes the loss: terms, reduction, weights and penalties.
- `chunks`: computes the loss of a language model in chunks of tokens.
- `model_file`: inserts a loss from an ONNX file, and other models from files, into the graph.
- `function`: runs losses that are Python functions. Their code can take derivatives and evaluate models.
"""
