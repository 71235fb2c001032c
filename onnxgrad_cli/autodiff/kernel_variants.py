"""Kernel variants: choose one of several ways to write a gradient, by its shapes or by a measurement.

The ways to write a gradient are called its forms. All forms compute the same result. A rule names the forms, and the
default form for the shapes of the node. `onnxgrad tune` measures all forms on the shapes of a model, and the next build
uses the fastest form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import onnx

from onnxgrad_cli.common import toml
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import no_data, suggest, unknown_name, unreadable
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied
from onnxgrad_cli.ir.types import shape_of

TABLE = "kernel_variants"
"""The name of the TOML table that holds the choices in a file of `onnxgrad tune`."""


class VariantChoice(NamedTuple):
    """The choice of a form that a build has made for one gradient.

    Attributes:
        node: a copy of the forward node whose gradient is written.
        graph: the graph or body that the node is in.
        name: the operator and its gradient that has several forms, such as 'Conv weight gradient'.
        forms: the names of the forms that are possible for this node.
        taken: the form that was written.
        default: the form to use if none is requested: the one that the target prefers, or that suits the shapes.
        wanted: the operands of the node that get a gradient.
    """

    node: Node
    graph: Graph
    name: str
    forms: tuple[str, ...]
    taken: str
    default: str
    wanted: tuple[str, ...]


@dataclass
class KernelVariants:
    """The choices that a build makes among the forms of its gradients.

    Attributes:
        prefer: `prefer(op, name, default)` returns the form that suits the build's target, or None to use the form
            that suits the shapes.
        requested: map from a gradient to the form to write. The gradient is given by its `key`, which contains the
            shapes, or by its name ('Conv weight gradient'). A name applies to all nodes for which the form is possible.
        choices: map from the `key` of a gradient to the choice that was made.
    """

    prefer: Callable[[Op, str, str], str | None] = lambda op, name, default: None
    requested: Mapping[str, str] = field(default_factory=dict)
    choices: dict[str, VariantChoice] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, str]:
        """Map from the `key` of a gradient to its form, for each gradient that was written in a requested form."""
        return {
            place: choice.taken
            for place, choice in self.choices.items()
            if choice.taken in (self.requested.get(place), self.requested.get(choice.name))
        }

    def choose(self, op: Op, name: str, forms: Sequence[str], default: str) -> str:
        """Return the form to write for a gradient of `op.node`, and record the choice.

        Args:
            op: the emitter that will write it.
            name: the gradient that has several forms, such as 'weight gradient'.
            forms: the possible forms for this node.
            default: the form that suits the shapes of the node.

        Raises:
            UsageError: a form is requested that the gradient does not have.
        """
        if op.node is None:
            return default
        preferred = self.prefer(op, name, default)
        default = preferred if preferred and preferred in forms else default
        place, name = key(op.graph, op.node, name), f"{op.node.op_type} {name}"
        taken = self.requested.get(place, default)
        if taken not in forms:
            raise unknown_name(f"'{place}' has no form '{taken}'", suggest(taken, forms, "forms"))
        if place not in self.requested and self.requested.get(name) in forms:
            taken = self.requested[name]
        wanted = tuple(dict.fromkeys(filter(op.wanted, op.node.input)))
        node = copied(op.node)
        self.choices[place] = VariantChoice(node, op.graph, name, tuple(forms), taken, default, wanted)
        return taken


def load_tuned(path: Path) -> dict[str, str]:
    """Return the choices in a file that `onnxgrad tune` has written.

    Raises:
        OnnxgradError: the file can't be read.
        UsageError: the file contains no choices.
    """
    if path.exists() and not path.is_file():
        raise unreadable(f"'{path}' is not a file: it is a device, a pipe or a folder", "give the path of a file")
    try:
        found = toml.load(path)[TABLE]
        if all(isinstance(form, str) for form in found.values()):
            return dict(found)
    except OSError as error:
        raise unreadable(f"'{path}' can't be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass
    raise no_data(f"'{path}' contains no choices of kernel variants", "write such a file with `onnxgrad tune MODEL`")


def key(graph: Graph, node: Node, name: str) -> str:
    """Return a text with all facts that affect how long a gradient takes: operator, name, shapes and attributes.

    Gradients with the same text share a measurement of `onnxgrad tune`.
    """
    shapes = ", ".join(_shape(graph, value) for value in node.input)
    attributes = ", ".join(sorted(f"{a.name}={_value(a)}" for a in node.attribute))
    return f"{node.op_type} {name}: {'; '.join(filter(None, (shapes, attributes)))}"


def _shape(graph: Graph, value: str) -> str:
    shape = shape_of(graph.types.get(value)) if value else None
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


def _value(attribute: onnx.AttributeProto) -> str:
    value = onnx.helper.get_attribute_value(attribute)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
