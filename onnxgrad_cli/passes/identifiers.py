"""Rename values and nodes to valid C identifiers, as the standard requires, for runtimes that generate code.

Only names that onnxgrad wrote are changed. The names of the model stay, because its users know them. Source: the ONNX
Intermediate Representation specification, "Names Within a Graph".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from onnx import GraphProto

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.options import NamingOptions
from onnxgrad_cli.passes.gradient_op import rename_named
from onnxgrad_cli.passes.tensor_roles import write_roles
from onnxgrad_cli.record import BackwardRecord, LossRecord, ParameterRecord, StateRecord, StepRecord

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
    """With --identifiers: turn the names that onnxgrad adds into valid C identifiers."""
    asked = [] if training.sets else training.labels  # the labels of data sets have names that onnxgrad made
    names = make_identifiers(graph, [*asked, training.sample_weight or ""])

    for part in (StateRecord, ParameterRecord, LossRecord, BackwardRecord):
        for field in vars(part)["__annotations__"]:
            setattr(training, field, _renamed(getattr(training, field), names))
    rename(training.proof_nodes, names)
    graph.held = _renamed(graph.held, names)
    write_roles(graph, options, training)


def _renamed(part: Any, names: Mapping[str, str]) -> Any:
    """Return a part of the record with all names replaced, in containers and dataclasses too."""
    if isinstance(part, str):
        return names.get(part, part)
    if isinstance(part, dict):
        return {_renamed(key, names): _renamed(value, names) for key, value in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_renamed(each, names) for each in part))
    if isinstance(part, (list, tuple, set, frozenset)):
        return type(part)(_renamed(each, names) for each in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _renamed(getattr(part, field.name), names) for field in fields(part)})
    return part
