"""The version of onnxgrad."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache  # it is searched for in the folders of all packages
def tool_version() -> str:
    """Return the installed version, or 'unknown' for sources that are not installed."""
    try:
        return metadata.version("onnxgrad")
    except metadata.PackageNotFoundError:
        return "unknown"
