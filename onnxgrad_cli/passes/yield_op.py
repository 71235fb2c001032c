"""Mark where the forward part ends: YieldOp hands the loss out and takes its cotangent in.

This is ONNX Runtime's own marker (domain com.microsoft, `full_shape_outputs`, `non_differentiable_outputs`), so a
model dumped after this pass or after `backward` reads as its module builder would have written it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from onnxgrad_cli.autodiff.activity import on_the_way
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import StepRecord


def insert_yield(graph: Graph, outputs: Sequence[str], wanted: Sequence[str] = ()) -> dict[str, str]:
    """Append a YieldOp over `outputs`, which are to be differentiated with respect to `wanted`.

    Returns:
        The outputs that are float, each with the name of its cotangent, of the same type: `<output>_grad`, or
        `<output>_grad_external` where another of them depends on it and adds to its cotangent, or where
        it is wanted itself, so that its gradient has that name.
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
    for name, cotangent in yielded.items():
        graph.types[cotangent] = graph.types[name]
    if graph.opset("com.microsoft") is None:
        graph.proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return yielded


def _feeds(graph: Graph, name: str, outputs: Sequence[str]) -> bool:
    """Whether a float path leads from an output to another one."""
    others = [other for other in outputs if other != name]
    return bool(others) and not on_the_way(graph, [name], [])[0].isdisjoint(others)


def _run(graph: Graph, options: object, training: StepRecord) -> bool:
    training.forward_nodes = len(graph.nodes)
    training.yielded = insert_yield(graph, [training.loss])
    return True


YIELD = Pass("yield", "the YieldOp marker between forward and backward", _run, ("loss",))
