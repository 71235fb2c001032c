"""`Differentiation`: what a reverse walk is told, and what it records for the report and the proof."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onnxgrad_cli.autodiff.kernel_variants import KernelVariants
from onnxgrad_cli.emission.fusion import Fusion
from onnxgrad_cli.errors import Caution


@dataclass
class Cautions:
    """What every pass may note.

    Attributes:
        cautions: what a careful reader of the result should know.
    """

    cautions: list[Caution] = field(default_factory=list)


@dataclass
class Differentiation(Cautions):
    """The settings and the record of reverse walks over a graph and the bodies in it.

    Attributes:
        straight_through: whether rounding to integers counts as the identity.
        forward_stays: whether the forward nodes must stay as they are.
        fusions: a value that several nodes compute together -> the one rule for all of them.
        kernel_variants: which of several forms of a gradient are preferred, requested and written.
        rules: how often each rule was used, by 'domain::Op' and the rule's source.
        kinks: the convention that was followed where a derivative does not exist, by operator.
        partial: weights and inputs whose gradient leaves out paths, because `stop_gradient` declares so.
    """

    straight_through: bool = False
    forward_stays: bool = False
    fusions: dict[str, Fusion] = field(default_factory=dict)
    kernel_variants: KernelVariants = field(default_factory=KernelVariants)
    rules: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinks: dict[str, str] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)
