"""Names that are valid C identifiers, as the standard asks of all names, for runtimes that make variables of them.

Only names that the tool has written are changed: those of the model stay what its users know. Source: the ONNX
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
from onnxgrad_cli.options import NamingOptions
from onnxgrad_cli.passes.gradient_op import rename_named
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.passes.roles import embed
from onnxgrad_cli.record import StepRecord

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def make_identifiers(graph: Graph, keep: Collection[str] = ()) -> dict[str, str]:
    """Rename every value and node that the model did not have, where its name is no identifier.

    Args:
        keep: names that stay: those that the user has given.

    Returns:
        old name -> new name.
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
    """A name in the characters of identifiers."""
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


def _run(graph: Graph, options: NamingOptions, training: StepRecord) -> bool:
    """Rename what the tool has written, in the graph and in the record of the build."""
    if not options.identifiers:
        return False
    names = make_identifiers(graph, [*training.labels, training.sample_weight or ""])
    for renamed in (training.gradients, training.state, training.yielded):
        for key, value in list(renamed.items()):
            renamed[names.get(key, key)] = names.get(value, value)
            if key in names:
                del renamed[key]
    training.loss = names.get(training.loss, training.loss)
    training.divisors = {position: names.get(name, name) for position, name in training.divisors.items()}
    training.trained = [names.get(name, name) for name in training.trained]
    training.slots = {
        names.get(name, name): replace(slot, of=names.get(slot.of, slot.of)) for name, slot in training.slots.items()
    }
    own = names.get
    if training.step is not None:
        groups = [replace(g, weights=tuple(own(name, name) for name in g.weights)) for g in training.step.groups]
        training.step = replace(training.step, groups=tuple(groups))
    training.adapters = [
        replace(each, a=own(each.a, each.a), b=own(each.b, each.b), magnitude=own(each.magnitude, each.magnitude))
        for each in training.adapters
    ]
    graph.held = {names.get(name, name) for name in graph.held}
    training.integer_weights = [replace(w, weight=names.get(w.weight, w.weight)) for w in training.integer_weights]
    if training.chunks is not None:
        values = tuple(names.get(name, name) for name in training.chunks.values)
        training.chunks = training.chunks._replace(values=values)
    embed(graph, options, training)
    return bool(names)


IDENTIFIERS = Pass(
    "identifiers", "names written by the tool made valid C identifiers, if asked for", _run, ("cleanup",)
)
