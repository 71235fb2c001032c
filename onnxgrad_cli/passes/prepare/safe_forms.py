"""Rewrite operators in forms that onnxruntime computes correctly for all sizes of the data.

- A Squeeze gets axes, so that the rank of its result does not depend on sizes. Without axes, it would also remove the
  batch axis if the batch has one sample.
- The product of a matrix and a vector becomes a product of matrices. If the backward part has another Transpose of the
  matrix, onnxruntime moves the Transpose through elementwise operators to such a product. Its fusion of
  MatMul(Transpose(A), v) is wrong for vectors: the loss was wrong at onnxruntime's default optimization level.
- Recurrent layers with the batch first (layout = 1), which stock onnxruntime refuses, become layers with time first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied, make_node
from onnxgrad_cli.ir.node_values import attributes_of
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.prepare.implied_ranks import KEEPS_RANK


def give_axes(graph: Graph, training: Cautions) -> bool:
    """Add axes to each Squeeze that has none: those whose size is always 1. Return True if a Squeeze was changed.

    Args:
        graph: a graph with inferred types.
        training: receives a caution for each Squeeze.
    """

    def with_axes(node: Node) -> Sequence[Node] | None:
        axes = _axes(graph, node)
        if axes is None:
            return None
        text = (
            "its Squeeze has no axes in the file, so it would also remove a batch axis of size 1; the training "
            "model keeps that axis"
        )
        training.cautions.append(Caution("note", node.output[0], text))
        op = Op(graph)
        op.replaces(node)
        x = op.val(node.input[0])
        op.rename(op.squeeze(x, axes) if axes else op.Identity(x), node.output[0])
        return op.nodes

    return graph.rewrite(with_axes, {"Squeeze"})


def _axes(graph: Graph, node: Node) -> list[int] | None:
    """Return the axes that a Squeeze without axes removes in every run, or None if they are unknown.

    These are the axes with known size 1, on one of two conditions. Either the declared rank of the result shows that no
    other axis is removed. Or the only axis of unknown size is the batch, which should not be removed. For other nodes,
    and if no size is unknown, return None.
    """
    bare = is_standard(node.domain) and not any(node.input[1:])
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
    """Return the rank of a value if the file declares the rank of an output that must have the same rank, or None."""
    declared = {name: shape_of(graph.hints[name].type) for name in graph.output_names if name in graph.hints}
    alike = {name}
    for node in graph.nodes:
        same = node.op_type in KEEPS_RANK | {"Concat", "Slice"} and is_standard(node.domain)
        if same and not alike.isdisjoint(node.input[: len(node.input) if node.op_type == "Concat" else 1]):
            alike.add(node.output[0])
    ranks = {len(shape) for name, shape in declared.items() if name in alike and shape is not None}
    return ranks.pop() if len(ranks) == 1 else None


def widen_vectors(graph: Graph) -> bool:
    """Rewrite each product of a matrix and a vector as a product of two matrices. Return True if there were any."""

    def widened(node: Node) -> Sequence[Node] | None:
        axis = _axis(graph, node)
        if axis is None:
            return None
        op = Op(graph)
        op.replaces(node)
        a, b = (op.val(name) for name in node.input)
        product = a @ op.unsqueeze(b, [-1]) if axis == -1 else op.unsqueeze(a, [0]) @ b
        op.rename(op.squeeze(product, [axis]), node.output[0])
        return op.nodes

    return graph.rewrite(widened, {"MatMul"})


def _axis(graph: Graph, node: Node) -> int | None:
    """Return the axis that a product lacks because one factor is a vector: -1 or -2.

    Return None unless exactly one factor is a vector, and for operators that are not standard.
    """
    if not is_standard(node.domain):
        return None
    ranks = [None if (shape := shape_of(graph.types.get(name))) is None else len(shape) for name in node.input]
    if None in ranks or 1 not in ranks or ranks == [1, 1]:
        return None
    return -1 if ranks[1] == 1 else -2


LAYERS = frozenset({"RNN", "GRU", "LSTM"})
INPUTS = {0: (1, 0, 2), 5: (1, 0, 2), 6: (1, 0, 2)}
OUTPUTS = {0: (2, 0, 1, 3), 1: (1, 0, 2), 2: (1, 0, 2)}
"""Maps from the position of an input or output to the permutation of its Transpose. Weights are not transposed."""


def to_time_major(graph: Graph) -> None:
    """Rewrite every recurrent layer with layout = 1 to layout = 0, between transposes."""
    graph.rewrite(lambda node: [*_to_time_major(graph, node)] if _is_batch_major(node) else None, LAYERS)


def _is_batch_major(node: Node) -> bool:
    return is_standard(node.domain) and any(each.name == "layout" and each.i for each in node.attribute)


def _to_time_major(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield a node with layout = 0 that is equivalent to a node with layout = 1, and its transposes."""
    layer, after = copied(node), []
    layer.attribute.remove(next(attribute for attribute in layer.attribute if attribute.name == "layout"))
    for position, name in enumerate(node.input):
        if name and position in INPUTS:
            layer.input[position] = graph.fresh(f"{name}/time_first")
            yield _transpose(graph, name, layer.input[position], INPUTS[position])
    for position, name in enumerate(node.output):
        if name:
            layer.output[position] = graph.fresh(f"{name}/time_first")
            after.append(_transpose(graph, layer.output[position], name, OUTPUTS[position]))
    yield layer
    yield from after


def _transpose(graph: Graph, name: str, result: str, axes: tuple[int, ...]) -> Node:
    return make_node("Transpose", [name], [result], name=graph.fresh(f"{result}/Transpose"), perm=axes)
