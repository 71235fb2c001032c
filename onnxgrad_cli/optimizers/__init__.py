"""The optimizers: what a step does with a gradient, each a short function written with the same `op` as the rules.

An optimizer turns a weight and its gradient into the next weight, and keeps state in named slots; declaring, storing
and naming these is the optimizer pass's business. Importing this package registers them all.
"""

from onnxgrad_cli.optimizers.registry import OPTIMIZERS, Optimizer, State, optimizer

__all__ = ["OPTIMIZERS", "Optimizer", "State", "optimizer"]
