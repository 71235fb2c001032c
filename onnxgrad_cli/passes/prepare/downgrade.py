"""Write a model of an opset that onnxruntime does not load yet at the newest one it does.

An opset is a name for a set of operators: where each operator of a model has there the same schema, or one that only
takes fewer types, the model already is one of the older opset. Operators that are newer are replaced before, by
definitions; what is left is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper

from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.autodiff.registry import NEWEST_OPSET, WIDENED
from onnxgrad_cli.errors import Caution, Refusal, UnsupportedError
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.types import is_float
from onnxgrad_cli.passes.prepare.upgrade import types_in


def lower(graph: Graph, training: Cautions) -> None:
    """Take a graph, and the graphs inside it, down to the newest opset that onnxruntime loads, if it is beyond it.

    Raises:
        UnsupportedError: operators are newer than that, or take what they did not take then; all are listed.
    """
    newest = helper.find_min_ir_version_for([helper.make_opsetid("", NEWEST_OPSET)])
    graph.proto.ir_version = min(graph.proto.ir_version, newest)
    opset = graph.opset() or 0
    if opset <= NEWEST_OPSET:
        return
    types = dict(graph.types)
    if any(subgraphs(node) for node in graph.nodes):
        types = {**types_in(onnx.shape_inference.infer_shapes(graph.skeleton()).graph), **types}
    functions = graph.proto.functions
    nodes = [*graph.nodes, *(node for function in functions for node in function.node)]
    refusals = list(_refusals(nodes, types, opset, graph.kept))
    if refusals:
        raise UnsupportedError(
            f"the model is at opset {opset}, onnxruntime loads opsets up to {NEWEST_OPSET}, which lacks these:",
            refusals,
            hint="export the model at an older opset",
        )
    imports = [*graph.proto.opset_import, *(entry for function in functions for entry in function.opset_import)]
    for entry in imports:
        if is_standard(entry.domain):
            entry.version = NEWEST_OPSET
    text = f"opset lowered from {opset} to {NEWEST_OPSET}, the newest that onnxruntime loads"
    training.cautions.append(Caution("opset change", "opset", text))


def _refusals(
    nodes: Iterable[NodeProto], types: Mapping[str, TypeProto], opset: int, kept: Mapping[str, str]
) -> Iterable[Refusal]:
    for node in nodes:
        for inner in subgraphs(node) if node.attribute else ():
            yield from _refusals(inner.node, types, opset, kept)
        reason = None if not is_standard(node.domain) else _lowered(node, types, opset)
        if reason:
            yield Refusal(node.name or node.output[0], node.op_type, kept.get(node.name, reason))


def _lowered(node: NodeProto, types: Mapping[str, TypeProto], opset: int) -> str | None:
    """Why a node has no form at the older opset; None where it has now."""
    new = onnx.defs.get_schema(node.op_type, opset, "")
    if new.since_version <= NEWEST_OPSET:
        return None
    fmod = node.op_type == "Mod" and any(a.name == "fmod" and a.i for a in node.attribute)
    if node.op_type not in WIDENED and not fmod and (node.op_type != "Mod" or is_float(types.get(node.input[0]))):
        return f"it is an operator of opset {new.since_version}"
    old = onnx.defs.get_schema(node.op_type, NEWEST_OPSET, "")
    values = [*zip(node.input, old.inputs, strict=False), *zip(node.output, old.outputs, strict=False)]
    for name, formal in values:
        kind = _kind(types.get(name)) if name else None
        if kind and kind not in formal.types:
            return f"it takes {kind} since opset {new.since_version}"
    for attribute in [a for a in node.attribute if a.name not in old.attributes]:
        node.attribute.remove(attribute)
    return None


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
