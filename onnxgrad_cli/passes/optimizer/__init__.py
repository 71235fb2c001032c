"""The optimizer's step, appended to the gradients.

- `step`: the nodes of a step, including gradient clipping, the moving average of the weights and a dynamic loss scale.
- `groups`: parameter groups; `accumulation`: sums of gradients over several runs.
- `state`: the inputs that hold the optimizer's state.
- `split`: splits a training step before the optimizer into two models; `slices`: runs an optimizer's step on slices of
  weights.
"""

from dataclasses import fields

from onnxgrad_cli.errors import conflict, missing_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.options import OptimizerOptions, Options, UpdateOptions
from onnxgrad_cli.record import StepRecord


def is_optimizer_asked(options: OptimizerOptions) -> bool:
    """Return True if an optimizer or an option of its step is set."""
    return bool(options.optimizer or _set_options(options))


def _set_options(options: OptimizerOptions) -> list[str]:
    """Return the names of those options that configure the optimizer's step and are set."""
    usual, names = Options(), (field.name for field in fields(OptimizerOptions))
    others = {"optimizer", "loss_scale"}
    return [name for name in names if name not in others and getattr(options, name) != getattr(usual, name)]


def append_optimizer(graph: Graph, options: UpdateOptions, training: StepRecord) -> None:
    """With --optimizer: append the optimizer's step."""
    if not options.optimizer:
        raise missing_value(
            f"`{_set_options(options)[0]}` requires an optimizer", "choose an optimizer with `optimizer=NAME`"
        )
    from onnxgrad_cli.optimizers import LBFGS
    from onnxgrad_cli.passes.optimizer.step import append_step  # many builds don't need this module

    if options.optimizer == LBFGS.name:
        raise conflict(
            "`optimizer='lbfgs'` can't be part of a training model, because an iteration runs the model several times "
            "on all samples",
            "use it in `onnxgrad train`, or choose an optimizer such as `optimizer='adam'`",
        )
    append_step(graph, options, training)
