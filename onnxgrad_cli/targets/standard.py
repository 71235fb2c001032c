"""What an operator of the standard is called where a function computes it for a target, and the way back.

Such a call bears the operator's name, inputs and attributes, in a domain of ours: whoever knows the operator knows the
call, and without its domain the node is standard again. So it can be differentiated, counted and run in any type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, helper

from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import with_bodies

DOMAIN = "onnxgrad.target."
"""What the domains of these functions begin with."""

OWN = "target_"
"""What the names of attributes begin with that the operator does not have."""


def standard_domain(domain: str) -> str:
    """The domain of the operator that a node stands for; "" is ai.onnx."""
    return "" if domain.startswith(DOMAIN) else plain_domain(domain)


def call(graph: Graph, node: Node, function: FunctionProto, attributes: Mapping[str, Any]) -> None:
    """Let a function compute a node of the operator that it is named after.

    Args:
        graph: has the node.
        node: keeps its name, inputs, outputs and attributes.
        function: is added to the model at its opset, once.
        attributes: more of them, whose names begin with `OWN`.
    """
    node.domain = function.domain
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    graph.declared_shapes.update(node.output)
    if all((known.domain, known.name) != (function.domain, function.name) for known in graph.proto.functions):
        graph.proto.functions.append(function)
        for entry in graph.proto.functions[-1].opset_import:
            graph.use_domain(entry.domain)
            entry.version = graph.opset(entry.domain) or entry.version
        graph.use_domain(function.domain)


def _uncall(node: Node | NodeProto) -> None:
    """Make of a function's call the operator that it stands for."""
    if isinstance(node, Node):
        node.domain = ""
    else:
        node.ClearField("domain")
    for attribute in [a for a in node.attribute if a.name.startswith(OWN)]:
        node.attribute.remove(attribute)


def is_targeted(model: ModelProto) -> bool:
    """Whether functions compute some of a model's nodes for a target."""
    return any(function.domain.startswith(DOMAIN) for function in model.functions)


def to_standard(model: ModelProto, nodes: Iterable[Node] | None = None) -> None:
    """Write a model in the operators that its targets' functions stand for, in place.

    Args:
        model: loses those functions.
        nodes: its nodes, where they are held elsewhere than in its graph.
    """
    held = list(model.graph.node if nodes is None else nodes)
    for node in held:
        if node.domain.startswith(DOMAIN):
            _uncall(node)
    _forget_functions(model, held)


def _forget_functions(model: ModelProto, nodes: list[Node]) -> None:
    """Remove the functions that targets have brought, and the domains that no other node is of."""
    functions = [function for function in model.functions if function.domain.startswith(DOMAIN)]
    gone = {name for f in functions for name in (f.domain, *(entry.domain for entry in f.opset_import)) if name}
    gone.difference_update(node.domain for node in with_bodies(nodes if gone else ()))
    for function in functions:
        model.functions.remove(function)
    for entry in [entry for entry in model.opset_import if entry.domain in gone]:
        model.opset_import.remove(entry)
