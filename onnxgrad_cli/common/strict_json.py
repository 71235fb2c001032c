"""Write and parse JSON that follows the standard. Invisible characters are escaped.

NaN and infinity are written as null, because other readers refuse Python's NaN. For text that is not UTF-8, protobuf
returns bytes; its invalid bytes are written as `\\xff`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

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
