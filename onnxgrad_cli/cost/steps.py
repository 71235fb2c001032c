"""The nodes of a training model in order, each with the fields that cost estimates read repeatedly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import reads

VIEWS = frozenset("Flatten Identity Reshape Squeeze Unsqueeze".split())
"""Operators whose output has a different shape but shares the memory of their input."""

FORWARD = ("model", "loss")
"""The parts of a training model that come before its backward part."""


class ScheduledNode(NamedTuple):
    """A node and its fields, read once because each access to a field of a node copies strings.

    Attributes:
        node: the node.
        op_type: its operator.
        part: the part of the training model that the node belongs to.
        reads: the values that the node reads, including those that its bodies read.
        made: the values that the node computes.
        shows: the input whose memory the result shares, if the operator is in `VIEWS`; otherwise "".
    """

    node: Node
    op_type: str
    part: str
    reads: Sequence[str]
    made: Sequence[str]
    shows: str


def steps_of(nodes: Iterable[Node], where: Iterable[str]) -> list[ScheduledNode]:
    """Return a `ScheduledNode` for each node of a training model, in order. `where` gives the part of each node."""
    found = []
    for node, part in zip(nodes, where, strict=False):
        op_type, made = node.op_type, node.output
        is_view = op_type in VIEWS and not node.domain
        made = [name for name in made if name] if "" in made else made
        found.append(ScheduledNode(node, op_type, part, reads(node), made, node.input[0] if is_view else ""))
    return found
