"""Write and parse JSON that follows the standard, and convert it to annotated types. Invisible characters are escaped.

NaN and infinity are written as null, because other readers refuse Python's NaN. For text that is not UTF-8, protobuf
returns bytes; its invalid bytes are written as `\\xff`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from onnxgrad_cli.common.checks import is_number
from onnxgrad_cli.common.escape import escaped_json


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON.

    Args:
        value: mappings, lists and tuples of numbers, text, bytes and None.
        indent: the indentation of nested values; None writes everything on one line.
    """
    return escaped_json(json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent))


def loads(text: str | bytes) -> Any:
    """Parse JSON that another program may have written.

    Args:
        text: the JSON; bytes must be UTF-8.

    Raises:
        ValueError: the text is not JSON, or an object has a key twice (readers differ in which value they use).
        RecursionError: the JSON is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{twice}' occurs twice")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decoded(kind: Any, value: Any, where: str = "it") -> Any:
    """Convert a JSON value to a dataclass, `tuple[X, ...]`, `dict[str, X]`, a union, text, a number or a bool.

    The JSON may come from another program, so types are checked.

    Args:
        kind: the type to convert to.
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
    if kind is float and is_number(value):
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


_hints = cache(get_type_hints)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
