"""Rename values and nodes to valid C identifiers, as the standard requires, for runtimes that generate code.

Only names that onnxgrad wrote are changed. The names of the model stay, because its users know them. Source: the ONNX
Intermediate Representation specification, "Names Within a Graph".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from onnx import GraphProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.options import NamingOptions
from onnxgrad_cli.passes.gradient_op import rename_named
from onnxgrad_cli.passes.roles import embed
from onnxgrad_cli.record import StepRecord

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def make_identifiers(graph: Graph, keep: Collection[str] = ()) -> dict[str, str]:
    """Rename every value and node that onnxgrad added and whose name is not an identifier.

    Args:
        keep: names that stay because the user chose them.

    Returns:
        A map from the old names to the new names.
    """
    names: dict[str, str] = {}

    def identifier(name: str) -> str:
        if name in {"", *keep} or name in graph.original_names or IDENTIFIER.fullmatch(name):
            return name
        if name not in names:
            names[name] = graph.fresh(as_identifier(name))
        return names[name]

    _rename(graph.commit().graph, identifier)
    graph.read_again()
    graph.types = {names.get(name, name): value_type for name, value_type in graph.types.items()}
    return names


def as_identifier(name: str) -> str:
    """Replace the characters of a name that identifiers can't have by underscores."""
    stem = re.sub(r"\W", "_", name, flags=re.ASCII)
    return stem if IDENTIFIER.fullmatch(stem) else f"_{stem}"


def _rename(graph: GraphProto, identifier: Callable[[str], str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = identifier(value.name)
    for node in graph.node:
        node.name = identifier(node.name)
        node.input[:] = map(identifier, node.input)
        node.output[:] = map(identifier, node.output)
        rename_named(node, identifier)
        for entry in node.metadata_props:
            if entry.key == FORWARD:
                entry.value = identifier(entry.value)
        for body in subgraphs(node):
            body.name = identifier(body.name)
            _rename(body, identifier)


def rename_to_identifiers(graph: Graph, options: NamingOptions, training: StepRecord) -> None:
    """Turn the names that onnxgrad added into valid C identifiers, in the graph and in the record of the build."""
    asked = [] if training.sets else training.labels  # the labels of data sets have names that onnxgrad made
    names = make_identifiers(graph, [*asked, training.sample_weight or ""])

    def own(name: str) -> str:
        return names.get(name, name)

    for renamed in (training.gradients, training.state, training.yielded):
        for key, value in list(renamed.items()):
            renamed[own(key)] = own(value)
            if key in names:
                del renamed[key]
    training.loss = own(training.loss)
    for listed in (training.labels, training.judged, training.predictions):
        listed[:] = map(own, listed)
    training.sets = {data: {name: own(each) for name, each in arrays.items()} for data, arrays in training.sets.items()}
    training.factors = {position: own(name) for position, name in training.factors.items()}
    training.more = {position: list(map(own, names)) for position, names in training.more.items()}
    training.masks = {position: own(name) for position, name in training.masks.items()}
    training.divisors = {position: own(name) for position, name in training.divisors.items()}
    training.trained = list(map(own, training.trained))
    training.slots = {own(name): replace(slot, of=own(slot.of)) for name, slot in training.slots.items()}
    if training.step is not None:
        groups = [replace(g, weights=tuple(map(own, g.weights))) for g in training.step.groups]
        training.step = replace(training.step, groups=tuple(groups))
    training.adapters = [
        replace(each, a=own(each.a), b=own(each.b), magnitude=own(each.magnitude)) for each in training.adapters
    ]
    training.inner = [each.renamed(names) for each in training.inner]
    training.evaluated = [each.renamed(names) for each in training.evaluated]
    rename(training.proof_nodes, names)
    training.proof_constants = {own(name): tensor for name, tensor in training.proof_constants.items()}
    graph.held = set(map(own, graph.held))
    training.integer_weights = [replace(w, weight=own(w.weight)) for w in training.integer_weights]
    if training.chunks is not None:
        training.chunks = training.chunks._replace(values=tuple(map(own, training.chunks.values)))
    embed(graph, options, training)
