"""Options about data: how files are converted to samples, and samples to batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Augmentation, Resize
from onnxgrad_cli.errors import conflict, missing_value, wrong_type
from onnxgrad_cli.options.declare import check, option, options_class

DATA = "Data"
"""The heading of these options in `--help-all`."""

Transform = Callable[..., Mapping[str, Any]]
"""The user's function that changes batches. It takes a batch (input -> array), and returns a batch.

If it has a second parameter, it gets a numpy.random.Generator in training, and None otherwise.
"""


@options_class
class SequenceOptions(checks.KnownKeywords):
    """Options of the conversion of text and lists of tokens to samples.

    Raises:
        UsageError: a value does not fit.
    """

    SECTION = DATA

    tokenizer: Path | None = option(
        default=None,
        help="A tokenizer.json, or its folder. It converts text in the data to tokens. The text is in the column "
        "'text', in the columns 'prompt' and 'completion', or in the column 'messages'.",
        metavar="FILE|DIR",
    )
    max_length: int | None = option(
        default=None,
        help="Truncate samples to N tokens.",
        least=2,
        shown="no limit",
    )
    pack: bool = option(default=False, help="Concatenate samples into rows of --max-length tokens.")
    pad_id: int | None = option(
        default=None,
        help="Token id that pads shorter samples.",
        metavar="TOKEN",
        least=0,
        shown="the tokenizer's, or 0",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.pack and self.max_length is None:
            raise missing_value("`pack` requires the number of tokens per row", "add `max_length=TOKENS`")


@options_class
class SampleOptions(checks.KnownKeywords):
    """Options of the columns that inputs are read from, and of preprocessing, augmentation and sampling.

    These options override the preprocessing that a trained model stores (see `Preprocessing`).

    Raises:
        UsageError: a value does not fit.
    """

    SECTION = DATA

    columns: Mapping[str, str] = option(
        default_factory=dict,
        help="Read the model's input (or label) INPUT from the data column COLUMN.",
        flags=("--map",),
        metavar="COLUMN=INPUT",
        example="{'sentence': 'text'}",
    )
    normalize: tuple[str, ...] = option(
        default=(),
        help="Subtract a mean from pictures or columns, and divide them by a standard deviation.",
        details="'auto' computes both from the training data, for each channel or column. A value with INPUT: applies "
        "to this input only.",
        metavar="[INPUT:]imagenet|MEAN/STD|none",
        shown="as the model was trained",
        example="('auto',)",
    )
    augment: tuple[Augmentation, ...] = option(
        default=(),
        help="Change pictures at random in training. flip: mirror them left to right. crop: shift them by up to an "
        "eighth of their size.",
        metavar="flip,crop",
        separator=",",
        example="('flip', 'crop')",
    )
    balance: bool = option(
        default=False,
        help="Draw the samples of each epoch at random, so that all classes occur equally often.",
        details="Samples are drawn with replacement, as by PyTorch's WeightedRandomSampler.",
    )
    resize: Resize | None = option(
        default=None,
        help="Fit picture files whose proportions differ from the model's input: crop their edges, or stretch them.",
        shown="crop",
    )
    transform: Transform | None = option(
        default=None,
        help="Change each batch with a Python function, which takes and returns a dict: input -> numpy array.",
        metavar="FILE.py:FUNCTION",
        function=True,
    )

    def __post_init__(self) -> None:
        check(self)
        for column, feed in self.columns.items():
            checks.text("columns", feed)
            if list(self.columns.values()).count(feed) > 1:
                raise conflict(f"`columns`: two columns are mapped to '{feed}', one of them '{column}'", "map only one")
        if self.transform is not None and not callable(self.transform):
            raise wrong_type(
                f"`transform={self.transform!r}`: expected a function",
                "give one that takes and returns a dict of arrays",
            )
