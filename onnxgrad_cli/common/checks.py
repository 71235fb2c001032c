"""Check and convert arguments that users pass from Python. The error message names the argument.

The argument and its value are in backquotes, such as `mode='Train'`, so that `flags.as_cli_flags` can replace them by
--mode Train.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, get_args

from onnxgrad_cli.errors import conflict, suggest, unknown_name, wrong_value


def one_of(name: str, value: object, choices: Any) -> None:
    """Check that the value of the argument `name` is one of the strings of a typing.Literal, `choices`.

    Raises:
        UsageError: the value is none of them. The hint names a similar string, or the valid ones.
    """
    known: tuple[str, ...] = get_args(choices)
    if not isinstance(value, str) or value not in known:
        alike = [word for word in known if word.casefold() == str(value).casefold()]
        near = alike[0] if alike else str(value)
        hint = suggest(near, known, "words", repr) if isinstance(value, str) else f"expected one of {_listed(known)}"
        raise wrong_value(f"`{name}={value!r}` is none of {_listed(known)}", hint)


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(map(repr, words[:-1]))} and {words[-1]!r}"


def is_number(value: object, low: float = -math.inf, whole: bool = False) -> bool:
    """Return True if a value is a finite number, not a bool, and at least `low`.

    With `whole`, it must be an integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        return False
    try:
        return math.isfinite(value) and float(value) >= low
    except OverflowError:  # an integer of hundreds of digits
        return False


def at_least(name: str, value: object, low: float, whole: bool = False) -> None:
    """Check that the value of the argument `name` is a finite number and at least `low`; with `whole`, an integer.

    Raises:
        UsageError: it is not.
    """
    within(name, value, whole=whole, least=low)


def within(
    name: str, value: object, *, whole: bool = False, least: float | None = None, above: float | None = None,
    most: float | None = None, below: float | None = None, example: str = "",
) -> None:  # fmt: skip
    """Check that a value is a finite number within bounds.

    Args:
        name: the name of the argument, for the message.
        value: the value of the argument.
        whole: True to accept integers only.
        least, above: the lower bound: `least` is inclusive, `above` exclusive.
        most, below: the upper bound: `most` is inclusive, `below` exclusive.
        example: a valid value, for the hint.

    Raises:
        UsageError: the value is not such a number.
    """
    low = -math.inf if least is None else least
    fits = is_number(value, low, whole) and (above is None or value > above)  # type: ignore[operator]
    if fits and (most is None or value <= most) and (below is None or value < below):  # type: ignore[operator]
        return
    kind = "a whole number" if whole else "a finite number"
    bounds = f" of {least:g} or more" if least is not None else f" above {above:g}" if above is not None else ""
    bounds += f" and below {below:g}" if below is not None else ""
    if least is not None and most is not None:
        bounds = f" from {least:.15g} to {most:.15g}"
    raise wrong_value(f"`{name}={value!r}`: expected {kind}{bounds}", f"such as {example}" if example else None)


def number_in(text: str) -> int | None:
    """Convert a text of 1 to 18 digits to an integer. Return None for any other text.

    18 digits fit in 64 bits. `str.isdigit` can't do this check: it accepts superscripts, which `int` can't convert, and
    any number of digits.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of(text: str, what: str = "`memory`") -> int:
    """Convert a text such as '512MB' to a number of bytes.

    Args:
        text: the text that the user typed.
        what: the option that takes the size, for the error message.

    Raises:
        UsageError: the text is not a number, is negative, or has an unknown unit.
    """
    number = text.rstrip("".join(UNITS).lower() + "".join(UNITS).upper())
    unit = {each.lower(): size for each, size in UNITS.items()}.get(text[len(number) :].strip().lower() or "b")
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if unit is None or not 0 <= size < float("inf"):
        hint = f"give a number and one of {', '.join(UNITS)}, such as 512MB"
        raise wrong_value(f"{what} must be a size, not '{text}'", hint)
    return int(size * unit)


def path(name: str, value: Any) -> Path:
    """Convert a string or a path-like object to a Path.

    Raises:
        UsageError: the value has a different type; or it is empty, which pathlib would take for the working directory.
    """
    of_type(name, value, (str, os.PathLike), "a path", "a text or a pathlib.Path")
    if not os.fspath(value):
        raise wrong_value(f"`{name}=''`: expected a path, got an empty string", "'.' is the working directory")
    return Path(value)


def path_or_none(name: str, value: object) -> Path | None:
    """Convert a value to a Path as `path` does; return None if the value is None."""
    return None if value is None else path(name, value)


def paths(name: str, values: object) -> list[Path]:
    """Convert a list of strings or path-like objects to a list of Paths.

    Raises:
        UsageError: the value is a single path instead of a list, or an element is not a path.
    """
    if isinstance(values, (str, os.PathLike)) or not isinstance(values, Iterable):
        raise wrong_value(
            f"`{name}={values!r}`: expected a list, got {_article(type(values).__name__)}", "such as [path]"
        )
    return [path(name, value) for value in values]


def threads(value: object) -> None:
    """Check that a number of threads is reasonable. Each thread takes memory, and starting thousands takes minutes.

    Raises:
        UsageError: the number is not an integer of at least 1, or it is larger than both 64 and four per core.
    """
    at_least("threads", value, 1, whole=True)
    cores = os.cpu_count() or 1
    if value > max(64, 4 * cores):  # type: ignore[operator]
        raise wrong_value(
            f"`threads={value}` is too large: this machine has {cores} cores",
            f"choose at most {max(64, 4 * cores)}; {cores} is usual",
        )


def of_type(name: str, value: object, wanted: type | tuple[type, ...], words: str, hint: str | None = None) -> None:
    """Check that the value of the argument `name` has the type `wanted`, which `words` describes for the message.

    Raises:
        UsageError: the value has a different type.
    """
    if not isinstance(value, wanted):
        raise wrong_value(f"`{name}={value!r}`: expected {words}, got {_article(type(value).__name__)}", hint)


def _article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def flag(name: str, value: object) -> None:
    """Check that the value of the argument `name` is True or False.

    Raises:
        UsageError: it is neither.
    """
    of_type(name, value, bool, "True or False")


def function(value: object, what: str) -> None:
    """Check that an object can be called. `what` names the argument in the message.

    Raises:
        UsageError: the object can't be called.
    """
    if not callable(value):
        raise wrong_value(f"{what}: {value!r} is not a function", "decorate a function, or give one by its name")


def text(name: str, value: object, optional: bool = False) -> None:
    """Check that the value of the argument `name` is a string; with `optional`, it may also be None.

    Raises:
        UsageError: the value has a different type.
    """
    of_type(name, value, (str, type(None)) if optional else str, "a string or None" if optional else "a string")


def tuple_of(name: str, value: object, kind: type, example: str) -> tuple[Any, ...]:
    """Convert a sequence or set to a tuple, after checking that all elements have the same type.

    Args:
        name: the name of the argument.
        value: the value of the argument. A single string is refused, although it is a sequence of strings, too.
        kind: the type of each element.
        example: a valid value, for the hint.

    Raises:
        UsageError: the value is neither a sequence nor a set, or an element has a different type.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise wrong_value(f"`{name}={value!r}`: expected a tuple, got {_article(type(value).__name__)}", example)
    for each in value:
        if not isinstance(each, kind):
            raise wrong_value(f"`{name}`: {each!r} is not {_article(kind.__name__)}", example)
    return tuple(value)


def mapping(name: str, value: Any, example: str) -> None:
    """Check that the value of the argument `name` is a mapping whose keys are strings.

    Raises:
        UsageError: it is not; `example` is a valid value, for the hint.
    """
    of_type(name, value, Mapping, "a dict", example)
    for key in value:
        if not isinstance(key, str):
            raise wrong_value(f"`{name}`: the key {key!r} is not a string", example)


def conflicts(subject: str, others: Mapping[str, bool], hint: str = "leave one of them out") -> None:
    """Check that an argument is not combined with arguments that exclude it.

    Args:
        subject: the argument that the user has given, as messages name it.
        others: name of an argument that can't be combined with `subject` -> True if the user has given it, too.
        hint: the fix.

    Raises:
        UsageError: one of `others` is given.
    """
    for other, given in others.items():
        if given:
            raise conflict(f"{subject} can't be combined with {other}", hint)


def sizes(name: str, key: str, given: Iterable[object], least: int, symbols: bool = False) -> None:
    """Check the sizes of dimensions that a user has set.

    Args:
        name: the argument, for the message.
        key: the input or symbol that has the sizes, for the message.
        given: the sizes.
        least: the smallest valid size.
        symbols: True to also allow names of symbolic dimensions.

    Raises:
        UsageError: a size is not an integer, or is below `least`.
    """
    for size in given:
        if not (is_number(size, least, whole=True) or (symbols and isinstance(size, str))):
            hint = "a size is a whole number of 1 or more" + ("" if least else ", or 0 for an empty past")
            raise wrong_value(f"`{name}`: '{key}' can't have size {size!r}", hint)


@dataclass(frozen=True)
class KnownKeywords:
    """Base class of dataclasses that raise a UsageError for unknown keywords.

    Type checkers still use the dataclass's `__init__`.
    """

    def __new__(cls, *_: object, **given: object) -> Self:
        """Check that each keyword is a field, before `__init__` is called.

        Raises:
            UsageError: a keyword is not a field; the hint gives similar names.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown_name(f"`{cls.__name__}` has no option '{name}'", suggest(name, known, "options"))
        return super().__new__(cls)
