"""`LossSpec`, the user's choice of a loss, from Python or from the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import missing_value, wrong_type, wrong_value
from onnxgrad_cli.losses.registry import LOSSES, Loss, of_function, written_function

FORM = "[SET=]NAME[:OUTPUT[:LABEL[:WEIGHT[@SCHEDULE]]]]"

CODE = re.compile(r"(?P<file>.*?\.py):(?P<function>[^:]*)")
"""The form of a function in a Python file on the command line: FILE.py:FUNCTION."""

OF_SET = re.compile(r"(?P<set>[A-Za-z_][\w-]*)=(?P<rest>.+)")
"""The form of a value that belongs to a data set on the command line: SET=VALUE."""


@dataclass(frozen=True)
class LossSpec:
    """The user's choice of one loss.

    Attributes:
        name: the name of the loss, or its file with the suffix .onnx. If `function` is set, a name for this function.
        output: the model output that the loss is computed on; None for the default.
        label: the name of the label input; None for the default.
        weight: the factor of this loss in the sum of all losses.
        function: a function that computes the loss; see `losses.registry.of_function`.
        data: the name of the data set that the loss is computed on; "" if the data have no names.
        schedule: the schedule of the weight, in the form of `training.schedules.parse_schedule`. The weight is then an
            input of the training model, and `weight` is its highest value. "" for a constant weight.

    Raises:
        UsageError: no loss has this name, the function is not a loss, the weight is not a finite number, the name of
            the data set is not a word, or a weight with a schedule is not above 0.
    """

    name: str
    output: str | None = None
    label: str | None = None
    weight: float = 1.0
    function: Callable[..., Any] | None = None
    data: str = ""
    schedule: str = ""

    def __post_init__(self) -> None:
        checks.text("name", self.name)
        checks.text("output", self.output, optional=True)
        checks.text("label", self.label, optional=True)
        if not checks.is_number(self.weight):
            raise wrong_value(f"`losses`: the weight {self.weight!r} of '{self.name}' is not a finite number")
        checks.text("data", self.data)
        checks.text("schedule", self.schedule)
        if self.data:
            check_set("losses", self.data)
        if self.schedule and self.weight <= 0:
            message = f"`losses`: the weight {self.weight:g} of '{self.name}' has a schedule, so it must be above 0"
            raise wrong_value(message)
        self.loss  # noqa: B018  (looked up, for its errors)

    @property
    def loss(self) -> Loss | None:
        """The requested loss; None for a loss in an .onnx file, which is read when the loss is appended."""
        if self.function is not None:
            return of_function(self.function)
        return None if self.name.endswith(".onnx") else LOSSES.lookup(self.name)

    @property
    def typed(self) -> str:
        """The loss as it is typed on the command line. A Python function is written as FILE.py:FUNCTION."""
        code = getattr(written_function(self.function), "__code__", None) if self.function else None
        name = self.name if code is None else f"{code.co_filename}:{code.co_name}"
        parts = [(part or "").replace(":", "\\:") for part in (self.output, self.label)]
        share = f"{self.weight!r}" if self.weight != 1.0 or self.schedule else ""
        share += f"@{self.schedule}" * bool(self.schedule)
        text = ":".join([name, *parts, share]).rstrip(":")
        return f"{self.data}={text}" if self.data else text


@cache
def default_loss() -> LossSpec:
    """Return the loss that is used if the user names none.

    The result is always the same object, so that `is` distinguishes it from a loss that the user named.
    """
    return LossSpec("mse")


def as_losses(given: object) -> object:
    """Convert losses to a tuple of `LossSpec`.

    Args:
        given: a loss as it is typed on the command line, a function, a `LossSpec`, or an iterable of these. Anything
            else is returned unchanged.

    Raises:
        UsageError: a name is not the name of a loss, or a function is not a loss.
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
    r"""Parse a loss as it is typed: `[SET=]NAME[:OUTPUT[:LABEL[:WEIGHT[@SCHEDULE]]]]`. `\:` is an escaped colon.

    Args:
        text: the text. NAME may be a file that ends in .onnx, or a function in a Python file, FILE.py:FUNCTION.
        load: `load(FILE, FUNCTION)` returns a function from a Python file. None refuses Python files.

    Raises:
        UsageError: the loss doesn't exist, the text has too many parts, or the weight is not a finite number.
    """
    data, text = split_set(text, lambda rest: re.sub(r"(\.py|\.onnx)(:.*)?$", r"\1", rest))
    code, file = CODE.match(text), re.match(r".*?\.onnx(?=:|$)", text)
    named = code or file
    name, rest = (named[0], text[named.end() + 1 :]) if named else (text.partition(":")[0], text.partition(":")[2])
    parts = [part.replace("\\:", ":") or None for part in re.split(r"(?<!\\):", rest)]
    if len(parts) > 2 and "@" in (parts[2] or ""):  # a schedule has colons of its own
        parts[2:] = [":".join(part or "" for part in parts[2:])]
    if len(parts) > 3:
        raise wrong_value(f"`losses` '{text}' has too many parts", f"write {FORM}, and \\: for a colon")
    function = None
    if code:
        if load is None:
            hint = "pass the function itself, such as losses=focal"
            raise wrong_type(f"`losses` '{text}' refers to code in a file", hint)
        function = load(code["file"], code["function"])
        name = of_function(function).name
    elif name.endswith(".py"):
        raise missing_value(f"`losses` '{text}' names no function", f"name one: {name}:FUNCTION")
    elif not file:
        LOSSES.lookup(name)
    output, label, weight = [*parts, None, None][:3]
    weight, _, schedule = (weight or "").partition("@")
    try:
        share = float(weight or 1.0)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise wrong_value(f"`losses` '{text}': the weight '{weight}' is not a number", FORM)
    return LossSpec(name, output, label, share, function, data, schedule)


def split_set(text: str, file: Callable[[str], str] = str) -> tuple[str, str]:
    """Split SET=VALUE into the name of the data set and the value. The name is "" if there is none.

    Args:
        text: the text. If it names an existing file, it is a value without a name.
        file: a function that returns the part of a text that may be the name of a file.
    """
    found = OF_SET.fullmatch(text)
    return ("", text) if found is None or Path(file(text)).exists() else (found["set"], found["rest"])


def check_set(argument: str, name: str) -> None:
    """Check the name of a data set, with which the names of inputs begin.

    Args:
        argument: the argument that contains the name, for the error.
        name: the name.

    Raises:
        UsageError: the name contains a character other than letters, digits, _ and -, or begins with a digit or -.
    """
    if not OF_SET.fullmatch(f"{name}=value"):
        raise wrong_value(f"`{argument}`: '{name}' is not a name for a data set", "use letters, digits and _")


def settings_of(given: Mapping[str, object], *owners: str | None) -> dict[str, object]:
    """Return the settings of one loss. Settings for this loss, OWNER:NAME, override settings for all losses, NAME.

    Args:
        given: the settings as in `LossOptions.loss_options`.
        *owners: the names that OWNER can have for this loss: its output and its label.
    """
    own = {name.rpartition(":")[2]: value for name, value in given.items() if name.rpartition(":")[0] in owners}
    return {name: value for name, value in given.items() if ":" not in name} | own
