"""Mark where the forward part ends: YieldOp hands the loss out and takes its cotangent in.

This is ONNX Runtime's own marker (domain com.microsoft, `full_shape_outputs`, `non_differentiable_outputs`), so a
model dumped after this pass or after `backward` reads as its module builder would have written it.
"""

from __future__ import annotations

import onnx

from onnxgrad_cli.graph import Graph
from onnxgrad_cli.pipeline import Options, Pass, Training


def insert_yield(graph: Graph, outputs: list[str]) -> list[str]:
    """Append a YieldOp over `outputs` and return the names of their cotangents, one each, of the same types."""
    cotangents = [graph.fresh(f"{name}_grad") for name in outputs]
    node = onnx.helper.make_node(
        "YieldOp",
        outputs,
        cotangents,
        name=graph.fresh("YieldOp"),
        domain="com.microsoft",
        full_shape_outputs=list(range(len(outputs))),
    )
    graph.nodes.append(node)
    for name, cotangent in zip(outputs, cotangents, strict=True):
        graph.types[cotangent] = graph.types[name]
    if graph.opset("com.microsoft") is None:
        graph.proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return cotangents


def _run(graph: Graph, options: Options, training: Training) -> bool:
    training.forward_nodes = len(graph.nodes)
    (cotangent,) = insert_yield(graph, [training.loss])
    training.yielded = {training.loss: cotangent}
    return True


YIELD = Pass("yield", "the YieldOp marker between forward and backward", _run, ("loss",))
