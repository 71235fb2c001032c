"""Replace operators that have no rule by what they mean in operators that have one.

The definitions of this project come first; `function_bodies` writes out the bodies of the standard after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import onnx

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import stopped
from onnxgrad_cli.autodiff.rule_call import node_attributes
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import NAUGHT, OnnxgradError, Unknown
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node


def expand(graph: Graph, domain: str | None = None, newer_than: int | None = None) -> bool:
    """Replace each node that has a definition and no rule, as far as the types of its inputs are known.

    Nodes behind an operator that onnx knows no type for are typed on the way. A definition that does not cover a node
    leaves it alone, and `graph.unexpanded` says why. With `domain`, only operators of that domain are replaced; with
    `newer_than`, those of the standard that came or changed after that opset are, whether or not they have a rule.

    Returns:
        Whether anything was replaced; types must be inferred again then, and may let more be replaced.
    """
    typing = Op(graph)
    definition_of = cache(lambda op_type, domain: registry.lookup_definition(*operator_key(graph, op_type, domain)))
    stands = stands_as_it_is(graph) if newer_than is None else _older(graph, newer_than)
    nodes: list[Node] = []
    changed = False
    for node in graph.nodes:
        asked = domain in (None, node.domain) and not stands(node)
        definition = definition_of(node.op_type, node.domain) if asked else None
        if definition is None:
            _type(typing, node)
            nodes.append(node)
            continue
        try:
            nodes += _expanded(graph, node, definition)
            changed = True
        except (Unknown, ZeroDivisionError) as reason:
            divides = isinstance(reason, ZeroDivisionError)
            graph.unexpanded[node.name] = f"its definition divides by {NAUGHT}" if divides else str(reason)
            nodes.append(node)
    if changed:
        graph.set_nodes(nodes)
    return changed


def operator_key(graph: Graph, op_type: str, domain: str) -> tuple[str, str, int]:
    """An operator as the registry knows it: its name, its domain, and the version of the domain in the model."""
    return op_type, domain, graph.opset(domain) or 1


def stands_as_it_is(graph: Graph) -> Callable[[Node], bool]:
    """Whether a node is differentiated as it is: it has a rule, or operands at which gradients stop."""
    has_rule = cache(lambda op_type, domain: registry.lookup(*operator_key(graph, op_type, domain)) is not None)
    return lambda node: has_rule(node.op_type, node.domain) or bool(stopped(node))


def _older(graph: Graph, opset: int) -> Callable[[Node], bool]:
    """Whether the form of a node's operator is one that an older opset of the standard has too."""

    @cache
    def is_older(op_type: str) -> bool:
        now = graph.opset() or 1
        return not onnx.defs.has(op_type, now, "") or onnx.defs.get_schema(op_type, now, "").since_version <= opset

    return lambda node: not is_standard(node.domain) or is_older(node.op_type)


def _type(op: Op, node: Node) -> None:
    """Type a node's outputs from its inputs, where they have no type yet and onnx knows one."""
    if all([not name or name in op.graph.types for name in node.output[:]]):
        return
    try:
        op.graph.types.update(op.infer(node))
    except (Unknown, OnnxgradError, onnx.defs.SchemaError, onnx.checker.ValidationError):
        return


def _expanded(graph: Graph, node: Node, definition: registry.Definition) -> Sequence[Node]:
    """The nodes that a definition writes in place of one.

    Raises:
        Unknown: the definition does not cover the node, or the type of an input is unknown.
    """
    op = Op(graph)
    op.replaces(node)
    op.node = node
    asked = registry.Signature.of_definition(definition.function)
    xs: list[Val | None] = [op.val(name) if name else None for name in node.input]
    untyped = [x.name for x in xs if x is not None and x.type is None]
    if untyped:
        raise Unknown(f"the type of '{untyped[0]}' is unknown")
    if not asked.variadic:
        if len(xs) > asked.inputs:
            raise Unknown(f"its definition knows {asked.inputs} inputs, the node has {len(xs)}")
        xs += [None] * (asked.inputs - len(xs))
    attributes, unknown = node_attributes(op, node, asked)
    if unknown:
        raise Unknown(f"attribute {unknown} is not covered by its definition")
    absent = [name for name in asked.needed if attributes[name] is None]
    if absent:
        raise Unknown(f"it has no attribute {absent[0]}, which its definition needs")
    result = definition.function(op, *xs, **attributes)
    _name_results(op, node, result if isinstance(result, (tuple, list)) else (result,))
    return op.nodes


def _name_results(op: Op, node: Node, results: Sequence[Val | None]) -> None:
    """Give the results of a definition the names of the node's outputs.

    Raises:
        Unknown: the definition has no result for an output that is read.
    """
    for name, result in itertools.zip_longest(node.output, results[: len(node.output)]):
        if name and result is not None:
            op.rename(result, name)
            if result.name in op.graph.kernels:
                op.graph.kernels[name] = op.graph.kernels.pop(result.name)
        elif name and (op.readers(name) or name in op.graph.output_names):
            raise Unknown(f"its output '{name}' is not covered by its definition")
