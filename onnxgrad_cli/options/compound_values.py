"""Values of options that have several parts, such as RANK:ALPHA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Recomputation
from onnxgrad_cli.errors import wrong_value

LossScale = float | Literal["dynamic"]
DYNAMIC: Literal["dynamic"] = "dynamic"
"""The value of the option for a loss scale that is adapted during training."""

RATE = "lr"
"""The key in `Group.options` whose value is a factor by which the group's learning rate is multiplied."""


@dataclass(frozen=True)
class LoraSpec:
    """The requested low-rank adapters.

    Attributes:
        rank: the rank of the adapters.
        alpha: the product of the LoRA matrices is multiplied by alpha / rank, or with the scaling 'rslora' by alpha /
            sqrt(rank). None: alpha equals the rank.

    Raises:
        UsageError: the rank is below 1, or alpha is not above 0.
    """

    rank: int
    alpha: float | None = None

    def __post_init__(self) -> None:
        checks.of_type("lora", self.rank, int, "a rank")
        if self.rank < 1:
            raise wrong_value(f"`lora`: a rank of {self.rank} leaves nothing to train", "8 is usual")
        if self.alpha is not None and not (checks.is_number(self.alpha) and self.alpha > 0):
            raise wrong_value(f"`lora`: alpha must be a positive number, not {self.alpha}", "by default it is the rank")

    def __str__(self) -> str:
        return str(self.rank) if self.alpha is None else f"{self.rank}:{self.alpha:g}"


@dataclass(frozen=True)
class RecomputeSpec:
    """The requested recomputation of forward values in the backward part.

    Attributes:
        kind: the values to compute again. 'elementwise': results of elementwise operators. 'block': all values between
            the values or nodes that match `pattern`. 'budget': enough values that the kept values take at most `size`
            bytes. 'optimal': the same, but a solver finds the values that take the fewest operations.
        pattern: for 'block', the pattern; 'auto' for the layers of the model.
        size: for 'budget' and 'optimal', the largest number of bytes to keep.

    Raises:
        UsageError: the kind doesn't exist, a block has no pattern, another kind has one, or the size is negative.
    """

    kind: Recomputation
    pattern: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, Recomputation)
        checks.text("pattern", self.pattern)
        checks.at_least("size", self.size, 0, whole=True)
        if bool(self.pattern) != (self.kind == "block"):
            raise wrong_value(f"`recompute`: the kind 'block' requires a pattern, and other kinds have none: {self!r}")

    def __str__(self) -> str:
        sized = f"{self.kind}:{self.size}B"
        return {"block": f"block:{self.pattern}", "budget": sized, "optimal": sized}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Group:
    """A requested parameter group.

    Attributes:
        pattern: the glob pattern of the weights, matched against names of weights and of modules that read them.
        options: the optimizer's options for these weights; `lr` is a factor by which the learning rate is multiplied.

    Raises:
        UsageError: the pattern is not a string, the options are not a mapping, or `lr` is not a valid factor.
    """

    pattern: str
    options: Mapping[str, object]

    def __post_init__(self) -> None:
        checks.text("pattern", self.pattern)
        checks.mapping("options", self.options, "such as Group('*.bias', {'weight_decay': 0})")
        factor = self.options.get(RATE, 1.0)
        if not checks.is_number(factor, 0):
            raise wrong_value(f"`group`: {RATE} takes a factor of the learning rate, not {factor!r}", "such as lr=0.1")

    def __str__(self) -> str:
        typed = (f"{name.replace('_', '-')}={value}" for name, value in self.options.items())
        return f"{self.pattern}:{','.join(typed)}"


def check_loss_scale(scale: object) -> LossScale:
    """Check that a loss scale is a number above zero or 'dynamic', and return it.

    Raises:
        UsageError: the value is neither.
    """
    if scale == DYNAMIC:
        return DYNAMIC
    if isinstance(scale, (int, float)) and checks.is_number(scale) and scale > 0:
        return scale
    raise wrong_value(f"`loss_scale` takes a number above 0 or '{DYNAMIC}', not {scale!r}", "such as 1024")
