"""Compute in float32 where onnxruntime has no kernel for bfloat16, if onnxruntime can run the original model.

Most of onnxruntime's CPU kernels for bfloat16 only move data. So onnxruntime runs a Gather in bfloat16, but not the
sums in the gradient of a Gather. Each result is rounded to bfloat16, as a kernel would do.
"""

from __future__ import annotations

from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.execution.kernels import has_kernel
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.types import dtype_of, shape_of, tensor_type

CASTS = frozenset({"Cast", "CastLike"})
"""Operators that return bfloat16 because an attribute or an operand says so."""


def compute_in_float32(graph: Graph) -> None:
    """Put casts to float32 around nodes that have no kernel for bfloat16."""
    wide: dict[str, str] = {}
    graph.rewrite(lambda node: _widened(graph, node, wide) if _lacks_kernel(graph, node) else None)


def _lacks_kernel(graph: Graph, node: Node) -> bool:
    names = [name for name in (*node.input, *node.output) if name]
    if not any(_is_bfloat16(graph, name) for name in names) or node.op_type in CASTS:
        return False
    return is_standard(node.domain) and not subgraphs(node) and not has_kernel(graph, node)


def _is_bfloat16(graph: Graph, name: str) -> bool:
    return dtype_of(graph.types.get(name)) == TensorProto.BFLOAT16


def _widened(graph: Graph, node: Node, wide: dict[str, str]) -> list[Node]:
    """Return a node in float32, with the casts before and after it.

    Args:
        graph: the graph.
        node: the node; changed in place.
        wide: map from a bfloat16 value that was cast before to the name of its float32 version; new casts are added.
    """
    before: list[Node] = []
    after: list[Node] = []
    for position, name in enumerate(node.input):
        if name and _is_bfloat16(graph, name):
            if name not in wide:
                wide[name] = _in_float32(graph, name)
                before.append(_cast(graph, node, name, wide[name], TensorProto.FLOAT))
            node.input[position] = wide[name]
    for position, name in enumerate(node.output):
        if name and _is_bfloat16(graph, name):
            node.output[position] = _in_float32(graph, name)
            after.append(_cast(graph, node, node.output[position], name, TensorProto.BFLOAT16))
    for attribute in node.attribute:
        if attribute.t.data_type == TensorProto.BFLOAT16:
            attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype("f")))
        elif attribute.name == "dtype" and attribute.i == TensorProto.BFLOAT16:
            attribute.CopyFrom(helper.make_attribute("dtype", TensorProto.FLOAT))
    return [*before, node, *after]


def _in_float32(graph: Graph, name: str) -> str:
    """Return a new name for a value in float32."""
    wide = graph.fresh(f"{name}_float32")
    graph.types[wide] = tensor_type(TensorProto.FLOAT, shape_of(graph.types[name]))
    return wide


def _cast(graph: Graph, node: Node, source: str, result: str, to: int) -> Node:
    cast = make_node("Cast", [source], [result], graph.fresh(f"{node.name}/Cast"), to=to)
    cast.metadata = node.metadata
    return cast
