"""A model with a loop that never ends is neither trained nor proved on demand: its first run would never end."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import keeps_going
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import body_of, captured_by, with_bodies

MOST_ROUNDS = 2**31
"""Of one loop, with nothing that ends it before: at a microsecond each they take most of an hour."""


def check_ends(graph: Graph) -> None:
    """Make sure that no loop of a model goes on for ever, whatever the data are.

    Of a loop whose rounds the data decide nothing is known; a second interrupt ends its run.

    Args:
        graph: the training model, its constants hoisted out of the bodies.

    Raises:
        UnsupportedError: one does; the message names it.
    """
    for node in with_bodies(graph.nodes):
        rounds = _rounds(graph, node) if node.op_type == "Loop" else 0
        if rounds is None or rounds > MOST_ROUNDS:
            label = node.name or next(iter(node.output), "")
            count = "for ever" if rounds is None else f"for {rounds:,} rounds"
            raise UnsupportedError(
                f"node '{label}' (Loop) goes on {count}, and nothing ends it before: no step would come to an end",
                hint=f"export it with a condition, or with at most {MOST_ROUNDS:,} rounds",
            )


def _rounds(graph: Graph, node: Node) -> int | None:
    """The rounds of a Loop where nothing but their number ends it, None where nothing does; else 0."""
    trips, condition = (graph.constant(name) if name else None for name in node.input[:2])
    if (node.input[0] and trips is None) or (node.input[1] and (condition is None or not condition.all())):
        return 0
    body = body_of(node, "body")
    inner = Graph(ModelProto(graph=body))
    inner.initializers.update((n, graph.initializers[n]) for n in captured_by(body) if graph.constant(n) is not None)
    if not keeps_going(inner):
        return 0
    return int(trips.item()) if trips is not None else None
