"""Parse sizes in bytes."""

from __future__ import annotations

from onnxgrad_cli.errors import UsageError

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of(text: str, what: str) -> int:
    """Convert a text such as '512MB' to a number of bytes.

    Args:
        text: the text that the user typed.
        what: the option that takes the size, for the error message.

    Raises:
        UsageError: the text is not a number, is negative, or has an unknown unit.
    """
    number = text.rstrip("".join(UNITS).lower() + "".join(UNITS).upper())
    unit = {each.lower(): size for each, size in UNITS.items()}.get(text[len(number) :].strip().lower() or "b")
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if unit is None or not 0 <= size < float("inf"):
        hint = f"give a number and one of {', '.join(UNITS)}, such as 512MB"
        raise UsageError(f"{what} must be a size, not '{text}'", hint)
    return int(size * unit)


def memory_size(text: str) -> int:
    """Convert the text of the option `memory` to a number of bytes; see `bytes_of`."""
    return bytes_of(text, "`memory`")
