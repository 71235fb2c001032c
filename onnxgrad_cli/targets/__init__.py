"""The runtimes that a training model can be written for, and what is done for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.targets import cuda
from onnxgrad_cli.targets.blocked import block_convolutions, suiting_form
from onnxgrad_cli.targets.portable import fit, portable_form


def _no_form(op: Op, name: str, default: str) -> str | None:
    return None


class Target(NamedTuple):
    """A runtime that a training model is written for.

    Attributes:
        prefer: the form of a gradient that suits it, by the name of what has several; see `KernelVariants`.
        replace: lets functions that call the runtime's own operators compute nodes; returns these nodes.
        fit: writes otherwise what the runtime has, or is faster at, in another form, and refuses what it has not.
        branches: whether the runtime has If.
        constant_axes: whether it wants to know the axes of sums when it loads a model.
        fuses_convolutions: whether convolutions of single pixels that take in what follows them are faster there than
            products and sums: measured for onnxruntime on processors alone.
        on_processor: whether onnxruntime runs it on a processor, for which it has few kernels of bfloat16.
    """

    prefer: Callable[[Op, str, str], str | None] = _no_form
    replace: Callable[[Graph], list[Node]] | None = None
    fit: Callable[[Graph], None] | None = None
    branches: bool = True
    constant_axes: bool = False
    fuses_convolutions: bool = False
    on_processor: bool = True


STANDARD = "standard"
"""The target that is any runtime."""

PORTABLE = "portable"
"""The target that is the runtimes of browsers, Node, OpenVINO and mobile devices: it takes what all of them have."""

TARGETS = {
    STANDARD: Target(fuses_convolutions=True),
    PORTABLE: Target(portable_form, fit=fit, branches=False, constant_axes=True),
    "ort-cpu": Target(suiting_form, block_convolutions, fuses_convolutions=True),
    "ort-cuda": Target(cuda.cuda_form, fit=cuda.fit, on_processor=False),
}


def find_target(name: str) -> Target:
    """A target by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in TARGETS:
        raise UsageError(f"there is no target '{name}'", suggest(name, TARGETS, "targets"))
    return TARGETS[name]
