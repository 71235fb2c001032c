"""Run the chunks of a loss one after the other, each followed by its gradient.

The gradient of a chunk needs no other chunk, because the cotangent of the loss is 1, and the mean divides by the number
of labels that are not ignored. So a chunk can begin when all gradients of the preceding chunk have been computed and
its logits are no longer needed. A control dependency delays the first values of a chunk, and the nodes are sorted
again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence, Set
from graphlib import TopologicalSorter

import numpy as np

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, Node, metadata_of
from onnxgrad_cli.ir.node_values import depending_on, reads
from onnxgrad_cli.ir.types import is_float, shape_of
from onnxgrad_cli.passes.control_dependencies import zero_after
from onnxgrad_cli.record import Training


def run_chunks_in_turn(graph: Graph, options: object, training: Training) -> None:
    """Compute the chunks of a loss one after the other, each with its gradient."""
    chunks = training.chunks
    if chunks is None:
        return
    graph.remove_unused()  # there is no need to wait for unused values
    _let_the_seed_come_first(graph, training)
    for at in range(1, len(chunks.starts)):
        later = {name for starts in chunks.starts[at:] for name in starts}
        ends = _ends(graph, chunks.nodes[at - 1], depending_on(graph.nodes, later))
        if ends:
            _hold_back(graph, chunks.starts[at], ends)
    graph.set_nodes(_sorted(graph.nodes))


def _let_the_seed_come_first(graph: Graph, training: Training) -> None:
    """Replace the loss's shape, which its cotangent reads, by a constant, so that the cotangent doesn't wait for it."""
    shapes = {node.output[0] for node in graph.nodes if node.op_type == "Shape" and node.input[0] == training.loss}
    seeds = {*training.yielded.values()}
    for node in graph.nodes:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes and node.output[0] in seeds:
            node.input[0] = graph.add_constant(np.zeros(0, np.int64))


def _ends(graph: Graph, forward: Collection[str], later: Set[str]) -> list[str]:
    """Return the final float outputs of a chunk's backward part, except those in `later`, which need later chunks.

    Final outputs are those that no node of the chunk's backward part reads.
    """
    own = [node for node in graph.nodes if metadata_of(node, FORWARD) in forward and later.isdisjoint(node.output)]
    read = {name for node in own for name in reads(node)}
    made = [name for node in own for name in node.output if name and name not in read]
    return [name for name in made if is_float(graph.types.get(name)) and shape_of(graph.types[name])]


def _hold_back(graph: Graph, starts: Iterable[str], ends: Sequence[str]) -> None:
    """Delay the nodes that read `starts` until all of `ends` have been computed."""
    op = Op(graph)
    op.role, op.scope = "loss", "loss/in-turn"
    zero = zero_after(op, [op.val(name) for name in ends])
    waiting = {}
    for name in starts:
        x = op.val(name)
        waiting[name] = op.Reshape(x, op.ints([0] * x.rank) + zero, shape=x.shape).name
    for node in graph.nodes:
        node.input[:] = [waiting.get(name, name) for name in node.input]
    graph.set_nodes([*graph.nodes, *op.nodes])


def _sorted(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes so that each follows those it depends on, and otherwise stays in the old order."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    needs = {at: {makers[name] for name in reads(node) if name in makers} for at, node in enumerate(nodes)}
    sorter, ready, found = TopologicalSorter(needs), list[int](), list[Node]()
    sorter.prepare()
    while sorter.is_active():
        for at in sorter.get_ready():
            heapq.heappush(ready, at)
        first = heapq.heappop(ready)
        found.append(nodes[first])
        sorter.done(first)
    return found
