"""The passes, in the order in which they make a training model of an inference model."""

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.adapters import ADAPTERS, adapters_asked
from onnxgrad_cli.passes.backward import BACKWARD
from onnxgrad_cli.passes.cleanup import CLEANUP
from onnxgrad_cli.passes.few_bits import FEW_BITS
from onnxgrad_cli.passes.gradient_op import GRADIENT
from onnxgrad_cli.passes.identifiers import IDENTIFIERS
from onnxgrad_cli.passes.in_turn import IN_TURN
from onnxgrad_cli.passes.loss import LOSS
from onnxgrad_cli.passes.loss_scale import LOSS_SCALE
from onnxgrad_cli.passes.optimizer import OPTIMIZER
from onnxgrad_cli.passes.outputs import OUTPUTS
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.prepare import PREPARE
from onnxgrad_cli.passes.rematerialization import RECOMPUTE
from onnxgrad_cli.passes.target import TARGET
from onnxgrad_cli.passes.yield_op import YIELD
from onnxgrad_cli.targets import STANDARD

PASSES = (PREPARE, LOSS, YIELD, BACKWARD, OUTPUTS, OPTIMIZER, FEW_BITS, IN_TURN, CLEANUP, IDENTIFIERS)
"""The pipeline of `onnxgrad build`; `verify` follows it, on the model as it was written."""

_INSTEAD = {YIELD: GRADIENT, OUTPUTS: OUTPUTS._replace(summary="inputs and outputs declared", needs=(GRADIENT.name,))}
COMPACT = tuple(_INSTEAD.get(step, step) for step in PASSES if step not in (BACKWARD, FEW_BITS, IN_TURN))
"""The pipeline of `onnxgrad build --as-gradient-op`; `verify` expands the model first."""

_AFTER = {PREPARE: (ADAPTERS,), BACKWARD: (GRADIENT, LOSS_SCALE, RECOMPUTE), CLEANUP: (TARGET,)}
EVERY = tuple(each for step in PASSES for each in (step, *_AFTER.get(step, ())))
"""Every pass there is."""


def pipeline_for(options: Options) -> tuple[Pass, ...]:
    """The passes of a build.

    Raises:
        UsageError: a target is asked for with what only standard operators can be written in, or something of
            adapters without them.
    """
    for option in ("as_gradient_op", "training_info"):
        if getattr(options, option) and options.target != STANDARD:
            raise UsageError(f"`target={options.target!r}` does not go with `{option}`", "leave one of them out")
    asked = {
        ADAPTERS: adapters_asked(options),
        LOSS_SCALE: options.loss_scale is not None,
        RECOMPUTE: options.recompute is not None,
        TARGET: options.target != STANDARD,
    }
    passes = COMPACT if options.as_gradient_op else PASSES
    return tuple(each for step in passes for each in (step, *filter(asked.get, _AFTER.get(step, ()))))


VERIFY = "verify"
SUMMARIES = {step.name: step.summary for step in EVERY} | {
    VERIFY: "the training model proved: checker, runtime, the original's results, differences of the loss"
}
"""What every step of a build does, in order."""
