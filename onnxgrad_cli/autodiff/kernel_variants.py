"""Where a gradient has several forms, one of them is chosen here: by shape, or as a measurement on a machine has it.

A rule names its forms and the one that it takes by the shapes it sees. `onnxgrad tune` measures them all on the shapes
of a model, and what it finds faster is chosen in the next build. All forms of a gradient compute the same.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import NodeProto

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import shape_of

if TYPE_CHECKING:
    from onnxgrad_cli.emission.emitter import Op


TABLE = "lowerings"
"""The table of the file that holds the choices."""


@dataclass(frozen=True)
class VariantChoice:
    """A choice that a build has made.

    Attributes:
        node: the forward node whose gradient it is, as it was then.
        graph: the graph or body that the node is in.
        name: what has several forms, such as 'Conv weight gradient'.
        forms: their names.
        taken: the one that was written.
        default: the one that follows from the shapes.
        wanted: the node's operands that get a gradient.
    """

    node: NodeProto
    graph: Graph
    name: str
    forms: tuple[str, ...]
    taken: str
    default: str
    wanted: tuple[str, ...]


@dataclass
class KernelVariants:
    """The choices of a build.

    Attributes:
        prefer: the form that suits what a model is written for, of what its name says; None where none does.
        asked: what is to be chosen, by a gradient with its shapes as `key` writes it, or by the name of a gradient
            for all shapes that have such a form.
        made: what was chosen, by the key.
    """

    prefer: Callable[[Op, str], str | None] = lambda op, name: None
    asked: Mapping[str, str] = field(default_factory=dict)
    made: dict[str, VariantChoice] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, str]:
        """What was asked for and is written, by the key."""
        return {
            place: made.taken
            for place, made in self.made.items()
            if made.taken in (self.asked.get(place), self.asked.get(made.name))
        }

    def choose(self, op: Op, name: str, forms: Sequence[str], default: str) -> str:
        """The form to write of the gradient of the node at hand.

        Args:
            op: writes it.
            name: of what has several forms.
            forms: those that this node has.
            default: the one that suits its shapes.

        Raises:
            UsageError: a form is asked for that it does not have.
        """
        if op.node is None:
            return default
        preferred = self.prefer(op, name)
        default = preferred if preferred and preferred in forms else default
        place, name = key(op.graph, op.node, name), f"{op.node.op_type} {name}"
        taken = self.asked.get(place, default)
        if taken not in forms:
            raise UsageError(f"'{place}' has no form '{taken}'", suggest(taken, forms, "forms"))
        if place not in self.asked and self.asked.get(name) in forms:
            taken = self.asked[name]
        wanted = tuple(dict.fromkeys(filter(op.wanted, op.node.input)))
        node = NodeProto()
        node.CopyFrom(op.node)
        self.made[place] = VariantChoice(node, op.graph, name, tuple(forms), taken, default, wanted)
        return taken


def load_tuned(path: Path) -> dict[str, str]:
    """The choices in a file that `onnxgrad tune` has written.

    Raises:
        UsageError: it can't be read, or holds no choices.
    """
    try:
        found = tomllib.loads(path.read_text("utf-8"))[TABLE]
        if all(isinstance(form, str) for form in found.values()):
            return dict(found)
    except OSError as error:
        raise UsageError(f"'{path}' can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, AttributeError):
        pass
    raise UsageError(f"'{path}' holds no choices of lowerings", "`onnxgrad tune MODEL` writes such files")


def key(graph: Graph, node: NodeProto, name: str) -> str:
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
