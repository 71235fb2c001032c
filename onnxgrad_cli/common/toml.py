"""TOML of a stranger: a file of some megabytes at most, without keys that take the parser minutes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MOST = 2**22
"""Bytes of a file: more take seconds, and a device has no end."""

PARTS = 100
"""Of a dotted key, at most: the parser takes the square of their number."""

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'")
_DEEP = re.compile(rf"(?:\.[ \t]*[\w-]+[ \t]*){{{PARTS}}}")


def load(path: str | Path) -> dict[str, Any]:
    """What a file says.

    Raises:
        OSError: it can't be read.
        ValueError, RecursionError: it is no TOML, too large, or nested too deep.
    """
    import tomllib  # which few commands need

    with open(path, "rb") as file:
        data = file.read(MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"it has more than {MOST:,} bytes")
    text = data.decode()
    if _DEEP.search(_STRING.sub("_", text)):
        raise ValueError(f"a key has more than {PARTS} parts")
    return tomllib.loads(text)
