"""Choose the opset of a model: one that its gradient needs and that the installed onnxruntime loads and runs.

An opset is a version of the set of operators. A model with a too old opset is upgraded. A model with a too new opset is
rewritten for an older one, as follows. Newer operators that have a definition are replaced. If each remaining operator
has the same schema at the older opset, or one that only accepts fewer types, the opset number is lowered. Other newer
operators are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import onnx
import onnx.version_converter
from onnx import TensorProto, TypeProto, helper

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.differentiation import Cautions
from onnxgrad_cli.autodiff.registry import NEWEST_OPSET, lookup_definition
from onnxgrad_cli.errors import Caution, OnnxgradError, Refusal, UnsupportedError
from onnxgrad_cli.execution.kernels import ASSURED, newest_loaded
from onnxgrad_cli.files import load_model
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import subgraphs, types_in, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import dtype_of, element_type, is_float
from onnxgrad_cli.options import LossOptions

FIRST_WITH_BFLOAT16 = 22
"""The first opset at which all operators that rules emit accept bfloat16. Round and Softplus were among the last."""


OLDEST_OPSET = 13
"""The oldest opset whose operator schemas are those that the rules expect."""


def convert(graph: Graph, opset: int) -> None:
    """Convert the graph to a different opset.

    For an older opset, onnx's version converter is used, which may raise any exception.
    """
    if opset >= (graph.opset() or opset):
        from onnxgrad_cli.passes.prepare.upgrade import upgrade

        upgrade(graph, opset)
    else:
        graph.adopt(onnx.version_converter.convert_version(graph.skeleton(), opset))


def opset_of_losses(options: LossOptions) -> int:
    """Return the newest opset among the losses that are files. Files that can't be read are skipped.

    They are refused when the loss is appended.
    """
    found = [OLDEST_OPSET]
    for spec in options.losses:
        if spec.name.endswith(".onnx"):
            with suppress(OnnxgradError):
                found.append(Graph(load_model(spec.name)[0]).opset() or OLDEST_OPSET)
    return max(found)


def raise_opset(graph: Graph, training: Cautions, least: int = OLDEST_OPSET) -> bool:
    """Upgrade the graph if its gradient needs a newer opset, or if `least` is newer. Return True if it changed.

    Raises:
        UnsupportedError: an operator can't be converted to that opset.
    """
    opset = graph.opset() or OLDEST_OPSET
    needed = max(opset, OLDEST_OPSET, _needed(graph, max(opset, OLDEST_OPSET)))
    target = max(needed, newest_loaded(least) if least > needed else needed)
    if target == opset:
        return False
    from onnxgrad_cli.passes.prepare.upgrade import upgrade  # many models have a recent opset

    upgrade(graph, target)
    why = "the backward graph needs it" if target == needed else "the loss is written for it"
    text = f"opset raised from {opset} to {target}: {why}"
    training.cautions.append(Caution("opset change", "opset", text))
    return True


def _needed(graph: Graph, opset: int) -> int:
    """Return the opset that the gradient of a graph at `opset` needs."""
    bfloat16 = any(dtype_of(value_type) == TensorProto.BFLOAT16 for value_type in graph.distinct_types())
    needs = [FIRST_WITH_BFLOAT16 if bfloat16 else OLDEST_OPSET]
    operators = set[tuple[str, str]]()
    for node in with_bodies(graph.nodes):
        operator = (node.op_type, node.domain)
        types = [] if operator in operators else [element_type(graph.types.get(name)) for name in node.output if name]
        if any(not dtype_of(value_type) or is_float(value_type) for value_type in types):
            operators.add(operator)
            needs.append(_needed_by(*operator, graph.opset(node.domain) or 1 if node.domain else opset))
    return max(needs)


def _needed_by(op_type: str, domain: str, version: int) -> int:
    """Return the opset of the standard that the gradient of an operator needs. `version` is that of its domain."""
    rule = registry.lookup(op_type, domain, version)
    if rule is not None:
        return OLDEST_OPSET if rule.is_zero else rule.needs_opset
    definition = registry.lookup_definition(op_type, domain, version)
    if definition is not None:
        return definition.needs_opset
    return (registry.first_known(op_type, domain, version) if is_standard(domain) else None) or OLDEST_OPSET


WIDENED = frozenset(
    "BitShift Cast Celu Compress DepthToSpace DequantizeLinear Einsum OneHot Optional OptionalGetElement "
    "OptionalHasElement QuantizeLinear Range ReduceLogSum ReduceLogSumExp ReverseSequence Unique".split()
)
"""Operators whose only change at opsets 27 and 28 is that they accept more types, so the older schema can be used.

Range also has a new attribute, but only for the new types.
"""

LAGGING = frozenset("DequantizeLinear Optional OptionalGetElement OptionalHasElement QuantizeLinear".split())
"""Operators for whose newest schemas onnxruntime 1.32 has no kernels, although it loads opset 28."""

LAST_WITH_KERNELS = 27
"""The newest opset at which onnxruntime 1.32 has kernels for `LAGGING`. Their schemas are of opset 25 or older."""


class Limit(NamedTuple):
    """The highest opset that a graph may have, and the reason, which begins with 'the newest opset'."""

    opset: int
    reason: str


def opset_limit(graph: Graph) -> Limit:
    """Return the newest opset, up to the graph's own, for which rules were tested and which onnxruntime loads and runs.

    If onnxruntime lacks kernels for the newest schemas of some operators in the model, the limit is the newest opset at
    which it has kernels for them. But if the rest of the model can't be expressed at that opset, the limit is not
    lowered.
    """
    opset = graph.opset() or 0
    newest = newest_loaded(min(opset, NEWEST_OPSET))
    if newest > LAST_WITH_KERNELS:
        lagging = sorted({n.op_type for n in with_bodies(graph.nodes) if is_standard(n.domain)} & LAGGING)
        if lagging and not _refusals(graph, LAST_WITH_KERNELS, before_definitions=True):
            return Limit(LAST_WITH_KERNELS, f"the newest opset with onnxruntime kernels for {', '.join(lagging)}")
    by_rules = newest == NEWEST_OPSET
    return Limit(
        newest, f"the newest opset {'for which the rules are proven' if by_rules else 'that onnxruntime loads'}"
    )


def downgrade(graph: Graph, limit: Limit, training: Cautions) -> None:
    """If the opset of a graph and its bodies is above `limit`, lower it to `limit`.

    Raises:
        UnsupportedError: operators are newer than that opset, or read types that they don't accept there. All are
            listed.
    """
    newest = helper.find_min_ir_version_for([helper.make_opsetid("", max(limit.opset, ASSURED))])
    graph.proto.ir_version = min(graph.proto.ir_version, newest)
    opset = graph.opset() or 0
    if opset <= limit.opset:
        return
    refusals = _refusals(graph, limit.opset)
    if refusals:
        raise UnsupportedError(
            f"the model has opset {opset}; these nodes can't be converted to opset {limit.opset}, {limit.reason}:",
            refusals,
            hint="export the model at an older opset",
        )
    for node in with_bodies(nodes_of(graph)):
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


def nodes_of(graph: Graph) -> Sequence[Node]:
    """Return the nodes of a graph and of the functions of its model."""
    return [*graph.nodes, *(node for function in graph.proto.functions for node in function.node)]


def _refusals(graph: Graph, target: int, before_definitions: bool = False) -> list[Refusal]:
    """Return a refusal (node, operator and reason) for each node that can't be expressed at an older opset.

    Args:
        graph: the graph, at its present opset.
        target: the older opset.
        before_definitions: leave out nodes that have a definition, which will replace them.
    """
    types = dict(graph.types)
    if any(subgraphs(node) for node in graph.nodes):
        types = {**types_in(infer_shapes(graph.skeleton()).graph), **types}
    opset = graph.opset() or 0
    found: list[Refusal] = []
    for node in with_bodies(nodes_of(graph)):
        reason = _misfit(node, types, opset, target) if is_standard(node.domain) else None
        replaced = before_definitions and lookup_definition(node.op_type, "", opset) is not None
        if reason and not replaced:
            found.append(Refusal(node.name or node.output[0], node.op_type, graph.unexpanded.get(node.name, reason)))
    return found


@cache
def _since(op_type: str, opset: int) -> int:
    """Return the opset since which an operator has the schema that it has at `opset`; 0 if it isn't standard."""
    return onnx.defs.get_schema(op_type, opset, "").since_version if onnx.defs.has(op_type, opset, "") else 0


def _misfit(node: Node, types: Mapping[str, TypeProto], opset: int, target: int) -> str | None:
    """Return the reason why a node can't be expressed at an older opset, or None if it can."""
    since = _since(node.op_type, opset)
    if since <= target:
        return None
    if since > NEWEST_OPSET or not _means_the_same(node, types):
        return f"it exists only since opset {since}"
    for kind, takes in _types_and_formals(node, types, target):
        if kind not in takes:
            return f"it accepts {kind} only since opset {since}"
    return None


def _means_the_same(node: Node, types: Mapping[str, TypeProto]) -> bool:
    """Return True if an older schema gives a node of opset 27 or 28 the same meaning, for the types it accepts."""
    given = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Mod":  # fmod=0 is new for floats
        return ("fmod" in given and given["fmod"].i == 1) or not is_float(types.get(node.input[0]))
    if node.op_type == "SpaceToDepth":  # the attribute mode is new
        return "mode" not in given or given["mode"].s == b"DCR"
    return node.op_type in WIDENED


def _types_and_formals(node: Node, types: Mapping[str, TypeProto], target: int) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the type of each typed operand and result of a node, with the types that are accepted there at `target`."""
    schema = onnx.defs.get_schema(node.op_type, target, "")
    values = [*zip(node.input, schema.inputs, strict=False), *zip(node.output, schema.outputs, strict=False)]
    for name, formal in values:
        kind = _kind(types.get(name)) if name else None
        if kind:
            yield kind, formal.types


def _kind(value_type: TypeProto | None) -> str | None:
    """Return a type as operator schemas write it, such as tensor(float), or None if it is unknown."""
    field = value_type.WhichOneof("value") if value_type is not None else None
    if value_type is None or field is None:
        return None
    if field == "tensor_type":
        return f"tensor({TensorProto.DataType.Name(value_type.tensor_type.elem_type).lower()})"
    sequence = field == "sequence_type"
    kind = _kind(value_type.sequence_type.elem_type if sequence else value_type.optional_type.elem_type)
    return kind and f"{'seq' if sequence else 'optional'}({kind})"
