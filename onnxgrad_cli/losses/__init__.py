"""The losses: what a training model minimises, each a short function written with the same `op` as the rules.

A loss says what label it wants and returns one number per element or per sample; reduction, sample weights and sums
of several losses are the loss pass's business. Importing this package registers them all.
"""

from onnxgrad_cli.common.settings import Option
from onnxgrad_cli.losses.registry import LOSSES, Loss, loss
from onnxgrad_cli.losses.spec import LossSpec, parse_loss

__all__ = ["LOSSES", "Loss", "LossSpec", "Option", "loss", "parse_loss"]
