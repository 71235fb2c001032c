"""`Differentiation`: the settings of reverse-mode differentiation, and its record for the report and the checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onnxgrad_cli.autodiff.kernel_variants import KernelVariants
from onnxgrad_cli.emission.values import Fusion
from onnxgrad_cli.errors import Caution


@dataclass
class Cautions:
    """The cautions for the user about the result, to which every pass may add."""

    cautions: list[Caution] = field(default_factory=list)


@dataclass
class Differentiation(Cautions):
    """The settings and the record of reverse walks over a graph and the bodies in it.

    Attributes:
        straight_through: True if rounding to integers has the gradient of the identity.
        forward_stays: True if rules must not replace the forward node by a faster form.
        fusions: map from a value that several nodes compute together to the one rule for these nodes.
        kernel_variants: the choices for gradients that can be written in several forms.
        rules: map from ('domain::Op', source of the rule) to how often the rule was used.
        kinks: map from an operator to the convention that its rule uses at points without a derivative.
        partial: weights and inputs whose gradient is incomplete, because `stop_gradient` stops some of their paths to
            the loss.
    """

    straight_through: bool = False
    forward_stays: bool = False
    fusions: dict[str, Fusion] = field(default_factory=dict)
    kernel_variants: KernelVariants = field(default_factory=KernelVariants)
    rules: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinks: dict[str, str] = field(default_factory=dict)
    partial: list[str] = field(default_factory=list)
