"""The registry of optimizers: their names, their state per weight, and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from onnxgrad_cli.common.catalogue import Catalogue, Documented
from onnxgrad_cli.common.settings import Option, declared, exactly
from onnxgrad_cli.emission.values import Val


class State(Protocol):
    """The state that an optimizer keeps for one weight.

    `state["m"]` is the value of a slot. It has the weight's shape and is zero before the first step. A value that is
    assigned to a slot replaces the old one at once and is kept for the next step.

    Attributes:
        rate: the learning rate, a scalar.
        count: the number of steps before this one, a scalar of the weight's type.
    """

    rate: Val
    count: Val

    def __getitem__(self, slot: str) -> Val: ...
    def __setitem__(self, slot: str, value: Val) -> None: ...
    def start(self, slot: str, value: float) -> None:
        """Set the value of a slot before the first step (default: zero). Call this before the slot is read."""


@dataclass(frozen=True)
class Optimizer(Documented):
    """An optimizer.

    Attributes:
        name: the name on the command line.
        function: `function(op, weight, gradient, state, **options)` returns the next weight. For 16-bit weights it
            computes in float32.
        slots: map from a slot to the description of its content. Some slots are kept only if an option requires them.
        options: the options of `function`.
        cycled: the option that a learning rate schedule may also change, such as the momentum or beta1; "" for none.
            `function` accepts a `Val` for this option.
    """

    name: str
    function: Callable[..., Any]
    slots: Mapping[str, str]
    options: tuple[Option, ...]
    cycled: str = ""

    def settings(self, given: Mapping[str, object]) -> dict[str, Any]:
        """Return the options for `function`.

        Raises:
            UsageError: an option does not exist, or a value has the wrong type.
        """
        return exactly(self.options, given, self.name)


OPTIMIZERS: Catalogue[Optimizer] = Catalogue(
    "optimizer",
    "optimizers",
    ["onnxgrad_cli.optimizers.descent", "onnxgrad_cli.optimizers.adaptive"],
    otherwise="`onnxgrad train` also has 'lbfgs'",
)
"""All optimizers whose step can be part of a training model, the simple ones first."""


def optimizer(
    name: str,
    *,
    slots: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    cycled: str = "",
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an optimizer; its keyword-only parameters are its options.

    Args:
        name: the name on the command line.
        slots: map from a slot to the description of its content. In the model, its name is `<weight>_<slot>`.
        options: map from an option to its description. Types and defaults are read from the function's signature.
        cycled: the option that a learning rate schedule may also change; "" for none.
        override: replace an optimizer with the same name instead of raising an error.

    Raises:
        OnnxgradError: an optimizer with this name exists, or an option is not documented.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        found = declared(function, options, f"optimizer '{name}'")
        OPTIMIZERS.add(name, Optimizer(name, function, dict(slots or {}), found, cycled), override)
        return function

    return register
