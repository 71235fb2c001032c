"""Models in which something is added to values in between: as a function of what is added, they can be differenced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.skeleton import copied


def perturbed(model: ModelProto, path: Path | None, names: Sequence[str]) -> tuple[ModelProto, Mapping[str, str]]:
    """A copy of a model with an input for each of some values, of its shape, which is added to it.

    Every reader of the value reads the sum.

    Returns:
        The copy, and value -> input.

    Raises:
        OnnxgradError: the model contradicts itself, or the type of a value can't be inferred.
    """
    graph = Graph(copied(model), path)
    if names:
        infer_types(graph)
    untyped = next((name for name in names if name not in graph.types), None)
    if untyped is not None:
        raise OnnxgradError(f"the type of '{untyped}' can't be inferred in the model as it is")
    added = {name: graph.fresh(f"{name}_added") for name in names}
    for name, more in added.items():
        made = graph.fresh(f"{name}_made")
        node = make_node("Add", [made, more], [name], name=graph.fresh(f"{name}/Add"))
        position = _take_name(graph, name, made)
        graph.nodes.insert(position, node)
        graph.add_input(more, graph.types[name])
    return graph.commit(), added


def _take_name(graph: Graph, name: str, new: str) -> int:
    """Give another name to what makes a value; returns the position of the node after it."""
    for position, node in enumerate(graph.nodes):
        if name in node.output:
            node.output[:] = [new if output == name else output for output in node.output]
            return position + 1
    for tensor in graph.proto.graph.initializer:  # what follows from constants may have been computed
        if tensor.name == name:
            tensor.name = new
    return 0
