"""How data become samples: which columns are which inputs, names of classes, pixels, normalisation, augmentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Augmentation, Resize
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.errors import UsageError

Transform = Callable[..., Mapping[str, Any]]
"""A function of a batch, input -> array, that gives it back; one of two parameters is given random numbers too."""


@dataclass(frozen=True)
class SampleOptions(KnownKeywords):
    """How data become samples; what a trained model says of it (see `Preprocessing`) holds where nothing else is asked.

    Attributes:
        columns: column -> the input or label that it is, where it is called otherwise.
        normalize: what numbers are made of mean 0 and deviation 1 by: 'auto' (of the training data, for each channel or
            column), 'imagenet', 'MEAN/STD' with one number or one for each channel or column, or 'none'; with
            'INPUT:' before it, it is of that input alone.
        augment: what is done to pictures in training: 'flip' (left and right, one in two), 'crop' (moved by up to an
            eighth of its size, black where nothing is left).
        balance: draw samples so that all classes are seen alike often, as PyTorch's WeightedRandomSampler.
        resize: what becomes of picture files of other proportions than the input; by default 'crop'.
        transform: a function of each batch.

    Raises:
        UsageError: a word or a type does not fit.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    normalize: tuple[str, ...] = ()
    augment: tuple[Augmentation, ...] = ()
    balance: bool = False
    resize: Resize | None = None
    transform: Transform | None = None

    def __post_init__(self) -> None:
        checks.mapping("columns", self.columns, "such as {'sentence': 'text'}")
        for column, feed in self.columns.items():
            checks.text("columns", feed)
            if list(self.columns.values()).count(feed) > 1:
                raise UsageError(f"`columns`: two columns are to be '{feed}', one of them '{column}'", "map one")
        for name, example in (("normalize", "normalize=('auto',)"), ("augment", "augment=('flip', 'crop')")):
            object.__setattr__(self, name, checks.tuple_of(name, getattr(self, name), str, f"such as {example}"))
        for each in self.augment:
            checks.one_of("augment", each, Augmentation)
        checks.flag("balance", self.balance)
        if self.resize is not None:
            checks.one_of("resize", self.resize, Resize)
        if self.transform is not None and not callable(self.transform):
            raise UsageError(
                f"`transform={self.transform!r}`: a function is wanted", "it takes and gives a dict of arrays"
            )
