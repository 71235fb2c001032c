"""Convert parsed JSON to annotated Python types. The JSON may come from another program, so types are checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def decoded(kind: Any, value: Any, where: str = "it") -> Any:
    """Convert a JSON value to a dataclass, `tuple[X, ...]`, `dict[str, X]`, a union, text, a number or a bool.

    Args:
        kind: the annotation.
        value: the result of `json.loads`.
        where: the name of the value, for messages.

    Raises:
        ValueError: a value does not have the annotated type. The message says where it is.
    """
    if is_dataclass(kind):
        return _object(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None and NoneType in inner else decoded(inner[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(decoded(inner[0], each, f"{where}[{at}]") for at, each in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {name: decoded(inner[1], each, f"{where}[{name!r}]") for name, each in value.items()}
    if kind is float and type(value) in (int, float) and _is_finite(value):
        return float(value)
    if kind in (str, int, bool) and type(value) is kind:
        return value
    raise ValueError(f"{where} can't be {_short(value)}")


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} can't be {_short(value)}")
    hints = _hints(kind)
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    lacking = next((name for name in needed if name not in value), None)
    strange = next((name for name in value if name not in hints), None)
    if lacking is not None or strange is not None:
        raise ValueError(
            f"{where} has no '{lacking}'" if lacking is not None else f"{where} has an unknown entry {_short(strange)}"
        )
    return kind(**{name: decoded(hints[name], each, f"{where}.{name}") for name, each in value.items()})


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
