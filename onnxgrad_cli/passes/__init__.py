"""The passes, in the order in which they make a training model of an inference model."""

from onnxgrad_cli.passes.backward import BACKWARD
from onnxgrad_cli.passes.cleanup import CLEANUP
from onnxgrad_cli.passes.loss import LOSS
from onnxgrad_cli.passes.outputs import OUTPUTS
from onnxgrad_cli.passes.prepare import PREPARE
from onnxgrad_cli.passes.yield_op import YIELD

PASSES = (PREPARE, LOSS, YIELD, BACKWARD, OUTPUTS, CLEANUP)
"""The pipeline of `onnxgrad build`; `verify` follows it, on the model as it was written."""

VERIFY = "verify"
SUMMARIES = {step.name: step.summary for step in PASSES} | {
    VERIFY: "the training model proved: checker, runtime, the original's results, differences of the loss"
}
"""What every step of a build does, in order."""
