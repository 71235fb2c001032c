"""The loss, appended to the model.

- `append`: the pass: label inputs, the losses, their reduction, weights and penalties.
- `file`: a loss that stands in a file of its own.
"""

from onnxgrad_cli.passes.loss.append import LOSS

__all__ = ["LOSS"]
