"""Models at their real size with random weights, as PyTorch modules and as their ONNX exports.

The benchmarks and the real-size tests take them from here. Each function builds its network with the same weights in
every process. A family is loaded when one of its networks is asked for: files of no framework need no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from benchmarks.models.files import chain, export, external

__all__ = ["chain", "export", "external"]

FAMILIES = ("perceptrons", "convolutional", "transformers", "recurrent", "graphs")


def __getattr__(name: str) -> Any:
    """A network's function, from whichever family has it."""
    if not name.startswith("_"):
        for family in FAMILIES:
            module = import_module(f"{__name__}.{family}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
