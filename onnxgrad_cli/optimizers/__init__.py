"""The optimizers: short functions that compute the next weight, written with the same `op` as the rules.

An optimizer turns a weight and its gradient into the next weight, and keeps state in named slots. The optimizer
pass declares, stores and names these slots. Importing this package registers all optimizers.
"""

from onnxgrad_cli.optimizers.lbfgs import LBFGS
from onnxgrad_cli.optimizers.registry import OPTIMIZERS, Optimizer, State, optimizer

__all__ = ["LBFGS", "OPTIMIZERS", "Optimizer", "State", "optimizer"]
