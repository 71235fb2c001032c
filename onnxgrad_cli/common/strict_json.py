"""JSON as its standard has it, in which nothing is invisible.

What is no finite number is null: Python writes NaN, which other readers refuse. Bytes are what protobuf gives out for a
text that is no UTF-8: such a name is written with its bytes as `\\xff`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from onnxgrad_cli.common.visible import visible_json


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON.

    Args:
        value: mappings, lists and tuples of numbers, text, bytes and None.
        indent: how far what is inside something is moved in; None puts all on one line.
    """
    return visible_json(json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent))


def loads(text: str | bytes) -> Any:
    """Parse JSON that another program may have written.

    Args:
        text: the JSON, in UTF-8 where it is bytes.

    Raises:
        ValueError: it is no JSON, or an object has a key twice: readers differ in which of the two values they take.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{twice}' is there twice")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
