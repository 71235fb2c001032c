"""Replace standard operators by calls of functions with a target's operators, and restore the standard operators.

Such a call is a node that has the standard operator's name, inputs and attributes, but a domain of onnxgrad. Removing
the domain restores the standard operator. So the model can still be differentiated, measured, and run in any element
type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import ROLE, Node, metadata_of
from onnxgrad_cli.ir.node_values import with_bodies

DOMAIN = "onnxgrad.target."
"""The prefix of the domains of the targets' functions."""

OWN = "target_"
"""The prefix of the attributes that a call has in addition to those of the standard operator."""


def standard_domain(domain: str) -> str:
    """Return the domain of the standard operator that a node calls or replaces; "" is ai.onnx."""
    return "" if domain.startswith(DOMAIN) else plain_domain(domain)


def call(graph: Graph, node: Node, function: FunctionProto, attributes: Mapping[str, Any]) -> None:
    """Turn a node into a call of `function`, which has the same name as the node's operator.

    Args:
        graph: the graph with the node.
        node: the node; keeps its name, inputs, outputs and attributes.
        function: the function; added to the model once, with the opset of the model.
        attributes: additional attributes; their names begin with `OWN`.
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
    """Turn the call of a function back into the standard operator."""
    if isinstance(node, Node):
        node.domain = ""
    else:
        node.ClearField("domain")
    for attribute in [a for a in node.attribute if a.name.startswith(OWN)]:
        node.attribute.remove(attribute)


def is_targeted(model: ModelProto) -> bool:
    """Return True if the model has functions of a target."""
    return any(function.domain.startswith(DOMAIN) for function in model.functions)


def to_standard(model: ModelProto, nodes: Iterable[Node] | None = None) -> None:
    """Replace all calls of a target's functions in a model by standard operators, in place.

    Args:
        model: the model. The functions are removed, and the domains that no other node uses.
        nodes: the nodes of the model, if they are stored outside its graph.
    """
    held = list(model.graph.node if nodes is None else nodes)
    for node in held:
        if node.domain.startswith(DOMAIN):
            _uncall(node)
    functions = [function for function in model.functions if function.domain.startswith(DOMAIN)]
    gone = {name for f in functions for name in (f.domain, *(entry.domain for entry in f.opset_import)) if name}
    gone.difference_update(node.domain for node in with_bodies(held if gone else ()))
    for function in functions:
        model.functions.remove(function)
    for entry in [entry for entry in model.opset_import if entry.domain in gone]:
        model.opset_import.remove(entry)


def op_for(graph: Graph, node: Node) -> Op:
    """Return an emitter whose nodes get the role of `node`, and names that begin with the name of `node`."""
    op = Op(graph)
    op.role = metadata_of(node, ROLE) or op.role
    op.scope = node.name
    return op
