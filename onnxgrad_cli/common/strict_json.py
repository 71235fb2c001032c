"""JSON as its standard has it, in which nothing is invisible.

What is no finite number is null: Python writes NaN, which other readers refuse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from onnxgrad_cli.common.visible import visible_json


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON.

    Args:
        value: mappings, lists and tuples of numbers, text and None.
        indent: how far what is inside something is moved in; None puts all on one line.
    """
    return visible_json(json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, indent=indent))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
