"""Replace an If by one of its branches if the other branch contradicts the shapes of the graph.

Exporters write PyTorch's `squeeze`, and its tests of the rank, as an If on a size. If only one branch fits the
operators after the If, a run that takes the other branch fails. A guard makes such a run of the training model fail
too.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node, refill
from onnxgrad_cli.ir.node_values import depending_on, subgraphs, with_bodies
from onnxgrad_cli.ir.type_inference import Contradiction, infer_types
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.passes.prepare.constant_folding import fold
from onnxgrad_cli.passes.prepare.subgraphs import choose_branches, put_branch

BRANCHES = ("then_branch", "else_branch")

MOST_TRIED, MOST_NODES = 8, 50_000
"""Limits of a search: the number of Ifs that are tried, and this number times the number of nodes of the graph.

For each If, types are inferred for the whole graph twice, once with each branch.
"""


def rule_out_branches(graph: Graph, contradicts: bool = False) -> bool:
    """If one branch of an If is impossible, replace the If by the other branch; return True if there was such an If.

    Args:
        graph: the graph.
        contradicts: True if type inference has found a contradiction, which may be in a branch. If False, only Ifs with
            an output of unknown rank are tried.
    """
    tried = []
    for node in graph.nodes:
        outputs = [graph.types.get(name) for name in node.output if name] if node.op_type == "If" else []
        unknown = contradicts or any(shape_of(value_type) is None for value_type in outputs)
        if node.op_type == "If" and unknown and all(map(dtype_of, outputs)):  # a sequence can't be guarded
            tried.append(node)
    size = sum(1 for _ in with_bodies(graph.nodes)) if tried else 0
    for node in tried[: min(MOST_TRIED, MOST_NODES // max(size, 1))]:
        possible = [branch for branch in BRANCHES if not _contradicts(_with_branch(graph, node, branch))]
        if len(possible) == 1:
            _commit(graph, node, possible[0])
            return True
    return False


def _with_branch(graph: Graph, node: Node, branch: str) -> Graph:
    """Return a copy of a graph, without its weights, with a branch in place of its If."""
    trial = Graph(graph.skeleton())
    trial.follows_shapes, trial.not_constant = graph.follows_shapes, set(graph.not_constant)
    nodes = trial.nodes
    at = next(i for i, each in enumerate(graph.nodes) if each is node)
    trial.set_nodes([*nodes[:at], *put_branch(trial, nodes[at], branch), *nodes[at + 1 :]])
    return trial


def _contradicts(graph: Graph) -> bool:
    """Return True if the types of nodes that run in any case contradict each other.

    Nodes in a body do not always run, and values that depend on a body may have a different rank than is declared.
    """
    try:
        infer_types(graph)
        while choose_branches(graph) or fold(graph):
            infer_types(graph)
    except Contradiction:
        graph.set_nodes(_unconditional(graph))
        made = {*graph.made(), *graph.input_names}
        refill(graph.proto.graph.output, [value for value in graph.proto.graph.output if value.name in made])
        try:
            infer_types(graph)
        except Contradiction:
            return True
    return False


def _unconditional(graph: Graph) -> list[Node]:
    """Return the nodes that have no bodies and depend on no node with bodies."""
    results = (name for node in graph.nodes if subgraphs(node) for name in node.output if name)
    conditional = depending_on(graph.nodes, results)
    return [node for node in graph.nodes if conditional.isdisjoint(node.output)]


def _commit(graph: Graph, node: Node, branch: str) -> None:
    """Replace an If by a branch, with a guard: a run fails if the condition chooses the other branch.

    The guard adds a zero to the shape of each output, and reshapes the output to the sum. A Gather reads the zero from
    a vector with one element. If the condition chooses the other branch, the Gather reads index 1, and the run fails.
    """
    zeros, index, zero = (graph.fresh(f"{node.name}/{name}") for name in ("zeros", "index", "zero"))
    graph.add_initializer(zeros, np.zeros(1, np.int64))
    condition, guard = node.input[0], list[Node]()

    def add(op_type: str, inputs: list[str], output: str, **attributes: int) -> str:
        guard.append(make_node(op_type, inputs, [output], name=graph.fresh(f"{output}/{op_type}"), **attributes))
        return output

    if branch == "then_branch":
        condition = add("Not", [condition], graph.fresh(f"{node.name}/otherwise"))
    add("Cast", [condition], index, to=TensorProto.INT64)
    add("Gather", [zeros, index], zero)
    outputs = node.output[:]
    node.output[:] = [graph.fresh(f"{name}_made") if name else "" for name in outputs]
    nodes = put_branch(graph, node, branch)
    for name, made in zip(outputs, node.output, strict=True):
        if name:
            shape = add("Shape", [made], graph.fresh(f"{name}/shape"))
            guarded = add("Add", [shape, zero], graph.fresh(f"{name}/guarded"))
            add("Reshape", [made, guarded], name)
    at = next(i for i, each in enumerate(graph.nodes) if each is node)
    graph.set_nodes([*graph.nodes[:at], *nodes, *guard, *graph.nodes[at + 1 :]])
    graph.branches[node.name] = branch.removesuffix("_branch")
