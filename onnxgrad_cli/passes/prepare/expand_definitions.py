"""Replace operators without a gradient rule by their definitions, which use operators that have rules.

If this project has a definition, it is used. Otherwise, the function body of the operator in the standard is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import onnx
import onnx.inliner

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import stopped
from onnxgrad_cli.autodiff.rule_call import node_attributes
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import ZERO_DIVISOR, OnnxgradError, Unknown
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import schema_of


def expand(graph: Graph, domain: str | None = None, newer_than: int | None = None) -> bool:
    """Replace each node that has a definition and no rule, if the types of its inputs are known.

    onnx can't infer the output types of some replaced operators, so types that the nodes after them lack are inferred
    on the way. If a definition does not cover a node, the node stays, and the reason is recorded in `graph.unexpanded`.
    With `domain`, only operators of that domain are replaced. With `newer_than`, standard operators that were added or
    changed after that opset are replaced, even if they have a rule.

    Returns:
        True if any node was replaced. The types must then be inferred again, and may allow further replacements.
    """
    typing = Op(graph)
    definition_of = cache(lambda op_type, domain: registry.lookup_definition(*operator_key(graph, op_type, domain)))
    stands = stands_as_it_is(graph) if newer_than is None else _older(graph, newer_than)

    def expanded(node: Node) -> Sequence[Node] | None:
        asked = domain in (None, node.domain) and not stands(node)
        definition = definition_of(node.op_type, node.domain) if asked else None
        if definition is None:
            _type(typing, node)
            return None
        try:
            return _expanded(graph, node, definition)
        except (Unknown, ZeroDivisionError) as reason:
            divides = isinstance(reason, ZeroDivisionError)
            graph.unexpanded[node.name] = f"its definition divides by {ZERO_DIVISOR}" if divides else str(reason)
            return None

    return graph.rewrite(expanded)


def operator_key(graph: Graph, op_type: str, domain: str) -> tuple[str, str, int]:
    """Return the key of an operator in the registry: its name, its domain, and the domain's version in the model."""
    return op_type, domain, graph.opset(domain) or 1


def stands_as_it_is(graph: Graph) -> Callable[[Node], bool]:
    """Return a test for nodes that need no replacement: they have a rule, or operands at which gradients stop."""
    has_rule = cache(lambda op_type, domain: registry.lookup(*operator_key(graph, op_type, domain)) is not None)
    return lambda node: has_rule(node.op_type, node.domain) or bool(stopped(node))


def _older(graph: Graph, opset: int) -> Callable[[Node], bool]:
    """Return a test for nodes whose operator has not changed since `opset` of the standard."""

    @cache
    def is_older(op_type: str) -> bool:
        now = graph.opset() or 1
        return not onnx.defs.has(op_type, now, "") or onnx.defs.get_schema(op_type, now, "").since_version <= opset

    return lambda node: not is_standard(node.domain) or is_older(node.op_type)


def _type(op: Op, node: Node) -> None:
    """Infer the types of a node's outputs if they have none yet. If onnx can't infer them, do nothing."""
    if all([not name or name in op.graph.types for name in node.output[:]]):
        return
    try:
        op.graph.types.update(op.infer(node))
    except (Unknown, OnnxgradError, onnx.defs.SchemaError, onnx.checker.ValidationError):
        return


def _expanded(graph: Graph, node: Node, definition: registry.Definition) -> Sequence[Node]:
    """Return the nodes that a definition writes in place of `node`.

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
            raise Unknown(f"its definition has {asked.inputs} inputs, but the node has {len(xs)}")
        xs += [None] * (asked.inputs - len(xs))
    attributes, unknown = node_attributes(op, node, asked)
    if unknown:
        raise Unknown(f"its definition does not cover the attribute {unknown}")
    absent = [name for name in asked.needed if attributes[name] is None]
    if absent:
        raise Unknown(f"it has no attribute {absent[0]}, which its definition requires")
    result = definition.function(op, *xs, **attributes)
    _name_results(op, node, result if isinstance(result, (tuple, list)) else (result,))
    return op.nodes


def _name_results(op: Op, node: Node, results: Sequence[Val | None]) -> None:
    """Give the results of a definition the names of the node's outputs.

    Raises:
        Unknown: the definition returns no result for an output that is used.
    """
    for name, result in itertools.zip_longest(node.output, results[: len(node.output)]):
        if name and result is not None:
            op.rename(result, name)
            if result.name in op.graph.kernels:
                op.graph.kernels[name] = op.graph.kernels.pop(result.name)
        elif name and (op.readers(name) or name in op.graph.output_names):
            raise Unknown(f"its definition does not cover its output '{name}'")


# -- the function bodies of the standard ------------------------------------------------------------------------------


def inline_function_bodies(graph: Graph) -> bool:
    """Inline operators that can be differentiated only through the standard's function body. Return True if any."""
    chosen = _operators(graph)
    if not chosen:
        return False
    bare = graph.skeleton()
    known = {value.name for value in (*bare.graph.value_info, *bare.graph.input, *bare.graph.output)}
    named = ((name, value_type) for name, value_type in graph.types.items() if name not in known)
    bare.graph.value_info.extend(onnx.helper.make_value_info(*pair) for pair in named)
    graph.adopt(onnx.inliner.inline_selected_functions(bare, chosen, inline_schema_functions=True))
    return True


def _operators(graph: Graph) -> list[tuple[str, str]]:
    """Return the operators, as (domain, name), that can be differentiated only through the standard's function body.

    Many bodies depend on the types of the inputs. So an operator is skipped while any of its nodes has inputs of
    unknown type.
    """
    typed: dict[tuple[str, str], bool] = {}
    stands = stands_as_it_is(graph)
    for node in graph.nodes:
        if stands(node) and node.op_type != "SequenceMap":  # its rule covers only bodies without captured values
            continue
        key = operator_key(graph, node.op_type, node.domain)
        if registry.lookup_definition(*key) is None and _has_body(*key):
            operator = (node.domain, node.op_type)
            typed[operator] = typed.get(operator, True) and all(x in graph.types for x in node.input if x)
    return [operator for operator, known in typed.items() if known]


def _has_body(op_type: str, domain: str, opset: int) -> bool:
    schema: Any = schema_of(op_type, opset, domain)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)
