"""The losses that a training model minimises: short functions that write nodes with an emitter, as gradient rules do.

A loss declares the kind of label that it requires, and returns one value per element or per sample. The loss pass
applies sample weights and the reduction, and sums several losses.
"""

from onnxgrad_cli.common.settings import Option
from onnxgrad_cli.losses.registry import LOSSES, Loss, loss
from onnxgrad_cli.losses.spec import LossSpec, parse_loss

__all__ = ["LOSSES", "Loss", "LossSpec", "Option", "loss", "parse_loss"]
