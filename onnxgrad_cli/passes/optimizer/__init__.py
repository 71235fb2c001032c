"""The optimizer's step, appended to the gradients.

- `step`: the pass.
- `groups`: parameter groups; `clipping`, `accumulation`, `ema`, `dynamic_loss_scale`: what a step does besides.
- `state`: the inputs that hold the optimizer's state.
- `split`: a training step cut in two models, before the optimizer; `slices`: an optimizer's step on slices of weights.
"""

from onnxgrad_cli.passes.optimizer.step import OPTIMIZER

__all__ = ["OPTIMIZER"]
