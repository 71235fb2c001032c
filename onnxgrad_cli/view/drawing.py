"""The content of a picture, independent of its format: boxes in nested groups, and edges between boxes.

Each kind of box has its own look. The fill colors are those of M. Okabe and K. Ito (Color Universal Design, 2008) mixed
with 30 % white, which color-blind readers can distinguish. Shape and border also identify the kind, without color.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from onnxgrad_cli.common.escape import escaped


class BoxKind(StrEnum):
    """The kind of node or value that a box represents."""

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


MAX_TEXT_LENGTH = 44
"""A text in a box with more characters than this is shortened: its middle is omitted."""


@dataclass(frozen=True)
class Look:
    """The look of a kind of box.

    Attributes:
        fill: the fill color.
        color: the color of the border.
        shape: 'box', 'round', 'stadium', 'cylinder' or 'hexagon'.
        border: 'solid', 'dashed' or 'double'.
        meaning: the name of the kind in the legend.
    """

    fill: str
    color: str
    shape: str
    border: str
    meaning: str


LOOKS = {
    BoxKind.INPUT: Look("#e28e4c", "#9c4500", "stadium", "solid", "input"),
    BoxKind.WEIGHT: Look("#eebc4c", "#9a6a00", "cylinder", "solid", "weight"),
    BoxKind.CONSTANT: Look("#f2f2f2", "#4d4d4d", "cylinder", "dashed", "constant"),
    BoxKind.FORWARD: Look("#89caf0", "#1f6f9f", "box", "solid", "forward node"),
    BoxKind.LOSS: Look("#f4ec7b", "#857a00", "hexagon", "solid", "loss"),
    BoxKind.BACKWARD: Look("#dba1c1", "#8f3f6b", "round", "dashed", "backward node"),
    BoxKind.OPTIMIZER: Look("#4c9cc9", "#004d78", "box", "double", "optimizer"),
    BoxKind.STATE: Look("#4c9cc9", "#004d78", "cylinder", "double", "state"),
    BoxKind.GRADIENT: Look("#4cbb9d", "#00573f", "stadium", "dashed", "gradient"),
    BoxKind.OUTPUT: Look("#4cbb9d", "#00573f", "stadium", "double", "output"),
}


@dataclass(frozen=True)
class Box:
    """A node, a value, or several folded nodes.

    Attributes:
        key: the identifier that edges refer to.
        kind: the kind of node or value.
        title: the operator, the name of the value, or the name of the folded module.
        lines: more lines of text in the box.
        details: the text of the tooltip.
        nodes: the number of nodes that the box represents; 0 if it represents a value.
        scope: the full paths of the modules around the box, outermost first.
        makes: the number of values that the box outputs.
    """

    key: str
    kind: BoxKind
    title: str
    lines: tuple[str, ...] = ()
    details: str = ""
    nodes: int = 0
    scope: tuple[str, ...] = ()
    makes: int = 1


@dataclass(frozen=True)
class Cluster:
    """A group of boxes and other groups, drawn inside a frame.

    Attributes:
        key: the identifier of the group.
        title: the title of the frame. A group without a title has no frame.
        kind: the kind of the boxes in the group, which sets the color of the frame; None if there are several kinds.
        parts: the boxes and groups inside, in the direction of the flow. An edge from a part to an earlier part runs
            against the flow.
        beside: True if the parts are drawn side by side: a forward node and its backward nodes.
        container: True if the parts are all nodes and values of a graph: of the model's graph, or of a body (the
            subgraph of a node such as If).
        scope: the modules around the group, as for a box.
    """

    key: str
    title: str
    kind: BoxKind | None
    parts: tuple[Part, ...]
    beside: bool = False
    container: bool = False
    scope: tuple[str, ...] = ()

    def groups(self) -> Iterator[Cluster]:
        """Yield this group and all groups inside it, outer ones first."""
        yield self
        for part in self.parts:
            if isinstance(part, Cluster):
                yield from part.groups()


Part = Box | Cluster


@dataclass(frozen=True)
class Edge:
    """The values that flow from one box to another, each as 'name: type'."""

    source: str
    target: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """A picture of a model.

    Attributes:
        title: the model's name.
        root: the group that contains all boxes and other groups.
        edges: the edges, at most one from one box to another.
        inline: the number of Constant nodes that have no box because their values are written in the boxes of their
            readers.
    """

    title: str
    root: Cluster
    edges: tuple[Edge, ...]
    inline: int = 0

    @cached_property
    def boxes(self) -> dict[str, Box]:
        """Key -> box, for all boxes in order."""
        return {box.key: box for box in boxes(self.root)}

    @property
    def kinds(self) -> list[BoxKind]:
        """The kinds of boxes in the drawing, in the order of `BoxKind`, for the legend."""
        there = {box.kind for box in self.boxes.values()}
        return [kind for kind in BoxKind if kind in there]

    @property
    def caption(self) -> str:
        """The title and the number of nodes, and the number of folded boxes and inline constants if there are any."""
        nodes = sum(box.nodes for box in self.boxes.values()) + self.inline
        shown = sum(box.nodes > 0 for box in self.boxes.values())
        folded = f" in {shown} boxes" if shown + self.inline < nodes else ""
        inline = f", {self.inline} of them constants shown at their readers" if self.inline else ""
        return f"{self.title}: {nodes} node{'s' * (nodes > 1)}{folded}{inline}"

    def label(self, edge: Edge) -> str:
        """Return the label of an edge: the names of its values if its source outputs several values, otherwise ""."""
        if self.boxes[edge.source].makes == 1:
            return ""
        names = [tensor.rpartition(": ")[0] or tensor for tensor in edge.tensors]
        return short(names[0]) if len(names) == 1 else f"{short(names[0])} and {len(names) - 1} more"

    def meetings(self) -> Iterator[tuple[Edge, Cluster, Part, Part]]:
        """Yield (edge, group, part, part) for each edge.

        The group is the innermost one that contains both ends of the edge. The first part is the part of the group that
        is or contains the source, and the second is the part that is or contains the target.
        """
        above = dict(_above(self.root, ()))
        for edge in self.edges:
            source, target = above[edge.source], above[edge.target]
            depth = next(i for i, (a, b) in enumerate(zip(source, target, strict=False)) if a.key != b.key)
            group = source[depth - 1]
            assert isinstance(group, Cluster)
            yield edge, group, source[depth], target[depth]


def is_value(part: Part) -> bool:
    """Return True if a part is the box of a value, and not the box of a node or a group."""
    return isinstance(part, Box) and part.nodes == 0


def boxes(part: Part) -> Iterator[Box]:
    """Yield all boxes inside a part, or the part itself if it is a box, in order."""
    if isinstance(part, Box):
        yield part
    else:
        for inner in part.parts:
            yield from boxes(inner)


def connected(ends: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return key of a box -> the keys of all boxes connected to it, from the two ends of each edge."""
    found: dict[str, list[str]] = defaultdict(list)
    for source, target in ends:
        found[source].append(target)
        found[target].append(source)
    return found


def _above(part: Part, path: tuple[Part, ...]) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """Yield (key, path) for each box, where the path leads from the outermost part to the box itself."""
    path = (*path, part)
    if isinstance(part, Box):
        yield part.key, path
    else:
        for inner in part.parts:
            yield from _above(inner, path)


def short(text: str) -> str:
    """Return a text on one line. If it has more than `MAX_TEXT_LENGTH` characters, its middle is omitted."""
    text, half = escaped(text), MAX_TEXT_LENGTH // 2
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[:half]}…{text[1 - half :]}"
