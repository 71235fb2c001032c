"""Mark the end of the forward part with a YieldOp, which returns the cotangent of the loss.

YieldOp is ONNX Runtime's own marker (domain com.microsoft; attributes `full_shape_outputs`,
`non_differentiable_outputs`). A model saved after this pass or after `backward` has the same form as one written by
ONNX Runtime's module builder.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad_cli.autodiff.activity import on_the_way
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.record import StepRecord


def insert_yield(graph: Graph, outputs: Sequence[str], wanted: Sequence[str] = ()) -> dict[str, str]:
    """Append a YieldOp over `outputs`, which will be differentiated with respect to `wanted`.

    Returns:
        A map from each float output to the name of its cotangent, which has the same type. The name is `<output>_grad`.
        But it is `<output>_grad_external` if `<output>_grad` will name another value: the total cotangent, if another
        output depends on this one, or the gradient, if this output is in `wanted`.
    """
    floats = [name for name in outputs if is_float(graph.types.get(name))]
    others = [position for position, name in enumerate(outputs) if name not in floats]
    external = {name for name in floats if name in wanted or _feeds(graph, name, floats)}
    yielded = {name: graph.fresh(f"{name}_grad{'_external' * (name in external)}") for name in floats}
    node = make_node(
        "YieldOp",
        outputs,
        list(yielded.values()),
        name=graph.fresh("YieldOp"),
        domain="com.microsoft",
        full_shape_outputs=list(range(len(outputs))),
        non_differentiable_outputs=others or None,
    )
    graph.nodes.append(node)
    graph.types.update((cotangent, graph.types[name]) for name, cotangent in yielded.items())
    graph.use_domain("com.microsoft")
    return yielded


def _feeds(graph: Graph, name: str, outputs: Sequence[str]) -> bool:
    """Return True if a path of float values leads from the output `name` to another output."""
    others = [other for other in outputs if other != name]
    return bool(others) and not on_the_way(graph, [name], [])[0].isdisjoint(others)


def mark_loss(graph: Graph, options: object, training: StepRecord) -> None:
    """Append the YieldOp, which marks the end of the forward part."""
    training.forward_nodes = len(graph.nodes)
    training.yielded = insert_yield(graph, [training.loss])
