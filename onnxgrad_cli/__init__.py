"""onnxgrad turns an ONNX inference model into a training model, in standard operators.

The names below are loaded when they are first used, so that the command line starts without loading onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from onnxgrad_cli.build import build
    from onnxgrad_cli.errors import OnnxgradError
    from onnxgrad_cli.pipeline import LossSpec, Options
    from onnxgrad_cli.registry import definition, no_gradient, rule

_HOMES = {
    "LossSpec": "pipeline",
    "OnnxgradError": "errors",
    "Options": "pipeline",
    "build": "build",
    "definition": "registry",
    "no_gradient": "registry",
    "rule": "registry",
}

__all__ = ["LossSpec", "OnnxgradError", "Options", "__version__", "build", "definition", "no_gradient", "rule"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxgrad_cli' has no attribute '{name}'")
    return getattr(import_module(f"onnxgrad_cli.{_HOMES[name]}"), name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("onnxgrad")
    except metadata.PackageNotFoundError:
        return "unknown"  # a source tree that is not installed


def __dir__() -> list[str]:
    return __all__
