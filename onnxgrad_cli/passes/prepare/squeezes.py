"""Give axes to each Squeeze that has none, so that the rank of its result does not depend on the sizes of the data.

Such a Squeeze also removes the axis of a batch of 1. A training model that keeps that axis takes batches of any size.
"""

from __future__ import annotations

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import attributes_of
from onnxgrad_cli.ir.types import shape_of


def give_axes(graph: Graph, training: Cautions) -> bool:
    """Let a Squeeze without axes remove the axes that are 1 at any size; return True if any Squeeze was changed.

    Args:
        graph: a typed graph.
        training: gets a caution for each.
    """
    nodes: list[Node] = []
    changed: list[str] = []
    for node in graph.nodes:
        axes = _axes(graph, node)
        nodes += [node] if axes is None else _with_axes(graph, node, axes)
        changed += [] if axes is None else [node.output[0]]
    for name in changed:
        text = "its Squeeze has no axes in the file, and would remove a batch of 1 too; that axis is kept here"
        training.cautions.append(Caution("note", name, text))
    if changed:
        graph.set_nodes(nodes)
    return bool(changed)


def _axes(graph: Graph, node: Node) -> list[int] | None:
    """Return the axes that a Squeeze without axes removes at any size; None for another node, or if they are unknown.

    The file may say how many axes the result has. Otherwise an axis without a known size may be 1 in each run, unless
    it is the batch.
    """
    bare = node.op_type == "Squeeze" and is_standard(node.domain) and not any(node.input[1:])
    shape = shape_of(graph.types.get(node.input[0])) if bare and not attributes_of(node) else None
    if shape is None or all(isinstance(size, int) for size in shape):
        return None
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    result = shape_of(graph.types.get(node.output[0]))
    if result is not None:
        return axes if len(result) == len(shape) - len(axes) else None
    fed = (shape_of(graph.types.get(name)) for name in graph.input_names if name not in graph.initializers)
    batch = next((sizes[0] for sizes in fed if sizes), "?")
    symbols = [size for size in shape if isinstance(size, str)]
    return axes if batch != "?" and symbols == [batch] else None


def _with_axes(graph: Graph, node: Node, axes: list[int]) -> list[Node]:
    op = Op(graph)
    op.replaces(node)
    x = op.val(node.input[0])
    op.rename(op.squeeze(x, axes) if axes else op.Identity(x), node.output[0])
    return list(op.nodes)
