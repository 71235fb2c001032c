"""The runtimes that a training model can be written for (targets), and the changes to the model for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import suggest, unknown_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.targets import cuda
from onnxgrad_cli.targets.blocked_channels import block_convolutions, suiting_form
from onnxgrad_cli.targets.portable import fit, portable_form


class Target(NamedTuple):
    """A runtime that a training model is written for.

    Attributes:
        prefer: a function that returns the preferred form of a gradient, or None; see `KernelVariants.prefer`.
        replace: a function that turns nodes into calls of functions with the runtime's own operators. It returns these
            nodes.
        fit: a function that rewrites nodes which the runtime supports only in a different form, or runs faster in
            a different form. It refuses nodes that have no supported form.
        branches: True if the runtime supports If.
        constant_axes: True if the axes of sums must be constants.
        fuses_convolutions: True if channels are scaled and shifted faster by a 1x1 convolution, which the runtime fuses
            with the activation after it, than by a product and a sum. Measured only for onnxruntime on the CPU.
        on_processor: True if onnxruntime runs the model on the CPU, for which it has few bfloat16 kernels.
    """

    prefer: Callable[[Op, str, str], str | None] = lambda op, name, default: None
    replace: Callable[[Graph], list[Node]] | None = None
    fit: Callable[[Graph], None] | None = None
    branches: bool = True
    constant_axes: bool = False
    fuses_convolutions: bool = False
    on_processor: bool = True


STANDARD = "standard"
"""The target that uses standard operators only, for any runtime."""

PORTABLE = "portable"
"""The target for browsers, Node.js, OpenVINO and mobile devices: uses only operators that all these runtimes have."""

TARGETS = {
    STANDARD: Target(fuses_convolutions=True),
    PORTABLE: Target(portable_form, fit=fit, branches=False, constant_axes=True),
    "ort-cpu": Target(suiting_form, block_convolutions, fuses_convolutions=True),
    "ort-cuda": Target(cuda.cuda_form, fit=cuda.fit, on_processor=False),
}


def find_target(name: str) -> Target:
    """Return the target called `name`.

    Raises:
        UsageError: no target has this name.
    """
    if name not in TARGETS:
        raise unknown_name(f"there is no target '{name}'", suggest(name, TARGETS, "targets"))
    return TARGETS[name]
