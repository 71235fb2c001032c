"""The nodes of a training model in order, each with what is asked of it again and again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import reads

VIEWS = frozenset("Flatten Identity Reshape Squeeze Unsqueeze".split())
"""Operators whose output is their input's memory under another shape."""

FORWARD = ("model", "loss")
"""The parts of a training model that come before its backward part."""


class Step(NamedTuple):
    """A node and what is asked of it again and again, read once: each look into a node copies its words.

    Attributes:
        node: itself.
        op_type: its operator.
        part: of the training model.
        reads: the values that it reads, in bodies too.
        made: the values that it makes.
        shows: the value whose memory its result is, under another shape; "" where it is no view.
    """

    node: Node
    op_type: str
    part: str
    reads: Sequence[str]
    made: Sequence[str]
    shows: str


def steps_of(nodes: Iterable[Node], where: Iterable[str]) -> list[Step]:
    """Nodes, in order, each of its part of a training model."""
    found = []
    for node, part in zip(nodes, where, strict=False):
        op_type, made = node.op_type, node.output
        is_view = op_type in VIEWS and not node.domain
        made = [name for name in made if name] if "" in made else made
        found.append(Step(node, op_type, part, reads(node), made, node.input[0] if is_view else ""))
    return found
