"""Replace sequences whose elements are known at build time by their elements.

Exporters write lists of tensors as sequences, such as the parts of a split or the outputs of layers. If every position
at which a sequence is read is constant, the sequence can be removed, which makes the graph smaller and faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import attributes_of, body_of
from onnxgrad_cli.ir.renaming import renamed

Elements = list[str]

MOST_PARTS = 1000
"""Largest number of outputs of a Split that replaces a SplitToSequence."""


def unpack(graph: Graph) -> bool:
    """Replace nodes that read known elements of sequences. Return True if there were any.

    Sequences that are no longer read are removed.
    """
    known: dict[str, Elements] = {}

    def unpacked(node: Node) -> list[Node] | None:
        return STEPS[node.op_type](graph, node, known) if is_standard(node.domain) else None

    changed = graph.rewrite(unpacked, STEPS)
    if changed:
        read = graph.uses()
        dead = {name for name in known if name not in read and name not in graph.output_names}
        graph.set_nodes(node for node in graph.nodes if not (node.output and set(node.output) <= dead))
    return changed


def _position(graph: Graph, node: Node, at: int, default: int) -> int | None:
    """Return the position that input `at` of a node gives (`default` if absent), or None if it is not constant."""
    if len(node.input) <= at or not node.input[at]:
        return default
    value = graph.constant(node.input[at])
    return None if value is None else int(value.item())


def _op(graph: Graph, node: Node) -> Op:
    op = Op(graph)
    op.replaces(node)
    return op


# -- each step returns None, or the nodes that replace a node; it records the sequences that become known ---------


def _construct(graph: Graph, node: Node, known: dict[str, Elements]) -> None:
    known[node.output[0]] = list(node.input)


def _insert(graph: Graph, node: Node, known: dict[str, Elements]) -> None:
    elements = known.get(node.input[0])
    if elements is not None and (at := _position(graph, node, 2, len(elements))) is not None:
        known[node.output[0]] = [*elements[:at], node.input[1], *elements[at:]]


def _erase(graph: Graph, node: Node, known: dict[str, Elements]) -> None:
    elements = known.get(node.input[0])
    if elements is not None and (at := _position(graph, node, 1, -1)) is not None and elements:
        known[node.output[0]] = [x for i, x in enumerate(elements) if i != at % len(elements)]


def _same(graph: Graph, node: Node, known: dict[str, Elements]) -> None:
    if node.input[0] in known:
        known[node.output[0]] = known[node.input[0]]


def _split(graph: Graph, node: Node, known: dict[str, Elements]) -> list[Node] | None:
    """Return nodes that replace a SplitToSequence by a Split, or None if the number of parts is unknown or large."""
    op = _op(graph, node)
    x = op.val(node.input[0])
    if x.known_shape is None or node.output[0] in known:
        return None
    axis = attributes_of(node).get("axis", 0) % x.rank
    size = x.shape[axis]
    by = graph.constant(node.input[1]) if len(node.input) > 1 else np.array(1)
    if by is None or not isinstance(size, int) or size == 0:
        return None
    step = int(by.item()) if by.ndim == 0 else 0
    if step and size > MOST_PARTS * step:
        return None
    sizes = [min(step, size - start) for start in range(0, size, step)] if step else [int(n) for n in by]
    parts: Sequence[Val] = op.split(x, sizes, axis)
    if len(node.input) == 1 and not attributes_of(node).get("keepdims", 1):
        parts = [op.squeeze(part, [axis]) for part in parts]
    known[node.output[0]] = [part.name for part in parts]
    op.rename(op.SequenceConstruct(*parts), node.output[0])
    return op.nodes


def _at(graph: Graph, node: Node, known: dict[str, Elements]) -> list[Node] | None:
    elements, at = known.get(node.input[0]), _position(graph, node, 1, 0)
    if not elements or at is None or not -len(elements) <= at < len(elements):
        return None
    return [make_node("Identity", [elements[at]], node.output[:], name=graph.fresh(f"{node.name}/Identity"))]


def _length(graph: Graph, node: Node, known: dict[str, Elements]) -> list[Node] | None:
    elements = known.get(node.input[0])
    if elements is None:
        return None
    op = _op(graph, node)
    op.rename(op.const(len(elements)), node.output[0])
    return op.nodes


def _concat(graph: Graph, node: Node, known: dict[str, Elements]) -> list[Node] | None:
    elements = known.get(node.input[0])
    if not elements or any(name not in graph.types for name in elements):  # new nodes get their types in the next round
        return None
    axis, new = attributes_of(node).get("axis", 0), attributes_of(node).get("new_axis", 0)
    op = _op(graph, node)
    parts = [op.val(name) for name in elements]
    op.rename(op.Concat(*(op.unsqueeze(x, [axis]) for x in parts) if new else parts, axis=axis), node.output[0])
    return op.nodes


def _map(graph: Graph, node: Node, known: dict[str, Elements]) -> list[Node] | None:
    """Return copies of a SequenceMap's body, one per element, or None for a long or unknown sequence."""
    elements = known.get(node.input[0])
    if elements is None or len(elements) > MAX_UNPACKED_ELEMENTS:
        return None
    nodes: list[Node] = []
    results: list[list[str]] = [[] for _ in node.output]
    for i, element in enumerate(elements):
        given = [element, *(known[name][i] if name in known else name for name in node.input[1:])]
        body = body_of(node, "body")
        copy = renamed(graph, body, dict(zip((value.name for value in body.input), given, strict=True)))
        nodes += copy.node
        for result, value in zip(results, copy.output, strict=True):
            result.append(value.name)
    for name, result in zip(node.output, results, strict=True):
        known[name] = result
        nodes.append(make_node("SequenceConstruct", result, [name], name=graph.fresh(f"{node.name}/all")))
    return nodes


MAX_UNPACKED_ELEMENTS = 16
"""Largest number of elements for which a SequenceMap is replaced by copies of its body."""

STEPS: dict[str, Callable[[Graph, Node, dict[str, Elements]], list[Node] | None]] = {
    "SequenceEmpty": _construct,
    "SequenceConstruct": _construct,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "Identity": _same,
    "SplitToSequence": _split,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
    "SequenceMap": _map,
}
