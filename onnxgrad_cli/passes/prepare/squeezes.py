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
from onnxgrad_cli.passes.prepare.implied_ranks import KEEPS_RANK


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
    rank = _declared_rank(graph, node.output[0]) if result is None else len(result)
    if rank is not None:
        return axes if rank == len(shape) - len(axes) else None
    fed = (shape_of(graph.types.get(name)) for name in graph.input_names if name not in graph.initializers)
    batch = next((sizes[0] for sizes in fed if sizes), "?")
    symbols = [size for size in shape if isinstance(size, str)]
    return axes if batch != "?" and symbols == [batch] else None


def _declared_rank(graph: Graph, name: str) -> int | None:
    """Return the rank of a value, if the file declares an output that has as many axes."""
    declared = {name: shape_of(graph.hints[name].type) for name in graph.output_names if name in graph.hints}
    alike = {name}
    for node in graph.nodes:
        same = node.op_type in KEEPS_RANK | {"Concat", "Slice"} and is_standard(node.domain)
        if same and not alike.isdisjoint(node.input[: len(node.input) if node.op_type == "Concat" else 1]):
            alike.add(node.output[0])
    ranks = {len(shape) for name, shape in declared.items() if name in alike and shape is not None}
    return ranks.pop() if len(ranks) == 1 else None


def _with_axes(graph: Graph, node: Node, axes: list[int]) -> list[Node]:
    op = Op(graph)
    op.replaces(node)
    x = op.val(node.input[0])
    op.rename(op.squeeze(x, axes) if axes else op.Identity(x), node.output[0])
    return list(op.nodes)
