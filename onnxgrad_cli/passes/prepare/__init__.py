"""Preparation: convert any model to the one form that the other passes expect, and choose the weights to train.

- `prepare`: the pass. It runs `validate_input`, then `normalise`, `infer_and_lower` and `mode`, then the choice of
  parameters, and finally expands batch statistics.
- `validate_input`: refuses unknown opsets, fixes shapes, removes the traces of an earlier build.
- `declarations`: decides which of the declared sizes of values to use.
- `normalise`: inlines functions, turns constants into initializers, names every node. It uses `inline_functions` and
  `subgraphs`.
- `infer_and_lower`: infers types and replaces operators without a gradient rule, alternately. It uses
  `expand_definitions` (definitions of this project, and function bodies of the standard), `unpack_sequences`,
  `safe_forms` and `constant_folding`. With `runtime_shape_probe` it runs the model to find ranks that can't be
  inferred.
- `opset`: chooses an opset that the gradient needs and onnxruntime runs; `upgrade` converts a model to a newer opset.
- `mode`: sets BatchNormalization and Dropout to training or inference mode.
- `fixed_shapes`: applies sizes of inputs that the user fixes.
- `free_batch`: makes a batch size symbolic that is fixed in the model.
"""
