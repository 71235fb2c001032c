"""The opset that the backward graph needs, and how the graph comes to it."""

from __future__ import annotations

from collections.abc import Iterable

import onnx.version_converter
from onnx import TensorProto

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.skeleton import adopt
from onnxgrad_cli.ir.types import dtype_of, is_float
from onnxgrad_cli.passes.prepare.upgrade import upgrade

FIRST_WITH_BFLOAT16 = 22
"""The opset from which all that the rules emit takes bfloat16: Round, Softplus and others came to it that late."""


OLDEST_OPSET = 13
"""The lowest opset whose operators the rules know in their present form."""


def convert(graph: Graph, opset: int) -> None:
    """Take the graph to another opset; the official converter, which lowers it, raises errors of any kind."""
    if opset >= (graph.opset() or opset):
        upgrade(graph, opset)
    else:
        adopt(graph, onnx.version_converter.convert_version(graph.skeleton(), opset))


def raise_opset(graph: Graph, training: Cautions) -> bool:
    """Convert the graph where what its gradient needs is newer than it; whether it was.

    Raises:
        UnsupportedError: an operator has no form at that opset.
    """
    opset = graph.opset() or OLDEST_OPSET
    target = max(opset, OLDEST_OPSET, _needed(graph, max(opset, OLDEST_OPSET)))
    if target == opset:
        return False
    upgrade(graph, target)
    text = f"opset raised from {opset} to {target}: the backward graph needs it"
    training.cautions.append(Caution("opset change", "opset", text))
    return True


def _needed(graph: Graph, opset: int) -> int:
    bfloat16 = any(dtype_of(value_type) == TensorProto.BFLOAT16 for value_type in graph.distinct_types())
    needs = [FIRST_WITH_BFLOAT16 if bfloat16 else OLDEST_OPSET]
    operators = {(n.op_type, n.domain) for n in with_bodies(graph.nodes) if _any_float(graph, n.output[:])}
    for op_type, domain in operators:
        key = (op_type, domain, graph.opset(domain) or 1 if domain else opset)
        rule = registry.lookup(*key)
        definition = None if rule else registry.lookup_definition(*key)
        if definition is not None or (rule is not None and not rule.is_zero):
            needs.append((definition or rule).needs_opset)  # type: ignore[union-attr]
        elif rule is None and is_standard(domain):
            needs.append(registry.first_known(*key) or OLDEST_OPSET)
    return max(needs)


def _any_float(graph: Graph, names: Iterable[str]) -> bool:
    return any(name not in graph.types or is_float(graph.types[name]) for name in names if name)
