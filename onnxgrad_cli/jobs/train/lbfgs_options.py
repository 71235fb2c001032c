"""Check the options of a training with L-BFGS, and refuse each option that has no meaning for it."""

from __future__ import annotations

from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.optimizers import LBFGS
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.train import Course
from onnxgrad_cli.training.distributed.communicator import Communicator
from onnxgrad_cli.training.steps.full_batch import WHO

LINE_SEARCH = "its line search finds the length of each step"
EXACT = "its line search requires the gradient of the loss itself"
SAME = "its iterations require the same samples"
SAME_LOSS = "its iterations require the same loss"

UNUSED = {
    "learning_rate": LINE_SEARCH,
    "schedule": LINE_SEARCH,
    "group": "it takes one step with all weights",
    "clip_norm": EXACT,
    "clip_value": EXACT,
    "accumulate": "it sums the gradients of all batches anyway",
    "loss_scale": "it does not train float16 weights",
    "ema": "it ends at a minimum, so no average is needed",
    "use_ema": "it ends at a minimum, so no average is needed",
    "lora_dropout": "each run would have a different loss",
    "balance": SAME,
    "augment": SAME,
    "memory": "use a smaller `batch_size`, which gives the same result",
}
"""Option -> the reason why L-BFGS does not use it."""


def check_lbfgs(options: Options, course: Course, link: Communicator) -> None:
    """Check that L-BFGS is installed and can use all options that are set.

    Raises:
        UsageError: scipy is missing, an option has no meaning for L-BFGS, or several processes train together.
    """
    load_package("scipy.optimize", WHO, "another optimizer")
    LBFGS.function(**LBFGS.settings(options.optimizer_options))
    parts = ((options, Options()), (course, Course()), (course.samples, Course().samples))
    for name, reason in UNUSED.items():
        for part, default in parts:
            if hasattr(part, name) and getattr(part, name) != getattr(default, name):
                hint = "leave it out, or use another optimizer"
                raise conflict(f"`{name}` can't be combined with {WHO}: {reason}", hint)
    if len({spec.data for spec in options.losses}) > 1:
        raise conflict(f"{WHO} can't be combined with several data sets", "use another optimizer")
    if scheduled := [spec.name for spec in options.losses if spec.schedule]:
        raise conflict(
            f"{WHO} can't be combined with a scheduled weight of the loss {scheduled[0]}: {SAME_LOSS}",
            "give it a constant weight, or use another optimizer",
        )
    if link.world > 1:
        raise conflict(f"{WHO} trains in one process, not in {link.world}", "start one process")
