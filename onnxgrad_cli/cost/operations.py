"""The floating-point operations of a graph, with those of branches and loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from onnxgrad_cli.cost.facts import Facts, known_sizes
from onnxgrad_cli.cost.flops import EXACT, MOVES, PARTLY_READ, node_flops
from onnxgrad_cli.cost.steps import FORWARD, Step
from onnxgrad_cli.errors import OnnxgradError, Unknown
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import input_types, inside
from onnxgrad_cli.ir.iterations import fixed_trips
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import CONTROL_FLOW, attributes_of, subgraphs

Flops = Mapping[str, int]
"""Operations by operator."""


def operations(graph: Graph, sizes: Mapping[str, int]) -> int:
    """The floating-point operations of one run of a graph, as far as they are known.

    Args:
        graph: the model, typed.
        sizes: symbol -> size; see `Cost.assumed` for those without one.
    """
    _, _, facts = known_sizes(graph, sizes)
    return sum(sum(_count(graph, node, facts, Counter()).values()) for node in graph.nodes)


def operations_by_part(
    graph: Graph, steps: Iterable[Step], facts: Facts
) -> tuple[dict[str, Counter[str]], list[int], Counter[str]]:
    """The FLOPs of forward part, backward part and optimizer, by operator; those of each node, with its bodies; and
    the operators whose cost is unknown."""
    flops: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter(), "optimizer": Counter()}
    own, uncounted = list[int](), Counter[str]()
    known: dict[tuple[object, ...], int] = {}
    for step in steps:
        total = flops["forward" if step.part in FORWARD else step.part]
        alike = _alike(step.node, facts)
        if alike in known:
            total[step.op_type] += known[alike]
            own.append(known[alike])
            continue
        counts = _count(graph, step.node, facts, uncounted)
        total.update(counts)
        own.append(sum(counts.values()))
        if alike and counts:
            known[alike] = own[-1]
    return flops, own, uncounted


def _alike(node: Node, facts: Facts) -> tuple[object, ...]:
    """What is the same for nodes that compute one number for each element; () of others."""
    if node.attribute or node.op_type in MOVES or node.op_type in EXACT or node.op_type.startswith(PARTLY_READ):
        return ()
    try:
        known = facts.__getitem__
        return (node.op_type, node.domain, *map(id, map(known, node.input)), "->", *map(id, map(known, node.output)))
    except LookupError:  # something is unknown, or left out
        return ()


def _count(graph: Graph, node: Node, facts: Facts, uncounted: Counter[str]) -> Flops:
    """The FLOPs of a node and of its bodies, by operator; where they are unknown, the node is added to `uncounted`."""
    try:
        if node.op_type in CONTROL_FLOW:
            return _count_bodies(graph, node, facts, uncounted)
        return {node.op_type: node_flops(node, facts)}
    except (LookupError, Unknown, OnnxgradError):  # the last where a body can't be typed on its own
        uncounted[node.op_type] += 1
        return {}


def _count_bodies(graph: Graph, node: Node, facts: Facts, uncounted: Counter[str]) -> Flops:
    """Those of the dearer branch of an If, or of the body of a loop as often as it runs."""
    types = input_types(graph, node)
    bodies = [inside(graph, body, types) for body in subgraphs(node)]
    times = _times(graph, node, bodies[0], facts)
    counts: list[Counter[str]] = []
    for body in bodies:
        counts.append(Counter())
        known = facts.inside(body)
        for each in body.nodes:
            counts[-1].update(_count(body, each, known, uncounted))
    dearest = max(counts, key=Counter.total)
    return {op_type: times * count for op_type, count in dearest.items()}


def _times(graph: Graph, node: Node, body: Graph, facts: Facts) -> int:
    """How often a body runs in one run of its node; raises LookupError where that is unknown."""
    if node.op_type == "Loop":
        trips = fixed_trips(graph, node, body)
        if trips is None:
            raise LookupError(node.name)
        return trips
    if node.op_type == "Scan":
        given = attributes_of(node)
        first, axis = given.get("num_scan_inputs", 0), given.get("scan_input_axes", [0])[0]
        return facts[node.input[-first]].shape[axis]
    return 1
