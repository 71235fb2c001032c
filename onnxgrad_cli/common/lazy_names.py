"""Load the names of a package when they are first used, so that importing the package is fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of a package.

    Args:
        package: the name of the package.
        names: module -> the names, separated by blanks, that the package exports from this module.
    """
    homes = {name: module for module, listed in names.items() for name in listed.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"onnxgrad_cli.{homes[name]}"), name)

    return sorted(homes), load
