"""Preparation: any model in the one form that the other passes know.

- `prepare`: the pass; `admit` comes first, then `normalise`, `settle` and `mode`, then the choice of parameters;
  batch statistics are written out after it.
- `admit`: refuses unknown opsets, fixes shapes, forgets what an earlier build has said.
- `declarations`: what the model says of the sizes of its values, and how far it is believed.
- `normalise`: functions inlined, constants as initializers, every node named; with `functions`, `subgraphs` and
  `rnn_layout`.
- `settle`: types inferred and operators without a rule replaced, in turn; with `expand` (definitions of this project),
  `function_bodies` (those of the standard), `sequences`, `vectors`, `fold`, and
  `by_run`, which asks a run for what can't be inferred.
- `opset`: the opset that the gradient needs; `upgrade` and `downgrade` take a model to a newer and an older opset.
- `mode`: BatchNormalization and Dropout in training.
- `fixed_shapes`: sizes of inputs that the user fixes.
- `free_batch`: a batch that the model has fixed and the user frees.
"""

from onnxgrad_cli.passes.prepare.prepare import PREPARE

__all__ = ["PREPARE"]
