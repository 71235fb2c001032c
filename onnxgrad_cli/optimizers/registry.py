"""The table of optimizers: how each is called, what state it keeps for a weight, and what options it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Option, declared, exactly
from onnxgrad_cli.emission.values import Val


class State(Protocol):
    """What an optimizer knows of one weight besides its gradient.

    `state["m"]` is the value of a slot, of the weight's shape, zero before the first step; what is assigned to it is
    its value from then on, and in the next step.

    Attributes:
        rate: the learning rate, a scalar.
        count: how many steps were done before this one, a scalar of the weight's type.
    """

    rate: Val
    count: Val

    def __getitem__(self, slot: str) -> Val: ...
    def __setitem__(self, slot: str, value: Val) -> None: ...
    def start(self, slot: str, value: float) -> None:
        """Let a slot hold `value` instead of zero before the first step; to be called before it is read."""


@dataclass(frozen=True)
class Optimizer(Documented):
    """An optimizer.

    Attributes:
        name: what it is called on the command line.
        function: `function(op, weight, gradient, state, **options)`, which returns the next weight. For weights of 16
            bits it computes in float32.
        slots: slot -> what it holds. Some are kept only if an option asks for them.
        options: what it takes besides.
    """

    name: str
    function: Callable[..., Any]
    slots: Mapping[str, str]
    options: tuple[Option, ...]

    def settings(self, given: Mapping[str, object]) -> dict[str, Any]:
        """The options for `function`.

        Raises:
            UsageError: it has no such option, or a value is of another kind.
        """
        return exactly(self.options, given, self.name)


OPTIMIZERS: Catalogue[Optimizer] = Catalogue(
    "optimizer", "optimizers", [f"onnxgrad_cli.optimizers.{family}" for family in ("descent", "adaptive", "normalized")]
)
"""From the plain ones to those built on them."""


def optimizer(
    name: str,
    *,
    slots: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an optimizer; its keyword-only parameters are its options.

    Args:
        name: what it is called on the command line.
        slots: slot -> what it holds for each weight. In the model it is called `<weight>_<slot>`.
        options: option -> what it does. Kinds and defaults are read from the function's signature.
        override: replace an optimizer of this name instead of refusing.

    Raises:
        OnnxgradError: there is an optimizer of this name, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        found = declared(function, options, f"optimizer '{name}'")
        OPTIMIZERS.add(name, Optimizer(name, function, dict(slots or {}), found), override)
        return function

    return register
