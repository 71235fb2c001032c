"""The loss, appended to the model.

- `append`: the pass. It adds label inputs, and writes the losses, their reduction, weights and penalties.
- `chunks`: the loss of a language model in chunks of tokens.
- `model_file`: a loss in an ONNX file, and other models in files that are inserted into the graph.
- `function`: for losses that are Python functions, derivatives and evaluations of models.
"""

from onnxgrad_cli.passes.loss.append import LOSS

__all__ = ["LOSS"]
