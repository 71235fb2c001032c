"""Refuse a model with a loop that never ends, because the first run of a training or a proof would not return."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.iterations import keeps_going
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import body_of, captured_by, with_bodies

MOST_ROUNDS = 2**31
"""Largest accepted number of iterations of a Loop that no condition ends. At 1 µs each they take 36 minutes."""


def check_ends(graph: Graph) -> None:
    """Raise an error if a Loop of the model would run for ever, whatever the data.

    A Loop whose number of iterations depends on the data is not checked. The user can end its run with a second
    interrupt.

    Args:
        graph: the model, an inference or a training model. Constants must have been moved out of the loop bodies.

    Raises:
        UnsupportedError: a loop runs for ever; the message names it.
    """
    for node in with_bodies(graph.nodes):
        rounds = _rounds(graph, node) if node.op_type == "Loop" else 0
        if rounds is None or rounds > MOST_ROUNDS:
            label = node.name or next(iter(node.output), "")
            count = "for ever" if rounds is None else f"for {rounds:,} iterations"
            raise UnsupportedError(
                f"node '{label}' (Loop) runs {count} without a condition that ends it earlier, so a step would not end",
                hint=f"export it with a condition, or with at most {MOST_ROUNDS:,} iterations",
            )


def _rounds(graph: Graph, node: Node) -> int | None:
    """Return the number of iterations of a Loop that no condition can end; None if the number is not limited.

    If a condition may end the Loop, or the number depends on the data, return 0.
    """
    trips, condition = (graph.constant(name) if name else None for name in node.input[:2])
    if (node.input[0] and trips is None) or (node.input[1] and (condition is None or not condition.all())):
        return 0
    body = body_of(node, "body")
    inner = Graph(ModelProto(graph=body))
    inner.initializers.update((n, graph.initializers[n]) for n in captured_by(body) if graph.constant(n) is not None)
    if not keeps_going(inner):
        return 0
    return int(trips.item()) if trips is not None else None
