"""The optimizer's step, appended to the gradients.

- `step`: the nodes of a step, including gradient clipping, the moving average of the weights and a dynamic loss scale.
- `groups`: parameter groups; `accumulation`: sums of gradients over several runs.
- `state`: the inputs that hold the optimizer's state.
- `split`: splits a training step before the optimizer into two models; `slices`: runs an optimizer's step on slices of
  weights.
"""

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import Options, StepOptions, UpdateOptions
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import StepRecord

__all__ = ["OPTIMIZER", "options_of_steps"]

FOR_STEPS = (
    "optimizer_options",
    "group",
    "clip_norm",
    "clip_value",
    "accumulate",
    "ema",
    "embed_state",
    "cycle_momentum",
)
"""Names of the options that configure the optimizer's step."""


def options_of_steps(options: StepOptions) -> list[str]:
    """Return the names of those options that configure the optimizer's step and are set."""
    defaults = Options()
    return [name for name in FOR_STEPS if getattr(options, name) != getattr(defaults, name)]


def _run(graph: Graph, options: UpdateOptions, training: StepRecord) -> bool:
    if not options.optimizer:
        raise UsageError(
            f"`{options_of_steps(options)[0]}` requires an optimizer", "choose an optimizer with `optimizer=NAME`"
        )
    from onnxgrad_cli.optimizers import LBFGS
    from onnxgrad_cli.passes.optimizer.step import append_step  # many builds don't need this module

    if options.optimizer == LBFGS.name:
        raise UsageError(
            "`optimizer='lbfgs'` can't be part of a training model, because an iteration runs the model several times "
            "on all samples",
            "use it in `onnxgrad train`, or choose an optimizer such as `optimizer='adam'`",
        )
    append_step(graph, options, training)
    return True


OPTIMIZER = Pass("optimizer", "with --optimizer: adds the optimizer's step", _run, ("outputs",))
