"""The passes, in the order in which they turn an inference model into a training model."""

from onnxgrad_cli.common.checks import conflicts
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.adapters import ADAPTERS, adapters_asked
from onnxgrad_cli.passes.backward import BACKWARD
from onnxgrad_cli.passes.cleanup import CLEANUP
from onnxgrad_cli.passes.declare_outputs import OUTPUTS
from onnxgrad_cli.passes.gradient_op import GRADIENT
from onnxgrad_cli.passes.identifiers import IDENTIFIERS
from onnxgrad_cli.passes.loss import LOSS
from onnxgrad_cli.passes.loss_scale import LOSS_SCALE
from onnxgrad_cli.passes.low_bit import FEW_BITS
from onnxgrad_cli.passes.optimizer import OPTIMIZER, options_of_steps
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.prepare import PREPARE
from onnxgrad_cli.passes.rematerialization import RECOMPUTE
from onnxgrad_cli.passes.sequential_chunks import IN_TURN
from onnxgrad_cli.passes.target import TARGET
from onnxgrad_cli.passes.yield_op import YIELD
from onnxgrad_cli.targets import STANDARD

PASSES = (PREPARE, LOSS, YIELD, BACKWARD, OUTPUTS, FEW_BITS, IN_TURN, CLEANUP)
"""The pipeline of `onnxgrad build`. The check (`verify`) runs after it, on the written model."""

_INSTEAD = {
    YIELD: GRADIENT,
    OUTPUTS: OUTPUTS._replace(summary="declares the inputs and outputs", needs=(GRADIENT.name,)),
}
COMPACT = tuple(_INSTEAD.get(step, step) for step in PASSES if step not in (BACKWARD, FEW_BITS, IN_TURN))
"""The pipeline of `onnxgrad build --as-gradient-op`. For its check (`verify`), the model is expanded first."""

_AFTER = {
    PREPARE.name: (ADAPTERS,),
    BACKWARD.name: (GRADIENT, LOSS_SCALE, RECOMPUTE),
    OUTPUTS.name: (OPTIMIZER,),
    CLEANUP.name: (TARGET, IDENTIFIERS),
}
EVERY = tuple(each for step in PASSES for each in (step, *_AFTER.get(step.name, ())))
"""All passes, including the optional ones, in the order in which they run."""


def pipeline_for(options: Options) -> tuple[Pass, ...]:
    """Return the passes that a build with these options runs, in order.

    Raises:
        UsageError: a target conflicts with an option that allows only standard operators, or an option of adapters is
            set without `lora`.
    """
    if options.target != STANDARD:
        others = {"`as_gradient_op`": options.as_gradient_op, "`training_info`": options.training_info}
        conflicts(f"`target={options.target!r}`", others, "leave out one of them")
    asked = {
        ADAPTERS: adapters_asked(options),
        LOSS_SCALE: options.loss_scale is not None,
        RECOMPUTE: options.recompute is not None,
        OPTIMIZER: bool(options.optimizer or options_of_steps(options)),
        TARGET: options.target != STANDARD,
        IDENTIFIERS: options.identifiers,
    }
    passes = COMPACT if options.as_gradient_op else PASSES
    return tuple(each for step in passes for each in (step, *filter(asked.get, _AFTER.get(step.name, ()))))


VERIFY = "verify"
SUMMARIES = {step.name: step.summary for step in EVERY} | {
    VERIFY: "proves the training model: checker, runtime, equal results, finite differences of the loss"
}
"""Map from the name of each step of a build to its description, in order."""
