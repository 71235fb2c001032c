"""Kernel variants: where a gradient has several forms, one is chosen here, by shapes or by a measurement on a machine.

A rule names its forms and the one that it takes by the shapes it sees. `onnxgrad tune` measures them all on the shapes
of a model, and what it finds faster is chosen in the next build. All forms of a gradient compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import onnx

from onnxgrad_cli.common import toml
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied
from onnxgrad_cli.ir.types import shape_of

TABLE = "kernel_variants"
"""The table of a file of choices."""

OLD_TABLE = "lowerings"
"""The name of that table in older files."""


class VariantChoice(NamedTuple):
    """One choice that a build has made.

    Attributes:
        node: a copy of the forward node whose gradient is written.
        graph: the graph or body that the node is in.
        name: the gradient that has several forms, with its operator, such as 'Conv weight gradient'.
        forms: the names of these forms.
        taken: the form that was written.
        default: the form that the shapes, or else the target, suggest.
        wanted: the node's operands that get a gradient.
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
    """The choices of a build among the forms of its gradients.

    Attributes:
        prefer: `prefer(op, name, default)` gives the form that suits the build's target in place of the one that suits
            the shapes, or None where that is as good.
        requested: the form to write, by a gradient with its shapes as `key` writes it, or by the name of a gradient
            ('Conv weight gradient') for all shapes that have such a form.
        choices: every choice that was made, by its `key`.
    """

    prefer: Callable[[Op, str, str], str | None] = lambda op, name, default: None
    requested: Mapping[str, str] = field(default_factory=dict)
    choices: dict[str, VariantChoice] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, str]:
        """The forms that were requested and written, by the `key` of the choice."""
        return {
            place: choice.taken
            for place, choice in self.choices.items()
            if choice.taken in (self.requested.get(place), self.requested.get(choice.name))
        }

    def choose(self, op: Op, name: str, forms: Sequence[str], default: str) -> str:
        """The form to write of a gradient of `op.node`.

        Args:
            op: the emitter that will write it.
            name: the gradient that has several forms, such as 'weight gradient'.
            forms: the forms that this node has.
            default: the form that suits the node's shapes.

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
            raise UsageError(f"'{place}' has no form '{taken}'", suggest(taken, forms, "forms"))
        if place not in self.requested and self.requested.get(name) in forms:
            taken = self.requested[name]
        wanted = tuple(dict.fromkeys(filter(op.wanted, op.node.input)))
        node = copied(op.node)
        self.choices[place] = VariantChoice(node, op.graph, name, tuple(forms), taken, default, wanted)
        return taken


def load_tuned(path: Path) -> dict[str, str]:
    """The choices in a file that `onnxgrad tune` has written.

    Raises:
        UsageError: the file can't be read, or holds no choices.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"'{path}' is no file: it is a device, a pipe or a folder", "name the file")
    try:
        tables = toml.load(path)
        found = tables[TABLE] if TABLE in tables else tables[OLD_TABLE]
        if all(isinstance(form, str) for form in found.values()):
            return dict(found)
    except OSError as error:
        raise UsageError(f"'{path}' can't be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass
    raise UsageError(f"'{path}' holds no choices of kernel variants", "`onnxgrad tune MODEL` writes such files")


def key(graph: Graph, node: Node, name: str) -> str:
    """A gradient of a node with all that its time depends on: operator, name, shapes and attributes."""
    shapes = ", ".join(_shape(graph, value) for value in node.input)
    attributes = ", ".join(sorted(f"{a.name}={_value(a)}" for a in node.attribute))
    return f"{node.op_type} {name}: {'; '.join(filter(None, (shapes, attributes)))}"


def _shape(graph: Graph, value: str) -> str:
    shape = shape_of(graph.types.get(value)) if value else None
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


def _value(attribute: onnx.AttributeProto) -> str:
    value = onnx.helper.get_attribute_value(attribute)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
