"""What a loss or an optimizer takes besides its operands: declared by a function's keywords, given by name.

Both tables read the options from the signatures of their functions, so that the formula and its options are one thing.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.synonyms import suggest_setting
from onnxgrad_cli.common.wording import ARGUMENTS
from onnxgrad_cli.errors import OnnxgradError, UsageError

Floats = np.ndarray | None
"""An option of several numbers: given as a number, a list, an array, or the .npy file that holds it."""

Length = float
"""An option that is a number of steps; as text it may be one of epochs, which the owner takes to steps first."""

Lengths = tuple[float, ...]
"""An option of several lengths; as text they are separated by slashes: 10/20, or 3e/6e."""

KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "Floats": "numbers, or a .npy file",
    "Length": "steps, a part of them all below 1, or epochs such as 3e",
    "Lengths": "lengths separated by slashes, such as 100/200, 0.5/0.75 or 3e/6e",
}
"""The kinds of option, by annotation, in words."""


@dataclass(frozen=True)
class Option:
    """What a function takes besides its operands.

    Attributes:
        name: as a keyword, with underscores.
        kind: a key of `KINDS`.
        default: the value where none is given.
        doc: what it does.
    """

    name: str
    kind: str
    default: Any
    doc: str

    def convert(self, value: object) -> Any:
        """`value` in the option's kind: a Python number, or a float64 array for `Floats`.

        Raises:
            UsageError: it is of another kind, or not finite, or the file can't be read.
        """
        if self.kind == "Floats":
            return self._floats(value)
        if self.kind == "Lengths":
            return self._lengths(value)
        if self.kind == "bool" and isinstance(value, bool):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            if self.kind in ("float", "Length"):
                return float(value)
            if self.kind == "int" and value == int(value):
                return int(value)
        raise self._unfit(value)

    def _lengths(self, value: object) -> tuple[float, ...]:
        parts: Any = str(value).split("/") if isinstance(value, (str, int, float)) else value
        try:
            lengths = tuple(map(float, parts))
        except (TypeError, ValueError):
            raise self._unfit(value) from None
        if not all(map(math.isfinite, lengths)):
            raise self._unfit(value)
        return lengths

    def _floats(self, value: object) -> np.ndarray:
        try:
            array = np.load(value) if isinstance(value, (str, Path)) else np.asarray(value)
            array = np.asarray(array, np.float64)
        except OSError as error:
            raise UsageError(f"option {named(self.name)}: '{value}' can't be read: {error.strerror or error}") from None
        except (TypeError, ValueError):
            raise self._unfit(value) from None
        if array.ndim > 1 or not np.isfinite(array).all():
            raise self._unfit(value)
        return array

    def _unfit(self, value: object) -> UsageError:
        return UsageError(f"option {named(self.name)} takes {KINDS[self.kind]}, not {value!r}", self.doc)


def declared(function: Callable[..., Any], docs: Mapping[str, str] | None, what: str) -> tuple[Option, ...]:
    """The options of a function: its keyword-only parameters, with what `docs` says of each.

    Raises:
        OnnxgradError: one is not documented, or of an unknown kind; `what` names the function.
    """
    checks.function(function, what)
    keywords = _keywords(function)
    if {p.name for p in keywords} != set(docs or {}) or any(_kind(p) not in KINDS for p in keywords):
        raise OnnxgradError(
            f"the options of {what} are not declared",
            f"each keyword needs a line in 'options' and one of the annotations {', '.join(KINDS)}",
        )
    return tuple(Option(p.name, _kind(p), p.default, (docs or {})[p.name]) for p in keywords)


def undocumented(function: Callable[..., Any], what: str) -> tuple[Option, ...]:
    """The options of a function that nobody has registered: its keyword-only parameters, of which nothing is said.

    Raises:
        UsageError: one is of an unknown kind, or has no default; `what` names the function.
    """
    keywords = _keywords(function)
    for p in keywords:
        if _kind(p) not in KINDS or p.default is p.empty:
            raise UsageError(
                f"{what}: its keyword '{p.name}' has no default, or is none of {', '.join(KINDS)}",
                f"such as {p.name}: float = 1.0",
            )
    return tuple(Option(p.name, _kind(p), p.default, "") for p in keywords)


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _kind(parameter: inspect.Parameter) -> str:
    """The annotation as it is written: a string where modules postpone it; else the type of the default."""
    annotation = type(parameter.default) if parameter.annotation is parameter.empty else parameter.annotation
    return "Floats" if annotation == Floats else str(getattr(annotation, "__name__", annotation))


def chosen(options: Sequence[Option], given: Mapping[str, object]) -> dict[str, Any]:
    """Of `given`, what is one of `options`, as keywords for the function.

    Raises:
        UsageError: a value is of another kind.
    """
    return {option.name: option.convert(given[option.name]) for option in options if option.name in given}


def exactly(options: Sequence[Option], given: Mapping[str, object], owner: str) -> dict[str, Any]:
    """All of `given` as keywords for the function that `owner` names.

    Raises:
        UsageError: it has no such option, or a value is of another kind.
    """
    known = [option.name for option in options]
    for name in given:
        if name not in known:
            raise unknown_setting(owner, name, known)
    return chosen(options, given)


def unknown_setting(owner: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a setting that `owner` does not have."""
    shown = named(name) if named(name) != name else f"'{name}'"
    return UsageError(f"{owner} has no option {shown}", suggest_setting(name, known, named))


def named(name: str) -> str:
    """Return a setting as messages name it, so that the command line shows hyphens in place of underscores."""
    if "_" not in name:
        return name
    return name.replace("_", "-") if name in ARGUMENTS else f"`{name}`"


def keyword(typed: str) -> str:
    """Return the Python keyword of a setting as it is typed, with hyphens.

    Raises:
        UsageError: it has underscores.
    """
    if "_" in typed:
        right = typed.replace("_", "-")
        raise UsageError(f"'{typed}' is spelled '{right}'", f"write {right}: settings have hyphens, as options do")
    return typed.replace("-", "_")


def spelled(text: str) -> tuple[str, dict[str, object]]:
    """Read `NAME[:KEY=VALUE,KEY=VALUE,...]`: a name, and options with underscores for hyphens.

    Raises:
        UsageError: it is not of that form.
    """
    name, _, rest = text.partition(":")
    return name.strip(), pairs(rest, text, "NAME:KEY=VALUE,KEY=VALUE")


def pairs(rest: str, text: str, form: str) -> dict[str, object]:
    """Read `KEY=VALUE,KEY=VALUE,...`, the rest of a `text` of some form: options with underscores for hyphens.

    Raises:
        UsageError: it is not of that form.
    """
    given: dict[str, object] = {}
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not key or not equals or not value:
            raise UsageError(f"'{text}' is not of the form {form}", f"'{pair}' is no KEY=VALUE")
        given[keyword(key)] = value_of(value)
    return given


def value_of(text: str) -> object:
    """A number, true or false, or else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.strip().lower(), text.strip())


def require(fits: bool, message: str) -> None:
    """Refuse an option's value.

    Raises:
        UsageError: it does not fit.
    """
    if not fits:
        name = re.match(r"\w*", message)[0]  # type: ignore[index]
        raise UsageError(f"option {named(name)}{message[len(name) :]}")
