"""Write out operators without a rule by the function body that the standard itself gives many operators."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.inliner

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare.expand import operator_key, stands_as_it_is


def inline_function_bodies(graph: Graph) -> bool:
    """Write out the operators that only the function body of the standard can differentiate; whether there are any."""
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
    """The operators, as (domain, name), that only the function body of the standard can differentiate.

    Many bodies depend on the types of the inputs, so an operator is left out as long as one of its nodes lacks some.
    """
    typed: dict[tuple[str, str], bool] = {}
    stands = stands_as_it_is(graph)
    for node in graph.nodes:
        if stands(node) and node.op_type != "SequenceMap":  # whose rule covers only bodies that capture nothing
            continue
        key = operator_key(graph, node.op_type, node.domain)
        if registry.lookup_definition(*key) is None and _has_body(*key):
            operator = (node.domain, node.op_type)
            typed[operator] = typed.get(operator, True) and all(x in graph.types for x in node.input if x)
    return [operator for operator, known in typed.items() if known]


def _has_body(op_type: str, domain: str, opset: int) -> bool:
    try:
        schema: Any = onnx.defs.get_schema(op_type, opset, plain_domain(domain))
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)
