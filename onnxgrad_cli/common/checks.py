"""Checks of what a user hands in from Python, each of which names the argument in its message.

An argument stands in backquotes with its value, `mode='Train'`, which `wording.in_flags` turns into --mode Train.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

from onnxgrad_cli.errors import UsageError, suggest


def one_of(name: str, value: object, choices: Any) -> None:
    """Refuse a word that is none of a Literal's.

    Raises:
        UsageError: it is none of them; the hint has the nearest one.
    """
    known: tuple[str, ...] = get_args(choices)
    if not isinstance(value, str) or value not in known:
        alike = [word for word in known if word.casefold() == str(value).casefold()]
        near = alike[0] if alike else str(value)
        hint = suggest(near, known, "words", repr) if isinstance(value, str) else f"one of {_listed(known)} is wanted"
        raise UsageError(f"`{name}={value!r}` is none of {_listed(known)}", hint)


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(map(repr, words[:-1]))} and {words[-1]!r}"


def is_number(value: object, low: float = -math.inf, whole: bool = False) -> bool:
    """Whether a value is a finite number, not below `low`, and with `whole` an integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        return False
    try:
        return math.isfinite(value) and float(value) >= low
    except OverflowError:  # an integer of hundreds of digits
        return False


def at_least(name: str, value: object, low: float, whole: bool = False) -> None:
    """Refuse what is no finite number of `low` or more.

    Raises:
        UsageError: it is none.
    """
    if not is_number(value, low, whole):
        kind = "a whole number" if whole else "a finite number"
        raise UsageError(f"`{name}={value!r}`: {kind} of {low:g} or more is wanted")


def number_in(text: str) -> int | None:
    """The number that digits alone write, as many as 64 bits surely hold; None for any other text.

    `str.isdigit` takes superscripts, of which `int` makes no number, and nothing bounds how many digits there are.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def path(name: str, value: object) -> Path:
    """A path from a text, or from anything that names one.

    Raises:
        UsageError: it names none, or is empty, which would be the working directory.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(
            f"`{name}={value!r}`: a path is wanted, not {_article(type(value).__name__)}", "a text or a pathlib.Path"
        )
    if not os.fspath(value):
        raise UsageError(f"`{name}=''`: a path is wanted, and this is empty", "'.' is the working directory")
    return Path(value)


def path_or_none(name: str, value: object) -> Path | None:
    """The same of what may be left out."""
    return None if value is None else path(name, value)


def paths(name: str, values: object) -> list[Path]:
    """The paths of several.

    Raises:
        UsageError: they are one path, or one of them names none.
    """
    if isinstance(values, (str, os.PathLike)) or not isinstance(values, Iterable):
        raise UsageError(f"`{name}={values!r}`: a list is wanted, not {_article(type(values).__name__)}", "[path]")
    return [path(name, value) for value in values]


def threads(value: object) -> None:
    """Refuse a number of threads that this machine can't use: each takes memory, and many thousands take minutes.

    Raises:
        UsageError: it is no whole number of 1 or more, or beyond four for each core and 64 in all.
    """
    at_least("threads", value, 1, whole=True)
    cores = os.cpu_count() or 1
    if value > max(64, 4 * cores):  # type: ignore[operator]
        raise UsageError(
            f"`threads={value}` are more than make sense: this machine has {cores} cores",
            f"{cores} is usual, {max(64, 4 * cores)} the most",
        )


def of_type(name: str, value: object, wanted: type | tuple[type, ...], words: str) -> None:
    """Refuse a value of another type; `words` say which is wanted.

    Raises:
        UsageError: it is of another type.
    """
    if not isinstance(value, wanted):
        raise UsageError(f"`{name}={value!r}`: {words} is wanted, not {_article(type(value).__name__)}")


def _article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        UsageError: it is neither.
    """
    of_type(name, value, bool, "True or False")


def function(value: object, what: str) -> None:
    """Refuse what can't be called; `what` says what it was given as.

    Raises:
        UsageError: it is no function.
    """
    if not callable(value):
        raise UsageError(f"{what}: {value!r} is no function", "decorate a function, or give one by its name")


def text(name: str, value: object, optional: bool = False) -> None:
    """Refuse what is no string, nor, with `optional`, None.

    Raises:
        UsageError: it is neither.
    """
    of_type(name, value, (str, type(None)) if optional else str, "a string or None" if optional else "a string")


def tuple_of(name: str, value: object, kind: type, example: str) -> tuple[Any, ...]:
    """A sequence of things of one type, as a tuple.

    Args:
        name: of the argument.
        value: what was given for it; one thing alone is refused, for a string is a sequence of strings too.
        kind: the type of each.
        example: what is to be written, as a hint.

    Raises:
        UsageError: it is no sequence, or something in it is of another type.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, set, frozenset)):
        raise UsageError(f"`{name}={value!r}`: a tuple is wanted, not {_article(type(value).__name__)}", example)
    for each in value:
        if not isinstance(each, kind):
            raise UsageError(f"`{name}`: {each!r} is no {kind.__name__}", example)
    return tuple(value)


def mapping(name: str, value: object, example: str) -> None:
    """Refuse what is no mapping from strings.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"`{name}={value!r}`: a dict is wanted, not {_article(type(value).__name__)}", example)
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"`{name}`: the key {key!r} is no string", example)


def sizes(name: str, key: str, given: Iterable[object], least: int, symbols: bool = False) -> None:
    """Refuse sizes of dimensions that are none, or below `least`; with `symbols` a name may stand for one.

    Raises:
        UsageError: one is no whole number of `least` or more.
    """
    for size in given:
        if not (is_number(size, least, whole=True) or (symbols and isinstance(size, str))):
            hint = "a size is a whole number of 1 or more" + ("" if least else ", or 0 for a past that is empty")
            raise UsageError(f"`{name}`: '{key}' can't have size {size!r}", hint)
