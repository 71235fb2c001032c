"""What a picture shows, before any format: boxes in nested groups, and edges between boxes.

Each kind of box has a look of its own. The fills are the colours of M. Okabe and K. Ito (Color Universal Design, 2008)
at seven tenths, which colour-blind readers tell apart; shape and border say the same again, where there is no colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from onnxgrad_cli.common.visible import visible


class Kind(StrEnum):
    """What a box stands for."""

    INPUT = "input"
    WEIGHT = "weight"
    CONSTANT = "constant"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STATE = "state"
    GRADIENT = "gradient"
    OUTPUT = "output"


LONGEST = 44
"""Characters of a text in a box; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Look:
    """How a kind is drawn: fill, colour of the border, shape ('box', 'round', 'stadium', 'cylinder' or 'hexagon') and
    border ('solid', 'dashed' or 'double')."""

    fill: str
    color: str
    shape: str
    border: str
    meaning: str


LOOKS = {
    Kind.INPUT: Look("#e28e4c", "#9c4500", "stadium", "solid", "input"),
    Kind.WEIGHT: Look("#eebc4c", "#9a6a00", "cylinder", "solid", "weight"),
    Kind.CONSTANT: Look("#f2f2f2", "#4d4d4d", "cylinder", "dashed", "constant"),
    Kind.FORWARD: Look("#89caf0", "#1f6f9f", "box", "solid", "forward node"),
    Kind.LOSS: Look("#f4ec7b", "#857a00", "hexagon", "solid", "loss"),
    Kind.BACKWARD: Look("#dba1c1", "#8f3f6b", "round", "dashed", "backward node"),
    Kind.OPTIMIZER: Look("#4c9cc9", "#004d78", "box", "double", "optimizer"),
    Kind.STATE: Look("#4c9cc9", "#004d78", "cylinder", "double", "state"),
    Kind.GRADIENT: Look("#4cbb9d", "#00573f", "stadium", "dashed", "gradient"),
    Kind.OUTPUT: Look("#4cbb9d", "#00573f", "stadium", "double", "output"),
}


@dataclass(frozen=True)
class Box:
    """A node, a value, or many nodes in one.

    Attributes:
        key: what edges call it.
        title: the operator, the value, or what was folded.
        lines: what else stands in it.
        details: what a reader may ask for (a tooltip).
        nodes: how many nodes it stands for; 0 for a value.
        scope: the names of the modules it lies in, outermost first, each with its path.
        makes: how many values come out of it.
    """

    key: str
    kind: Kind
    title: str
    lines: tuple[str, ...] = ()
    details: str = ""
    nodes: int = 0
    scope: tuple[str, ...] = ()
    makes: int = 1


@dataclass(frozen=True)
class Group:
    """Boxes and groups inside one frame.

    Attributes:
        title: of the frame; a group without one has no frame.
        kind: of what lies in it, where that is one kind: it colours the frame.
        parts: what lies in it; an edge from a part to an earlier one runs against the flow.
        beside: whether its parts stand beside each other: a forward node and its backward nodes.
        container: whether its parts are the nodes and values of a graph: the model's or a body's.
    """

    key: str
    title: str
    kind: Kind | None
    parts: tuple[Part, ...]
    beside: bool = False
    container: bool = False
    scope: tuple[str, ...] = ()


Part = Box | Group


@dataclass(frozen=True)
class Edge:
    """Values that flow from one box to another, each as 'name: type'."""

    source: str
    target: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """A picture of a model.

    Attributes:
        title: the model's name.
        root: the group that holds everything.
        edges: the edges, each pair of boxes once.
        inline: how many Constant nodes have no box, for their values stand in the boxes of their readers.
    """

    title: str
    root: Group
    edges: tuple[Edge, ...]
    inline: int = 0

    @cached_property
    def boxes(self) -> dict[str, Box]:
        """Every box by its key, in order."""
        return {box.key: box for box in boxes(self.root)}

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that occur, in the order of `Kind`: the legend."""
        there = {box.kind for box in self.boxes.values()}
        return [kind for kind in Kind if kind in there]

    @property
    def caption(self) -> str:
        """The title, and how many nodes are shown how."""
        nodes = sum(box.nodes for box in self.boxes.values()) + self.inline
        shown = sum(box.nodes > 0 for box in self.boxes.values())
        folded = f" in {shown} boxes" if shown + self.inline < nodes else ""
        inline = f", {self.inline} of them constants shown at their readers" if self.inline else ""
        return f"{self.title}: {nodes} node{'s' * (nodes > 1)}{folded}{inline}"

    def label(self, edge: Edge) -> str:
        """What is to be written at an edge: which values, where its source makes several."""
        if self.boxes[edge.source].makes == 1:
            return ""
        names = [tensor.rpartition(": ")[0] or tensor for tensor in edge.tensors]
        return short(names[0]) if len(names) == 1 else f"{short(names[0])} and {len(names) - 1} more"

    def meetings(self) -> Iterator[tuple[Edge, Group, Part, Part]]:
        """Each edge with the innermost group that holds both its ends, and the parts of it that they lie in."""
        above = dict(_above(self.root, ()))
        for edge in self.edges:
            source, target = above[edge.source], above[edge.target]
            depth = next(i for i, (a, b) in enumerate(zip(source, target, strict=False)) if a.key != b.key)
            group = source[depth - 1]
            assert isinstance(group, Group)
            yield edge, group, source[depth], target[depth]


def boxes(part: Part) -> Iterator[Box]:
    """The boxes of a part, in order."""
    if isinstance(part, Box):
        yield part
    else:
        for inner in part.parts:
            yield from boxes(inner)


def _above(part: Part, path: tuple[Part, ...]) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """Each box with the parts around it, outermost first, itself last."""
    path = (*path, part)
    if isinstance(part, Box):
        yield part.key, path
    else:
        for inner in part.parts:
            yield from _above(inner, path)


def short(text: str) -> str:
    """The text on one line, without its middle where it is too long."""
    text = visible(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[1 - LONGEST // 2 :]}"
