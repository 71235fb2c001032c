"""Write a model at an older opset, where the installed onnxruntime does not load its own, or has no kernels there.

An opset is a name for a set of operators: where each operator of a model has there the same schema, or one that only
takes fewer types, the model already is one of the older opset. Operators that are newer are replaced before, by
definitions; what is left is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import onnx
from onnx import TensorProto, TypeProto, helper

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.autodiff.registry import NEWEST_OPSET, lookup_definition
from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError
from onnxgrad_cli.execution.opsets import ASSURED, newest_loaded
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import subgraphs, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.prepare.upgrade import types_in

WIDENED = frozenset(
    "BitShift Cast Celu Compress DepthToSpace DequantizeLinear Einsum OneHot Optional OptionalGetElement "
    "OptionalHasElement QuantizeLinear Range ReduceLogSum ReduceLogSumExp ReverseSequence Unique".split()
)
"""Operators that changed at opsets 27 and 28 in the types they take alone: their older form means the same.

Range has one more attribute, for types that it did not take.
"""

LAGGING = frozenset("DequantizeLinear Optional OptionalGetElement OptionalHasElement QuantizeLinear".split())
"""Operators of which onnxruntime 1.32, which loads opset 28, has kernels for their older forms only."""

LAST_WITH_KERNELS = 27
"""The newest opset at which onnxruntime 1.32 has kernels of `LAGGING`: of their forms of opset 25 and before."""


class Limit(NamedTuple):
    """The opset that a graph is to be at, and what sets it: 'the newest that ...'."""

    opset: int
    reason: str


def opset_limit(graph: Graph) -> Limit:
    """The newest opset, not beyond the graph's own, that the rules are proven for and onnxruntime loads and runs.

    A model with operators that onnxruntime has no kernels for in their newest form is taken to the opset of their older
    one, unless the rest of the model can't be said there.
    """
    opset = graph.opset() or 0
    newest = newest_loaded(min(opset, NEWEST_OPSET))
    if newest > LAST_WITH_KERNELS:
        lagging = sorted({n.op_type for n in with_bodies(graph.nodes) if is_standard(n.domain)} & LAGGING)
        if lagging and not _refusals(graph, LAST_WITH_KERNELS, before_definitions=True):
            return Limit(LAST_WITH_KERNELS, f"the newest at which onnxruntime has kernels for {', '.join(lagging)}")
    by_rules = newest == NEWEST_OPSET
    return Limit(newest, f"the newest that {'the rules were proven at' if by_rules else 'onnxruntime loads'}")


def downgrade(graph: Graph, limit: Limit, training: Cautions) -> None:
    """Take a graph, and the graphs inside it, down to an opset, if it is beyond it.

    Raises:
        UnsupportedError: operators are newer than that, or take what they did not take then; all are listed.
    """
    newest = helper.find_min_ir_version_for([helper.make_opsetid("", max(limit.opset, ASSURED))])
    graph.proto.ir_version = min(graph.proto.ir_version, newest)
    opset = graph.opset() or 0
    if opset <= limit.opset:
        return
    refusals = _refusals(graph, limit.opset)
    if refusals:
        raise UnsupportedError(
            f"the model is at opset {opset}; opset {limit.opset}, {limit.reason}, lacks these:",
            refusals,
            hint="export the model at an older opset",
        )
    for node in with_bodies(_nodes(graph)):
        if is_standard(node.domain) and _since(node.op_type, opset) > limit.opset:
            known = onnx.defs.get_schema(node.op_type, limit.opset, "").attributes
            for attribute in [each for each in node.attribute if each.name not in known]:
                node.attribute.remove(attribute)
    functions = graph.proto.functions
    imports = [*graph.proto.opset_import, *(entry for function in functions for entry in function.opset_import)]
    for entry in imports:
        if is_standard(entry.domain):
            entry.version = limit.opset
    text = f"opset lowered from {opset} to {limit.opset}, {limit.reason}"
    training.cautions.append(Caution("opset change", "opset", text))


def _nodes(graph: Graph) -> Sequence[Node]:
    return [*graph.nodes, *(node for function in graph.proto.functions for node in function.node)]


def _refusals(graph: Graph, target: int, before_definitions: bool = False) -> list[Refusal]:
    """The nodes that have no form at an older opset; with `before_definitions` without those that have a definition."""
    types = dict(graph.types)
    if any(subgraphs(node) for node in graph.nodes):
        types = {**types_in(infer_shapes(graph.skeleton()).graph), **types}
    opset = graph.opset() or 0
    found: list[Refusal] = []
    for node in with_bodies(_nodes(graph)):
        reason = _misfit(node, types, opset, target) if is_standard(node.domain) else None
        replaced = before_definitions and lookup_definition(node.op_type, "", opset) is not None
        if reason and not replaced:
            found.append(Refusal(node.name or node.output[0], node.op_type, graph.unexpanded.get(node.name, reason)))
    return found


@cache
def _since(op_type: str, opset: int) -> int:
    """The opset of an operator's form; 0 of what the standard does not know."""
    return onnx.defs.get_schema(op_type, opset, "").since_version if onnx.defs.has(op_type, opset, "") else 0


def _misfit(node: Node, types: Mapping[str, TypeProto], opset: int, target: int) -> str | None:
    """Why a node has no form at an older opset; None where it has."""
    since = _since(node.op_type, opset)
    if since <= target:
        return None
    if since > NEWEST_OPSET or not _means_the_same(node, types):
        return f"it is an operator of opset {since}"
    for kind, takes in _types_and_formals(node, types, target):
        if kind not in takes:
            return f"it takes {kind} since opset {since}"
    return None


def _means_the_same(node: Node, types: Mapping[str, TypeProto]) -> bool:
    """Whether a node of opset 27 or 28 means in its older form what it means now, for the types that this one takes."""
    given = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Mod":  # of floats, fmod=0 is new
        return ("fmod" in given and given["fmod"].i == 1) or not is_float(types.get(node.input[0]))
    if node.op_type == "SpaceToDepth":  # its mode is new
        return "mode" not in given or given["mode"].s == b"DCR"
    return node.op_type in WIDENED


def _types_and_formals(node: Node, types: Mapping[str, TypeProto], target: int) -> Iterator[tuple[str, Iterable[str]]]:
    """The known types of a node's inputs and outputs, each with those that the operator takes there at an opset."""
    schema = onnx.defs.get_schema(node.op_type, target, "")
    values = [*zip(node.input, schema.inputs, strict=False), *zip(node.output, schema.outputs, strict=False)]
    for name, formal in values:
        kind = _kind(types.get(name)) if name else None
        if kind:
            yield kind, formal.types


def _kind(value_type: TypeProto | None) -> str | None:
    """A type as schemas write it; None where it is unknown."""
    field = value_type.WhichOneof("value") if value_type is not None else None
    if value_type is None or field is None:
        return None
    if field == "tensor_type":
        return f"tensor({TensorProto.DataType.Name(value_type.tensor_type.elem_type).lower()})"
    sequence = field == "sequence_type"
    kind = _kind(value_type.sequence_type.elem_type if sequence else value_type.optional_type.elem_type)
    return kind and f"{'seq' if sequence else 'optional'}({kind})"
