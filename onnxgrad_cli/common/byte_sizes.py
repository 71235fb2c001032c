"""Sizes in bytes as they are typed."""

from __future__ import annotations

from onnxgrad_cli.errors import UsageError

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_of(text: str, what: str) -> int:
    """The bytes that a text such as '512MB' names.

    Args:
        text: as it is typed.
        what: what takes a size, for the message.

    Raises:
        UsageError: it is no number, negative, or of an unknown unit.
    """
    number = text.rstrip("".join(UNITS).lower() + "".join(UNITS).upper())
    unit = {each.lower(): size for each, size in UNITS.items()}.get(text[len(number) :].strip().lower() or "b")
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if unit is None or not 0 <= size < float("inf"):
        hint = f"a number and one of {', '.join(UNITS)}, such as 512MB"
        raise UsageError(f"{what} takes a size, not '{text}'", hint)
    return int(size * unit)
