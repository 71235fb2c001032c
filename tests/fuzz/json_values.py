"""Changes in what JSON held, whatever it means."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz import hostile

VALUES = (
    None, -1, 10**30, 2**63, 1.5, float("nan"), True, "x", [], {}, 0, 1, [1, 2], {"a": 1}, "F64", 1e300, [[]],
    "/etc/passwd", "../x", [None], 2**31, 10**11,
)  # fmt: skip


def change(value: Any, rng: Random) -> str:
    """Change something in what JSON held; says what."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    inner = value[key]
    if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
        return f"{key} > {change(inner, rng)}"
    if isinstance(value, dict) and rng.random() < 0.2:
        del value[key]
        return f"no {key}"
    if isinstance(value, dict) and rng.random() < 0.1:
        value[hostile.string(rng)] = value.pop(key)
        return f"{key} is called otherwise"
    value[key] = deepcopy(rng.choice((*VALUES, hostile.string(rng))))  # the next change must not change `VALUES`
    return f"{key} = {str(value[key])[:30]!r}"


def text_of(value: Any) -> str:
    """JSON with escapes of what is no text by itself."""
    return json.dumps(value)
