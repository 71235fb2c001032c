"""JSON as its standard has it: what is no finite number is null. Python writes NaN, which other readers refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, **how: Any) -> str:
    """A value as JSON.

    Args:
        value: mappings, lists and tuples of numbers, text and None.
        **how: see `json.dumps`.
    """
    return json.dumps(_finite(value), allow_nan=False, **how)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
