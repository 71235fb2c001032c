"""Compute at build time what exporters compute at run time: shapes, axes and indices made of constants.

Shape inference follows integers through few operators, so that one `Mod` among the constants that make a shape
leaves every value behind it without a rank. Weights are never folded: only integers, booleans and what is cast
from them.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import SMALL, Shape, dtype_of, is_float, shape_of

PURE = frozenset(
    "Abs Add And Cast Ceil Concat ConstantOfShape Div Equal Expand Floor Gather Greater GreaterOrEqual Identity Less "
    "LessOrEqual Max Min Mod Mul Neg Not Or Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape Shape Size Slice "
    "Sqrt Squeeze Sub Tile Transpose Unsqueeze Where".split()
)
"""Operators that shapes are computed with: small, and the same at every run."""

UNKNOWN = np.array(None)
"""Sizes of which none is known."""


def fold(graph: Graph) -> bool:
    """Replace nodes that compute constants of integers by initializers; whether anything was replaced."""
    values: dict[str, np.ndarray] = {}
    chosen: list[NodeProto] = []
    known: set[str] = set()
    sizes: dict[str, np.ndarray] = {}
    kept = {*graph.output_names, *graph.varied}
    for node in graph.nodes:
        if node.op_type not in PURE or not is_standard(node.domain) or not _small(graph, node):
            continue
        if kept.intersection(node.output):
            continue
        if node.op_type in ("Shape", "Size"):
            sizes[node.output[0]] = _sizes(node, shape_of(graph.types.get(node.input[0])))
        elif node.op_type == "Gather" and node.input[0] in sizes:
            sizes[node.output[0]] = _picked(sizes[node.input[0]], graph.constant(node.input[1]))
        array = sizes.get(node.output[0], UNKNOWN)
        if array.dtype != object:
            values[node.output[0]] = array
            known.add(node.output[0])
        elif all(name in known or _is_integer_constant(graph, name) for name in node.input if name):
            chosen.append(node)
            known.update(node.output)
    if chosen:
        values.update(_evaluate(graph, chosen, values))
    if not values:
        return False
    folded = [node for node in graph.nodes if values.keys() & set(node.output)]
    graph.set_nodes(node for node in graph.nodes if not values.keys() & set(node.output))
    graph.drop_unread({name for node in folded for name in node.input if name})
    for name, array in values.items():
        graph.add_initializer(name, array)
    return True


def _small(graph: Graph, node: NodeProto) -> bool:
    """Whether the result is surely no large tensor, as far as its type tells."""
    sizes = [size for size in shape_of(graph.types.get(node.output[0])) or () if isinstance(size, int)]
    return len(node.output) == 1 and math.prod(sizes) * 8 <= SMALL


def _is_integer_constant(graph: Graph, name: str) -> bool:
    return not is_float(graph.types.get(name)) and graph.constant(name) is not None


def _sizes(node: NodeProto, shape: Shape | None) -> np.ndarray:
    """What Shape or Size gives: integers, or objects of which some are symbols."""
    if shape is None:
        return UNKNOWN
    if node.op_type == "Size":
        return np.array(math.prod(shape), np.int64) if all(isinstance(size, int) for size in shape) else UNKNOWN
    ends = {attribute.name: attribute.i for attribute in node.attribute}
    return _as_integers(np.array(shape, object)[ends.get("start", 0) : ends.get("end", len(shape))])


def _picked(sizes: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    """What Gather picks of a shape: exporters compute with the static sizes of shapes that are not static."""
    if places is None or sizes is UNKNOWN or not np.all((-len(sizes) <= places) & (places < len(sizes))):
        return UNKNOWN
    return _as_integers(sizes[places])


def _as_integers(sizes: np.ndarray) -> np.ndarray:
    sizes = np.asarray(sizes, object)
    return sizes.astype(np.int64) if all(isinstance(size, int) for size in sizes.flat) else sizes


def _evaluate(graph: Graph, nodes: list[NodeProto], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of `nodes`, which read constants, `values` and each other."""
    made = dict.fromkeys(name for node in nodes for name in node.output)
    read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in made)
    model = ModelProto(ir_version=max(graph.proto.ir_version, 4))
    model.opset_import.extend(entry for entry in graph.proto.opset_import if not entry.domain)
    model.graph.name = "constants"
    model.graph.node.extend(nodes)
    for name in read:
        tensor = numpy_helper.from_array(values[name], name) if name in values else graph.initializers[name]
        model.graph.initializer.append(tensor)
    for name in made:
        dtype = dtype_of(graph.types.get(name))
        if dtype == TensorProto.UNDEFINED:
            return {}
        model.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    try:
        results = Executor(model)({})
    except Exception:  # a division by zero, an index out of range: left to fail where it would have
        return {}
    return {name: array for name, array in results.items() if array.nbytes <= SMALL}
