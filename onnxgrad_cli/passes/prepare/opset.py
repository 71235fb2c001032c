"""The opset that the backward graph needs, and how the graph comes to it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import onnx.version_converter
from onnx import TensorProto

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.errors import Caution, OnnxgradError
from onnxgrad_cli.execution.opsets import newest_loaded
from onnxgrad_cli.files import load_model
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.types import dtype_of, element_type, is_float
from onnxgrad_cli.options import LossOptions
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
        graph.adopt(onnx.version_converter.convert_version(graph.skeleton(), opset))


def opset_of_losses(options: LossOptions) -> int:
    """The newest opset that a loss in a file is written for; what can't be read is refused where it is used."""
    found = [OLDEST_OPSET]
    for spec in options.losses:
        if spec.name.endswith(".onnx"):
            with suppress(OnnxgradError):
                found.append(Graph(load_model(spec.name)[0]).opset() or OLDEST_OPSET)
    return max(found)


def raise_opset(graph: Graph, training: Cautions, least: int = OLDEST_OPSET) -> bool:
    """Convert the graph where what its gradient needs, or `least`, is newer than it; whether it was.

    Raises:
        UnsupportedError: an operator has no form at that opset.
    """
    opset = graph.opset() or OLDEST_OPSET
    needed = max(opset, OLDEST_OPSET, _needed(graph, max(opset, OLDEST_OPSET)))
    target = max(needed, newest_loaded(least) if least > needed else needed)
    if target == opset:
        return False
    upgrade(graph, target)
    why = "the backward graph needs it" if target == needed else "the loss is written for it"
    text = f"opset raised from {opset} to {target}: {why}"
    training.cautions.append(Caution("opset change", "opset", text))
    return True


def _needed(graph: Graph, opset: int) -> int:
    """The opset that the gradient of a graph at `opset` needs."""
    bfloat16 = any(dtype_of(value_type) == TensorProto.BFLOAT16 for value_type in graph.distinct_types())
    needs = [FIRST_WITH_BFLOAT16 if bfloat16 else OLDEST_OPSET]
    operators = set[tuple[str, str]]()
    for node in with_bodies(graph.nodes):
        operator = (node.op_type, node.domain)
        if operator not in operators and _any_float(graph, node.output[:]):
            operators.add(operator)
    for op_type, domain in operators:
        needs.append(_needed_by(op_type, domain, graph.opset(domain) or 1 if domain else opset))
    return max(needs)


def _needed_by(op_type: str, domain: str, version: int) -> int:
    """The opset that the gradient of one operator, at a version of its domain, needs."""
    rule = registry.lookup(op_type, domain, version)
    if rule is not None:
        return OLDEST_OPSET if rule.is_zero else rule.needs_opset
    definition = registry.lookup_definition(op_type, domain, version)
    if definition is not None:
        return definition.needs_opset
    return (registry.first_known(op_type, domain, version) if is_standard(domain) else None) or OLDEST_OPSET


def _any_float(graph: Graph, names: Iterable[str]) -> bool:
    """Whether any of these are, or may be, floats: an output may be declared without a type."""
    types = (element_type(graph.types.get(name)) for name in names if name)
    return any(not dtype_of(value_type) or is_float(value_type) for value_type in types)
