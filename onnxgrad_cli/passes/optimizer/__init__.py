"""The optimizer's step, appended to the gradients.

- `step`: what the pass appends.
- `groups`: parameter groups; `clipping`, `accumulation`, `ema`, `dynamic_loss_scale`: what a step does besides.
- `state`: the inputs that hold the optimizer's state.
- `split`: a training step cut in two models, before the optimizer; `slices`: an optimizer's step on slices of weights.
"""

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options, StepOptions, UpdateOptions
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import StepRecord

__all__ = ["OPTIMIZER"]

FOR_STEPS = ("optimizer_options", "group", "clip_norm", "clip_value", "accumulate", "ema", "embed_state")
"""Options that say how a step is taken."""


def _run(graph: Graph, options: UpdateOptions, training: StepRecord) -> bool:
    if not options.optimizer:
        _refuse_options(options)
        return False
    from onnxgrad_cli.passes.optimizer.step import append_step  # which many builds don't need

    append_step(graph, options, training)
    return True


def _refuse_options(options: StepOptions) -> None:
    defaults = Options()
    for name in FOR_STEPS:
        if getattr(options, name) != getattr(defaults, name):
            raise UsageError(f"`{name}`: there is no optimizer", "choose one with `optimizer=NAME`")


OPTIMIZER = Pass("optimizer", "the optimizer's step, if one is asked for", _run, ("outputs",))
