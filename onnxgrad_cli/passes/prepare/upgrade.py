"""Upgrade a model to a newer opset by rewriting each operator whose schema has changed since.

onnx's own converter does this too, but silently changes the results of some models. It gives half-pixel coordinates to
Resize 10 and Upsample and another axis to Hardmax, and writes float32 constants into models of other types. Here, a
node stays unchanged only if the operator's new schema accepts it. Other nodes are rewritten by the functions below, or
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxgrad_cli.errors import Refusal, UnsupportedError
from onnxgrad_cli.ir.dialects import OF_ONNXRUNTIME
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modules import origin
from onnxgrad_cli.ir.node import Node, copied, make_node, messages, write
from onnxgrad_cli.ir.node_values import reads, schema_of, subgraphs, types_in
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of

Change = Callable[["_Upgrade", Node], Sequence[Node] | None]
CHANGES: dict[tuple[str, int], Change] = {}
"""Map from (operator, the opset that changed its schema) to the function that rewrites a node for that opset.

The function returns the nodes that replace the node, or None if it changed the node in place.
"""


def upgrade(graph: Graph, opset: int) -> None:
    """Convert a graph and its bodies to a newer opset of the default domain. Other domains stay unchanged.

    Args:
        graph: the graph; changed in place. Types that were inferred at the old opset remain valid.
        opset: the new opset, at least the graph's own.

    Raises:
        UnsupportedError: nodes can't be converted to that opset; all of them are listed.

    Source: the operators' pages and change log, https://onnx.ai/onnx/operators.
    """
    work = _Upgrade(graph)
    for version in range(work.opset + 1, opset + 1):
        graph.set_nodes(work.stepped(graph.nodes, version))
    if work.refused:
        raise UnsupportedError(
            f"these nodes can't be converted from opset {work.opset} to opset {opset}, which the gradient requires:",
            work.refused.values(),
            hint=f"export the model at opset {opset} or newer",
        )
    for entry in graph.proto.opset_import:
        if is_standard(entry.domain):
            entry.version = opset
    imports = [e for e in graph.proto.opset_import if is_standard(e.domain)]
    graph.proto.ir_version = max(graph.proto.ir_version, helper.find_min_ir_version_for(imports))


class _NotUpgradable(Exception):
    """Raised with the reason why a node can't be converted to the next opset."""


class _Upgrade:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.opset = graph.opset() or 1
        self.refused: dict[str, Refusal] = {}
        self.read = {name for node in graph.nodes for name in reads(node)} | set(graph.output_names)
        self.types = dict(graph.types)
        if not self.types or any(subgraphs(node) for node in graph.nodes):
            inferred = infer_shapes(graph.skeleton()).graph
            self.types = {**types_in(inferred), **self.types}

    def stepped(self, nodes: Iterable[Node], version: int) -> list[Node]:
        result: list[Node] = []
        for node in nodes:
            for inner in subgraphs(node) if node.attribute else ():
                write(self.stepped(inner.node, version), inner.node)
            try:
                result += self._next(node, version)
            except _NotUpgradable as reason:
                label = node.name or node.output[0]
                self.refused.setdefault(node.output[0], Refusal(label, node.op_type, str(reason)))
                result.append(node)
        return result

    def _next(self, node: Node, version: int) -> Sequence[Node]:
        """Return the nodes that replace one node at opset `version`."""
        if not is_standard(node.domain) or node.output[0] in self.refused:
            return [node]
        change = CHANGES.get((node.op_type, version))
        if change is not None:
            replaced = change(self, node)
            return [node] if replaced is None else replaced
        old, new = _schema(node.op_type, version - 1), _schema(node.op_type, version)
        if old is None and node.op_type in OF_ONNXRUNTIME:
            return [node]
        if old is None or new is None:
            raise _NotUpgradable(f"opset {version - 1} does not have this operator")
        if new.since_version == version:
            _same_form(node, old, new)
        return [node]

    # -- helpers of the changes ---------------------------------------------------------------------------------------

    def dtype(self, name: str) -> int:
        found = dtype_of(self.types.get(name))
        if not found:
            raise _NotUpgradable(f"the type of '{name}' is unknown")
        return found

    def shape(self, name: str) -> Shape | None:
        return shape_of(self.types.get(name))

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        return self.graph.add_constant(np.asarray(values, dtype))

    def node(self, op_type: str, inputs: Sequence[str], like: Node, **attributes: Any) -> Node:
        name = self.graph.fresh(f"{like.name or like.output[0]}/{op_type}")
        written = make_node(op_type, inputs, [self.graph.fresh(f"{name}_out")], name=name, **attributes)
        written.metadata = origin(like)
        return written

    def emit(self, nodes: list[Node], like: Node, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node to `nodes`, and return its output."""
        nodes.append(self.node(op_type, inputs, like, **attributes))
        return nodes[-1].output[0]


_schema = cache(schema_of)


def _same_form(node: Node, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> None:
    """Check that the new schema accepts a node unchanged. If it changed defaults, write the old ones out."""
    if new.deprecated:
        raise _NotUpgradable(f"opset {new.since_version} removed it")
    given = {attribute.name for attribute in node.attribute}
    lost = sorted(given - set(new.attributes))
    missing = sorted(n for n, a in new.attributes.items() if a.required and n not in given)
    if lost or missing:
        raise _NotUpgradable(f"opset {new.since_version} changed its attribute {', '.join(lost or missing)}")
    if not new.min_input <= len(node.input) <= new.max_input or len(node.output) > new.max_output:
        raise _NotUpgradable(f"opset {new.since_version} changed its inputs or outputs")
    for name, attribute in old.attributes.items():
        default, kept = attribute.default_value, name not in given and name in new.attributes
        if kept and default.type and default != new.attributes[name].default_value:
            node.attribute.append(default)


def _take(node: Node, name: str, default: Any = None) -> Any:
    """Remove an attribute from a node and return its value, with bytes decoded."""
    for position, attribute in enumerate(node.attribute):
        if attribute.name == name:
            value = helper.get_attribute_value(attribute)
            del node.attribute[position]
            return value.decode() if isinstance(value, bytes) else value
    return default


def _give(node: Node, **attributes: Any) -> None:
    """Set attributes of a node."""
    for name, value in attributes.items():
        _take(node, name)
        node.attribute.append(helper.make_attribute(name, value))


def change(op_types: str, version: int) -> Callable[[Change], Change]:
    """Register the decorated function as the change that opset `version` requires for some operators."""

    def register(function: Change) -> Change:
        CHANGES.update({(op_type, version): function for op_type in op_types.split()})
        return function

    return register


# -- attributes that became inputs ------------------------------------------------------------------------------


@change("ReduceSum Split Squeeze Unsqueeze", 13)
@change("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare", 18)
def _axes(up: _Upgrade, node: Node) -> None:
    values = _take(node, "split" if node.op_type == "Split" else "axes")
    if values:  # without axes, a reduction takes all, before and after the change
        node.input.append(up.constant(values))


@change("Split", 18)
def _split_evenly(up: _Upgrade, node: Node) -> None:
    if len(node.input) < 2 or not node.input[1]:
        _give(node, num_outputs=len(node.output))


@change("Slice", 10)
def _slice(up: _Upgrade, node: Node) -> None:
    given = [_take(node, name) for name in ("starts", "ends", "axes")]
    node.input.extend(up.constant(values) for values in given if values is not None)


@change("TopK", 10)
def _top_k(up: _Upgrade, node: Node) -> None:
    node.input.append(up.constant([_take(node, "k")]))


@change("Clip", 11)
def _clip(up: _Upgrade, node: Node) -> None:
    bounds = [_take(node, "min"), _take(node, "max")]
    if bounds == [None, None]:
        return
    dtype = helper.tensor_dtype_to_np_dtype(up.dtype(node.input[0]))
    with np.errstate(over="ignore"):  # the largest float32, the old default, is beyond float16
        node.input.extend("" if bound is None else up.constant(bound, dtype) for bound in bounds)
    if bounds[1] is None:
        del node.input[2:]


@change("Pad", 11)
def _pad(up: _Upgrade, node: Node) -> None:
    pads, value = _take(node, "pads"), _take(node, "value", 0.0)
    node.input.append(up.constant(pads))
    if value:
        node.input.append(up.constant(value, helper.tensor_dtype_to_np_dtype(up.dtype(node.input[0]))))


@change("Dropout", 10)
def _dropout_mask(up: _Upgrade, node: Node) -> None:
    if any(name in up.read for name in node.output[1:]):
        raise _NotUpgradable("the model reads its mask, which inference does not set before opset 10")
    del node.output[1:]


@change("Dropout", 12)
def _dropout(up: _Upgrade, node: Node) -> None:
    node.input.append(up.constant(_take(node, "ratio", 0.5), np.float32))


@change("DFT", 20)
def _dft(up: _Upgrade, node: Node) -> None:
    node.input.extend([""] * (2 - len(node.input)))
    node.input.append(up.constant(_take(node, "axis", 1)))


# -- operators under another name ---------------------------------------------------------------------------------


@change("Scatter", 11)
@change("Upsample", 10)
def _other_name(up: _Upgrade, node: Node) -> None:
    node.op_type = {"Scatter": "ScatterElements", "Upsample": "Resize"}[node.op_type]


@change("Upsample", 9)
def _upsample(up: _Upgrade, node: Node) -> None:
    node.input.append(up.constant(_take(node, "scales"), np.float32))


# -- changes of meaning -------------------------------------------------------------------------------------------


@change("Resize", 11)
def _coordinates(up: _Upgrade, node: Node) -> Sequence[Node] | None:
    """Write out the rules of Resize 10: asymmetric coordinates; 'nearest' rounds down, or up along axes that shrink."""
    x, scales = node.input
    node.input[:] = [x, up.constant([], np.float32), scales]
    _give(node, coordinate_transformation_mode="asymmetric")
    if next((a.s for a in node.attribute if a.name == "mode"), b"nearest") != b"nearest":
        return None
    known = up.graph.constant(scales)
    if known is None:
        raise _NotUpgradable(
            f"its rounding depends on whether '{scales}' shrinks or enlarges an axis, which is unknown"
        )
    if np.all(known >= 1) or np.all(known <= 1):
        _give(node, nearest_mode="floor" if np.all(known >= 1) else "ceil")
        return None
    grown = copied(node)
    grown.name = up.graph.fresh(f"{node.name or node.output[0]}/Resize")
    grown.output[0] = up.graph.fresh(f"{grown.name}_out")
    grown.input[2] = up.constant(np.maximum(known, 1), np.float32)
    _give(grown, nearest_mode="floor")
    node.input[0], node.input[2] = grown.output[0], up.constant(np.minimum(known, 1), np.float32)
    _give(node, nearest_mode="ceil")
    return [grown, node]


@change("Softmax LogSoftmax Hardmax", 13)
def _one_axis(up: _Upgrade, node: Node) -> Sequence[Node] | None:
    """Rewrite an operator that treats all axes from `axis` on as a single axis to one that works on one axis."""
    axis, shape = _take(node, "axis", 1), up.shape(node.input[0])
    if shape is not None:
        rest = range(axis % len(shape), len(shape))
        wide = [i for i in rest if shape[i] != 1]
        if len(wide) < 2:
            _give(node, axis=(wide or [*rest])[0])
            return None
    nodes: list[Node] = []
    emit, y = partial(up.emit, nodes, node), node.output[0]
    flat = emit("Flatten", *node.input, axis=axis)
    nodes.append(node)
    sizes = emit("Shape", *node.input)
    node.input[0], node.output[0] = flat, up.graph.fresh(f"{y}_flat")
    _give(node, axis=1)
    emit("Reshape", node.output[0], sizes)
    nodes[-1].output[0] = y
    return nodes


@change("BatchNormalization", 9)
def _batch_normalization(up: _Upgrade, node: Node) -> Sequence[Node] | None:
    if _take(node, "spatial", 1):
        return None
    if any(name in up.read for name in node.output[1:]):
        raise _NotUpgradable("in training, it uses statistics of each element (spatial=0)")
    x, scale, b, mean, var = node.input
    epsilon = up.constant(_take(node, "epsilon", 1e-5), helper.tensor_dtype_to_np_dtype(up.dtype(x)))
    nodes: list[Node] = []
    emit = partial(up.emit, nodes, node)
    centred, deviation = emit("Sub", x, mean), emit("Sqrt", emit("Add", var, epsilon))
    emit("Add", emit("Mul", emit("Div", centred, deviation), scale), b)
    nodes[-1].output[0] = node.output[0]
    return nodes


@change("BatchNormalization", 14)
def _training_mode(up: _Upgrade, node: Node) -> None:
    if any(node.output[1:]):
        if any(name in up.read for name in node.output[3:]):
            raise _NotUpgradable("the model reads its outputs saved_mean and saved_var, which opset 14 removed")
        _give(node, training_mode=1)
        del node.output[3:]


@change("Scan", 9)
def _scan(up: _Upgrade, node: Node) -> Sequence[Node]:
    """Convert a Scan of opset 8, which has a batch axis, to two nested Scans: over the batch, and over the sequence."""
    if node.input[0]:
        raise _NotUpgradable("its sequences have individual lengths, which opset 9 does not support")
    given = list(node.input[1:])
    inner = up.node("Scan", [up.graph.fresh(f"{name}_sample") for name in given], node)
    inner.output[:] = [up.graph.fresh(f"{name or node.name}_sample") for name in node.output]
    body = _take(node, "body")
    _give(inner, body=body, num_scan_inputs=_take(node, "num_scan_inputs"))
    directions = _take(node, "directions")
    if directions:
        _give(inner, scan_input_directions=directions)

    def declared(name: str, like: str) -> onnx.ValueInfoProto:
        shape = up.shape(like)
        return helper.make_tensor_value_info(name, up.dtype(like), None if shape is None else [None] * (len(shape) - 1))

    inputs = [declared(*pair) for pair in zip(inner.input, given, strict=True)]
    outputs = [declared(*pair) for pair in zip(inner.output, node.output, strict=True)]
    del node.input[0]
    samples = helper.make_graph(messages([inner]), up.graph.fresh(f"{node.name}/samples"), inputs, outputs)
    _give(node, body=samples, num_scan_inputs=len(given))
    return [node]


@change("RoiAlign", 16)
def _roi_align(up: _Upgrade, node: Node) -> None:
    _give(node, coordinate_transformation_mode="output_half_pixel")


@change("GridSample", 20)
def _grid_sample(up: _Upgrade, node: Node) -> None:
    mode = _take(node, "mode", "bilinear")
    _give(node, mode={"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


@change("GroupNormalization", 21)
def _group_normalization(up: _Upgrade, node: Node) -> Sequence[Node]:
    """Expand scale and bias from one entry per group to one entry per channel."""
    groups = next(a.i for a in node.attribute if a.name == "num_groups")
    if up.dtype(node.input[0]) == onnx.TensorProto.DOUBLE:
        _give(node, stash_type=onnx.TensorProto.DOUBLE)
    nodes: list[Node] = []
    emit = partial(up.emit, nodes, node)
    each = emit("Div", emit("Shape", node.input[0], start=1, end=2), up.constant([groups]))
    wide = emit("Concat", up.constant([1]), each, axis=0)
    for position in (1, 2):
        column = emit("Reshape", node.input[position], up.constant([groups, 1]))
        node.input[position] = emit("Reshape", emit("Expand", column, wide), up.constant([-1]))
    return [*nodes, node]
