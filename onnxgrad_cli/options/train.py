"""Options of a training run."""

from __future__ import annotations

from dataclasses import field

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Init
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.options.build import MEMORY, OPTIMIZER, OUTPUT, TRAINED
from onnxgrad_cli.options.data import DATA, SampleOptions, SequenceOptions
from onnxgrad_cli.options.declare import check, option, options_class

LEARNING_RATE = 1e-3
"""The default learning rate."""

NOT_OF_TRAINING = frozenset({
    "yield_", "keep_outputs", "grad_of_input", "training_info", "as_gradient_op", "identifiers", "embed_state",
    "cycle_momentum",
})  # fmt: skip
"""Build options that `train` sets itself: they decide how the training model is written."""

DEFAULT_OPTIMIZER = "adam"
"""The optimizer of `train` if `optimizer` is not set."""

EVALUATION, RUNTIME = "Evaluation", "Runtime"
"""Headings in `--help-all`."""


@options_class
class Course(checks.KnownKeywords):
    """Options of a training run. The defaults are the same as on the command line.

    `init` and `seed` have the same meaning as in `Options`. If `init` is 'keep', weights that match `reset` are drawn
    with the method 'xavier'. The best epoch is the one with the best value of the first metric, or if there is no
    metric, with the lowest validation loss. Ties go to the earlier epoch. Without validation data the last epoch is the
    best.

    Raises:
        UsageError: a field doesn't exist, or a value does not fit; the message names the field.
    """

    epochs: int = option(default=10, help="Number of passes over the training data.", common=True, least=1)
    max_steps: int | None = option(
        default=None,
        help="End the training after N steps, even in the middle of an epoch.",
        details="The incomplete epoch is evaluated like a complete one. If the run is resumed with more steps, it "
        "continues in the middle of this epoch.",
        least=1,
        shown="no limit",
    )
    batch_size: int = option(default=32, help="Samples per training step.", common=True, least=1)
    shuffle: bool = option(
        default=True, help="Shuffle the samples in each epoch, or keep the order of the data.", section=DATA
    )
    learning_rate: float = option(
        default=LEARNING_RATE,
        help="Learning rate; the peak value if the schedule warms up.",
        common=True,
        flags=("--lr", "--learning-rate"),
        metavar="RATE",
    )
    schedule: str = option(
        default="constant",
        help="Schedule of the learning rate, such as cosine or cosine:warmup=100; see `onnxgrad list schedules`.",
        section=OPTIMIZER,
        metavar="NAME[:KEY=VALUE,...]",
        complete="training.schedules:SCHEDULES",
    )
    init: Init = "keep"
    seed: int = 0
    metrics: tuple[str, ...] = option(
        default=(),
        help="Metric to report on the validation data; the first one decides which epoch is best.",
        common=True,
        flags=("--metric",),
        metavar="NAME|FILE.onnx|FILE.py:FUNCTION",
        shown="depends on the loss",
        example="('accuracy',)",
        parse="training.python_metric:parse_metric",
        complete="training.metrics:METRICS",
        code=True,
    )
    patience: int | None = option(
        default=None,
        help="Stop after N epochs in a row without improvement; by default, all epochs are run.",
        common=True,
        least=1,
    )
    eval_every: int = option(
        default=0,
        help="Evaluate every N steps, in addition to the end of each epoch. These results are logged, and don't decide "
        "which epoch is best.",
        section=EVALUATION,
        least=0,
        shown="only at the end of each epoch",
    )
    save_every: int = option(
        default=0,
        help="Write a checkpoint every N steps, in addition to the end of each epoch.",
        section=OUTPUT,
        least=0,
        shown="only at the end of each epoch",
    )
    use_ema: bool = option(
        default=False,
        help="Evaluate and write the moving averages of the weights that --ema keeps, instead of the weights.",
        section=EVALUATION,
    )
    keep_mode: bool = option(
        default=False,
        help="In evaluations and in the written model, leave BatchNormalization and Dropout in the mode stored in "
        "MODEL, instead of inference mode.",
        section=OUTPUT,
    )
    provider: str = option(
        default="cpu", help="Execution provider of onnxruntime, such as cpu or cuda.", section=RUNTIME, metavar="NAME"
    )
    threads: int | None = option(
        default=None,
        help="Number of CPU threads.",
        section=RUNTIME,
        least=1,
        shown="all cores",
    )
    prefix: str = option(
        default="",
        help="Prefix of the names in --data: with train_, input x is read from train_x.",
        section=DATA,
        metavar="TEXT",
    )
    val_prefix: str = option(
        default="",
        help="Prefix of the names in --val: with test_, input x is read from test_x.",
        section=DATA,
        metavar="TEXT",
    )
    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)
    classes: int | None = option(
        default=None,
        help="Replace the last layer by one with N classes and new weights.",
        common=True,
        least=1,
    )
    reset: tuple[str, ...] = option(
        default=(),
        help="Start from new random values for the weights that match, instead of the stored values.",
        section=TRAINED,
        metavar="GLOB",
        example="('*.head.*',)",
    )
    memory: int | None = option(
        default=None,
        help="Memory that a training step may use, such as 500MB, in addition to the memory of the process and its "
        "data.",
        details="onnxgrad recomputes values and splits the step into runs to stay within the limit.",
        section=MEMORY,
        metavar="SIZE",
        least=1,
        shown="no limit",
        parse="common.checks:bytes_of",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.threads is not None:
            checks.threads(self.threads)
        checks.one_of("init", self.init, Init)
        checks.at_least("seed", self.seed, 0, whole=True)
        checks.of_type("sequences", self.sequences, SequenceOptions, "SequenceOptions(...)")
        checks.of_type("samples", self.samples, SampleOptions, "SampleOptions(...)")
        if self.samples.balance and not self.shuffle:
            raise conflict(
                "`balance` can't be combined with `shuffle=False`, because it draws samples at random", "choose one"
            )
