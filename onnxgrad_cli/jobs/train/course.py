"""How a model is trained, as a user asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Init
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data import (
    SampleOptions,
    SequenceOptions,
)
from onnxgrad_cli.training.steps.base import RATE


@dataclass(frozen=True)
class Course(KnownKeywords):
    """How a model is trained; the defaults are those of the command line.

    Attributes:
        epochs: how often all samples are seen.
        max_steps: after how many steps it ends, where epochs are more; None is never. What was begun of an epoch is
            judged as one, and a run that goes on with more steps goes on in its middle.
        batch_size: how many of them a step takes.
        shuffle: take the samples in another order each epoch; otherwise in that of the data.
        learning_rate, schedule: the rate, and how it changes from step to step.
        init: how weights begin: 'keep' their stored values, or drawn as 'xavier', 'he' or 'normal'.
        seed: of the order of the samples, of weights that are drawn, and of what the model draws at random.
        metrics: what is measured on the validation data besides the loss; () is what suits the loss. The best epoch is
            that with the best of the first one named here, or where none is, that with the least validation loss; of
            equal ones the first. Without validation data the last epoch counts.
        patience: after how many epochs without a better validation it ends; None is never.
        eval_every: how many steps lie between judgements on the validation data, which are told, logged and drawn,
            and decide nothing: the best epoch, patience and schedule go by those at the ends of epochs; 0: these alone.
        save_every: how many steps lie between checkpoints; 0: they are written after each epoch.
        use_ema: evaluate and write the moving averages (EMA) that `Options.ema` keeps, in place of the weights.
        keep_mode: evaluate and write the model in the mode in which it came; else BatchNormalization and Dropout are
            in inference mode, however they were trained.
        provider, threads: what it runs on; see `Trainer`.
        prefix, val_prefix: what the names in the data have before those of the inputs.
        sequences: how text and lists of tokens become samples.
        samples: how data become samples: columns, names of classes, pictures, normalization, balance.
        classes: how many the last layer is to tell apart, with weights drawn anew; None: as many as it does.
        memory: the bytes that a step may take, beyond what the process and its data take: what is computed again, and
            in how many runs a step is taken, is then chosen so; None: no limit.
        reset: glob patterns of trained weights that are drawn anew, by `init`, or 'xavier' where that is 'keep'.

    Raises:
        UsageError: there is no such field, or a word, a number or a type does not fit; the message names it.
    """

    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    shuffle: bool = True
    learning_rate: float = RATE
    schedule: str = "constant"
    init: Init = "keep"
    seed: int = 0
    metrics: tuple[str, ...] = ()
    patience: int | None = None
    eval_every: int = 0
    save_every: int = 0
    use_ema: bool = False
    keep_mode: bool = False
    provider: str = "cpu"
    threads: int | None = None
    prefix: str = ""
    val_prefix: str = ""
    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)
    classes: int | None = None
    reset: tuple[str, ...] = ()
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 1), ("eval_every", 0), ("save_every", 0)):
            checks.at_least(name, getattr(self, name), low, whole=True)
        for name in ("max_steps", "patience", "memory"):
            if getattr(self, name) is not None:
                checks.at_least(name, getattr(self, name), 1, whole=True)
        if self.threads is not None:
            checks.threads(self.threads)
        if not checks.is_number(self.learning_rate):
            raise UsageError(f"`learning_rate={self.learning_rate!r}`: a finite number is wanted")
        checks.one_of("init", self.init, Init)
        checks.at_least("seed", self.seed, 0, whole=True)
        object.__setattr__(
            self, "metrics", checks.tuple_of("metrics", self.metrics, str, "such as metrics=('accuracy',)")
        )
        checks.flag("use_ema", self.use_ema)
        checks.flag("shuffle", self.shuffle)
        checks.flag("keep_mode", self.keep_mode)
        for name in ("schedule", "provider", "prefix", "val_prefix"):
            checks.text(name, getattr(self, name))
        if self.classes is not None:
            checks.at_least("classes", self.classes, 1, whole=True)
        object.__setattr__(self, "reset", checks.tuple_of("reset", self.reset, str, "such as reset=('*.head.*',)"))
        checks.of_type("sequences", self.sequences, SequenceOptions, "SequenceOptions(...)")
        checks.of_type("samples", self.samples, SampleOptions, "SampleOptions(...)")
        if self.samples.balance and not self.shuffle:
            raise UsageError("`balance` draws samples at random, and `shuffle=False` takes them in order", "choose one")
