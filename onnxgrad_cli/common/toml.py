"""Parse untrusted TOML. Large files, and keys that would take the parser minutes, are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MAX_BYTES = 2**22
"""Maximum size of a file in bytes. Larger files would take seconds, and a device such as /dev/zero has no end."""

PARTS = 100
"""Maximum number of parts of a dotted key. The parser's time grows with the square of the number of parts."""

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'")
_DEEP = re.compile(rf"(?:\.[ \t]*[\w-]+[ \t]*){{{PARTS}}}")


def load(path: str | Path) -> dict[str, Any]:
    """Parse a file, and return its content.

    Raises:
        OSError: the file can't be read.
        ValueError, RecursionError: the file is not TOML, is too large, or is nested too deeply.
    """
    import tomllib  # imported here because few commands need it

    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    text = data.decode()
    if _DEEP.search(_STRING.sub("_", text)):
        raise ValueError(f"a key has more than {PARTS} parts")
    return tomllib.loads(text)
