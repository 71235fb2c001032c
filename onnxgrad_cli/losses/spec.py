"""A loss as it is asked for: in Python, and as it is typed on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.registry import LOSSES, Loss, of_function

FORM = "NAME[:OUTPUT[:LABEL[:WEIGHT]]]"

CODE = re.compile(r"(?P<file>.*?\.py):(?P<function>[^:]*)")
"""A function in a Python file, as it is typed: FILE.py:FUNCTION."""


@dataclass(frozen=True)
class LossSpec:
    """One loss as asked for: its name or file, the output it judges, the label input, its share of the total.

    With a `function` that is the loss, and the name what it is called; see `losses.registry.of_function`.

    Raises:
        UsageError: there is no loss of this name (a file's ends in .onnx), the function is no loss, or the weight is no
            finite number.
    """

    name: str
    output: str | None = None
    label: str | None = None
    weight: float = 1.0
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        checks.text("name", self.name)
        checks.text("output", self.output, optional=True)
        checks.text("label", self.label, optional=True)
        if not checks.is_number(self.weight):
            raise UsageError(f"`losses`: the weight {self.weight!r} of '{self.name}' is no finite number")
        self.loss  # noqa: B018  (looked up, for its errors)

    @property
    def loss(self) -> Loss | None:
        """The loss that is meant; None for one in a file, which is read where it is used."""
        if self.function is not None:
            return of_function(self.function)
        return None if self.name.endswith(".onnx") else LOSSES.lookup(self.name)


def as_losses(given: object) -> object:
    """What stands for losses as a tuple of `LossSpec`: a name as it is typed, a function, or several of these.

    Raises:
        UsageError: there is no loss of a name, or a function is none.
    """
    if isinstance(given, (str, LossSpec)) or callable(given):
        given = (given,)
    if not isinstance(given, Iterable) or isinstance(given, (bytes, Mapping)):
        return given
    return tuple(_as_loss(each) for each in given)


def _as_loss(given: object) -> object:
    if isinstance(given, str):
        return parse_loss(given)
    if callable(given) and not isinstance(given, LossSpec):
        return LossSpec(of_function(given).name, function=given)
    return given


def parse_loss(text: str, load: Callable[[str, str], Callable[..., Any]] | None = None) -> LossSpec:
    r"""Read `NAME[:OUTPUT[:LABEL[:WEIGHT]]]`; `\:` is a plain colon.

    Args:
        text: NAME may be a file that ends in .onnx, or a function in a Python file, FILE.py:FUNCTION.
        load: gives the function of a file; without it, code is refused.

    Raises:
        UsageError: no such loss, too many parts, or a weight that is no finite number.
    """
    code, file = CODE.match(text), re.match(r".*?\.onnx(?=:|$)", text)
    named = code or file
    name, rest = (named[0], text[named.end() + 1 :]) if named else (text.partition(":")[0], text.partition(":")[2])
    parts = [part.replace("\\:", ":") or None for part in re.split(r"(?<!\\):", rest)]
    if len(parts) > 3:
        raise UsageError(f"`losses` '{text}' has too many parts", f"{FORM}; write \\: for a colon")
    function = None
    if code:
        if load is None:
            raise UsageError(f"`losses` '{text}' names code", "give the function itself, such as losses=focal")
        function = load(code["file"], code["function"])
        name = of_function(function).name
    elif not file:
        LOSSES.lookup(name)
    output, label, weight = [*parts, None, None][:3]
    try:
        share = float(weight or 1.0)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise UsageError(f"`losses` '{text}': the weight '{weight}' is no number", FORM)
    return LossSpec(name, output, label, share, function)


def settings_of(given: Mapping[str, object], *owners: str | None) -> dict[str, object]:
    """The settings of one loss: those of all, then those of its own, which are called OWNER:NAME.

    Args:
        given: `LossOptions.loss_options`.
        owners: what the loss goes by: the output it judges, its label.
    """
    own = {name.rpartition(":")[2]: value for name, value in given.items() if name.rpartition(":")[0] in owners}
    return {name: value for name, value in given.items() if ":" not in name} | own
