"""The version of onnxgrad, and the optional packages, which a plain installation of onnxgrad does not install."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from typing import Any

from onnxgrad_cli.errors import UsageError

REQUIREMENTS = {
    "PIL": "pillow>=11",
    "jinja2": "jinja2>=3.1.6",
    "mpi4py": "mpi4py>=4",
    "pyarrow": "pyarrow>=18",
    "scipy": "scipy>=1.13",
    "tensorboardX": "tensorboardX>=2.6.1",
    "tokenizers": "tokenizers>=0.21.4",
    "torch": "torch>=2.13",
}
"""Top-level module of an optional package -> its pip requirement, with the version bound in pyproject.toml."""


def load_package(module: str, purpose: str, alternative: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: the module, such as 'pyarrow.parquet'.
        purpose: the feature that requires the module, as the subject of the message.
        alternative: another solution for the user; "" if there is none.

    Raises:
        UsageError: the package is not installed; the hint has the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError:
        package = REQUIREMENTS[module.partition(".")[0]].partition(">=")[0]
        hint = install_command(module) + (f", or {alternative}" if alternative else "")
        raise UsageError(f"{purpose} requires the package {package}", hint, code="missing_package") from None


def install_command(module: str) -> str:
    """Return the pip command that installs the package of a module.

    The command names the package, not an extra of onnxgrad, so that it works however onnxgrad was installed.
    """
    return f"pip install '{REQUIREMENTS[module.partition('.')[0]]}'"


@cache  # the lookup searches the folders of all packages
def tool_version() -> str:
    """Return the installed version, or 'unknown' for sources that are not installed."""
    try:
        return metadata.version("onnxgrad")
    except metadata.PackageNotFoundError:
        return "unknown"
