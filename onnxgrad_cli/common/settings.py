"""The options of losses, optimizers and similar functions: a function's keywords declare them, users set them by name.

The registries read the options from the signatures of the functions, so that the two can't differ.
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
from onnxgrad_cli.common.flags import FLAGS
from onnxgrad_cli.common.synonyms import suggest_setting
from onnxgrad_cli.errors import OnnxgradError, UsageError, missing_value, unknown_name, unreadable, wrong_value

Floats = np.ndarray | None
"""The annotation of an option that takes one or several numbers: a number, a list, an array, or an .npy file."""

Length = float
"""The annotation of an option that is a number of steps.

A text such as '3e' means epochs. The function's registry converts it to steps.
"""

Lengths = tuple[float, ...]
"""The annotation of an option that takes several numbers of steps.

In a text, slashes separate them: '10/20' for steps, or '3e/6e' for epochs.
"""

KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "Floats": "numbers, or a .npy file",
    "Length": "a number of steps, a fraction of all steps, or a number of epochs such as 3e",
    "Lengths": "numbers of steps, fractions of all steps, or numbers of epochs, such as 100/200, 0.5/0.75 or 3e/6e",
}
"""Name of an option's annotation -> a description of the values that it takes."""


@dataclass(frozen=True)
class Option:
    """An option of a function.

    Attributes:
        name: the keyword, with underscores.
        kind: a key of `KINDS`.
        default: the default value.
        doc: the description of the option.
    """

    name: str
    kind: str
    default: Any
    doc: str

    def convert(self, value: object) -> Any:
        """Convert a value as the option's kind requires: to a Python number, or for `Floats` to a float64 array.

        Raises:
            UsageError: the value does not fit the kind or is not finite, or its .npy file can't be read.
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
            why = error.strerror or error
            raise unreadable(f"option {named(self.name)}: '{value}' can't be read: {why}") from None
        except (TypeError, ValueError):
            raise self._unfit(value) from None
        if array.ndim > 1 or not np.isfinite(array).all():
            raise self._unfit(value)
        return array

    def _unfit(self, value: object) -> UsageError:
        return wrong_value(f"option {named(self.name)} takes {KINDS[self.kind]}, not {value!r}", self.doc)


def declared(function: Callable[..., Any], docs: Mapping[str, str] | None, what: str) -> tuple[Option, ...]:
    """Return the options of a function: its keyword-only parameters, with the descriptions in `docs` (name -> text).

    Raises:
        OnnxgradError: an option has no description, or an annotation that is not in `KINDS`. The message names the
            function as `what`.
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
    """Return the options of an unregistered function: its keyword-only parameters, without descriptions.

    Raises:
        UsageError: an option has no default, or an annotation that is not in `KINDS`. The message names the function as
            `what`.
    """
    keywords = _keywords(function)
    for p in keywords:
        if _kind(p) not in KINDS or p.default is p.empty:
            raise missing_value(
                f"{what}: the keyword '{p.name}' needs a default, and one of the annotations {', '.join(KINDS)}",
                f"such as {p.name}: float = 1.0",
            )
    return tuple(Option(p.name, _kind(p), p.default, "") for p in keywords)


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _kind(parameter: inspect.Parameter) -> str:
    """Return the name of a parameter's annotation. Without an annotation, return the name of the default's type."""
    annotation = type(parameter.default) if parameter.annotation is parameter.empty else parameter.annotation
    return "Floats" if annotation == Floats else str(getattr(annotation, "__name__", annotation))


def chosen(options: Sequence[Option], given: Mapping[str, object]) -> dict[str, Any]:
    """Return those values of `given` that belong to `options`, converted, as keywords for the function.

    Raises:
        UsageError: a value does not fit its option.
    """
    return {option.name: option.convert(given[option.name]) for option in options if option.name in given}


def exactly(options: Sequence[Option], given: Mapping[str, object], owner: str) -> dict[str, Any]:
    """Return all values of `given`, converted, as keywords for the function. `owner` names the function in messages.

    Raises:
        UsageError: the function has no such option, or a value does not fit its option.
    """
    known = [option.name for option in options]
    for name in given:
        if name not in known:
            raise unknown_setting(owner, name, known)
    return chosen(options, given)


def unknown_setting(owner: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a setting that the function `owner` does not have."""
    shown = named(name) if named(name) != name else f"'{name}'"
    known = list(known)
    hint = suggest_setting(name, known, named) if known else f"{owner} takes no options"
    return unknown_name(f"{owner} has no option {shown}", hint)


def named(name: str) -> str:
    """Return the name of a setting for messages.

    A name with underscores is put in backquotes, so that the command line can show it with hyphens. If it is the name
    of an option, too, it has hyphens at once.
    """
    if "_" not in name:
        return name
    return name.replace("_", "-") if name in FLAGS else f"`{name}`"


def keyword(typed: str) -> str:
    """Convert the name of a setting as users type it, with hyphens, to the Python keyword, with underscores.

    Raises:
        UsageError: the typed name has underscores.
    """
    if "_" in typed:
        right = typed.replace("_", "-")
        raise unknown_name(f"'{typed}' is spelled '{right}'", f"write {right}: settings have hyphens, as options do")
    return typed.replace("-", "_")


def spelled(text: str) -> tuple[str, dict[str, object]]:
    """Parse `NAME[:KEY=VALUE,KEY=VALUE,...]` as a name and options. Hyphens in keys become underscores.

    Raises:
        UsageError: the text does not have this form.
    """
    name, _, rest = text.partition(":")
    return name.strip(), pairs(rest, text, "NAME:KEY=VALUE,KEY=VALUE")


def pairs(rest: str, text: str, form: str) -> dict[str, object]:
    """Parse `KEY=VALUE,KEY=VALUE,...`, the last part of `text`, as options. Hyphens in keys become underscores.

    Raises:
        UsageError: the text does not have this form.
    """
    given: dict[str, object] = {}
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not key or not equals or not value:
            raise wrong_value(f"'{text}' is not of the form {form}", f"'{pair}' is not KEY=VALUE")
        given[keyword(key)] = value_of(value)
    return given


def value_of(text: str) -> object:
    """Convert a text to a number, True or False if possible. Otherwise return the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.strip().lower(), text.strip())


def require(fits: bool, message: str) -> None:
    """Raise an error about an option's value unless `fits` is True. `message` begins with the name of the option.

    Raises:
        UsageError: `fits` is False.
    """
    if not fits:
        name = re.match(r"\w*", message)[0]  # type: ignore[index]
        raise wrong_value(f"option {named(name)}{message[len(name) :]}")
