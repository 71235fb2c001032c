"""Add new inputs to inner values of a model, so that finite differences with respect to these values can be taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.weightless_copy import copied


def perturbed(model: ModelProto, path: Path | None, names: Sequence[str]) -> tuple[ModelProto, Mapping[str, str]]:
    """Return a copy of a model in which a new input is added, by an Add node, to each of the named values.

    The input has the shape of the value. Every reader of the value reads the sum.

    Returns:
        The copy, and a map from value to the new input.

    Raises:
        OnnxgradError: the model contradicts itself, or the type of a value can't be inferred.
    """
    graph = Graph(copied(model), path)
    if names:
        infer_types(graph)
    untyped = next((name for name in names if name not in graph.types), None)
    if untyped is not None:
        raise OnnxgradError(f"the type of '{untyped}' can't be inferred in the original model")
    added = {name: graph.fresh(f"{name}_added") for name in names}
    for name, more in added.items():
        made = graph.fresh(f"{name}_made")
        node = make_node("Add", [made, more], [name], name=graph.fresh(f"{name}/Add"))
        position = take_name(graph, name, made)
        graph.nodes.insert(position, node)
        graph.add_input(more, graph.types[name])
    return graph.commit(), added


def take_name(graph: Graph, name: str, new: str) -> int:
    """Rename a value only where it is computed or stored, so that its old name is free.

    Returns:
        The position of the first node after the one that computes the value; 0 if it is stored.
    """
    for position, node in enumerate(graph.nodes):
        if name in node.output:
            node.output[:] = [new if output == name else output for output in node.output]
            return position + 1
    for tensor in graph.proto.graph.initializer:  # the value may be stored: constants are folded
        if tensor.name == name:
            tensor.name = new
    return 0
