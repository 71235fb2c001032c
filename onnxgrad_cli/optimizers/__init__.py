"""The optimizers: short functions that write nodes with an emitter, as gradient rules do.

An optimizer computes the next weight from a weight and its gradient, and keeps state in named slots. The optimizer pass
declares, stores and names these slots.
"""

from onnxgrad_cli.optimizers.lbfgs import LBFGS
from onnxgrad_cli.optimizers.registry import OPTIMIZERS, Optimizer, State, optimizer

__all__ = ["LBFGS", "OPTIMIZERS", "Optimizer", "State", "optimizer"]
