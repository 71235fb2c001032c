"""Fold shapes, axes and indices that a model computes from constants.

Shape inference follows integers only through a few operators. If a shape is computed from constants by other operators,
such as `Mod`, every later value lacks a rank. Only integers, booleans, values cast from these, and the scales of a
Resize are folded. Weights are never folded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.limits import within_budget
from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, messages
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES, NARROW, Shape, dtype_of, is_float, shape_of
from onnxgrad_cli.passes.parameters.constants import resizing

PURE = frozenset(
    "Abs Add And Cast CastLike Ceil Concat ConstantOfShape Div Equal Expand Floor Gather Greater GreaterOrEqual "
    "Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape "
    "Shape Size Slice Sqrt Squeeze Sub Tile Transpose Unsqueeze Where".split()
)
"""Operators from which exporters compute shapes. They are cheap and deterministic."""

UNKNOWN = np.array(None)
"""Stands for the result of Shape or Size if no size is known."""


def fold(graph: Graph) -> bool:
    """Replace nodes that compute constants from integers by initializers. Return True if any was replaced."""
    fixed = {*graph.output_names, *graph.not_constant}
    candidates = [node for node in graph.nodes if _is_foldable(graph, node) and fixed.isdisjoint(node.output)]
    values = _static_sizes(graph, candidates)
    nodes = _constant_nodes(graph, candidates, values, resizing(graph))
    if nodes:
        values |= _evaluate(graph, nodes, values)
    if not values:
        return False
    folded = [node for node in graph.nodes if not values.keys().isdisjoint(node.output)]
    graph.set_nodes(node for node in graph.nodes if values.keys().isdisjoint(node.output))
    graph.drop_unread({name for node in folded for name in node.input if name})
    add_constants(graph, values)
    return True


def add_constants(graph: Graph, values: Mapping[str, np.ndarray]) -> None:
    """Store the values of removed nodes. Floats get names that mark them as generated, so that they are not trained."""
    marked: dict[str, str] = {}
    for name, array in values.items():
        if is_float(graph.types.get(name)):
            marked[name] = graph.add_constant(array)
        else:
            graph.add_initializer(name, array)
    rename(graph.nodes, marked)


def _static_sizes(graph: Graph, nodes: Iterable[Node]) -> dict[str, np.ndarray]:
    """Return results of Shape, Size and Gather (from these) that are constant, because the sizes in them are static."""
    sizes: dict[str, np.ndarray] = {}
    for node in nodes:
        if node.op_type in ("Shape", "Size"):
            sizes[node.output[0]] = _sizes(node, shape_of(graph.types.get(node.input[0])))
        elif node.op_type == "Gather" and node.input[0] in sizes:
            sizes[node.output[0]] = _picked(sizes[node.input[0]], graph.constant(node.input[1]))
    return {name: array for name, array in sizes.items() if array.dtype != object}


def _constant_nodes(
    graph: Graph, nodes: Iterable[Node], values: Collection[str], settings: Collection[str]
) -> list[Node]:
    """Return nodes that compute constants from integer constants, `settings`, `values` and each other.

    The nodes that compute `values` are not included.
    """
    known = set[str]()
    found: list[Node] = []
    for node in nodes:
        if node.output[0] in values:
            known.add(node.output[0])
        elif all(name in known or _is_constant(graph, name, settings) for name in node.input if name):
            found.append(node)
            known.update(node.output)
    return found


def _is_foldable(graph: Graph, node: Node) -> bool:
    """Return True if a node has no side effect and its result, as far as its type shows, is small."""
    if node.op_type not in PURE or not is_standard(node.domain):
        return False
    if node.op_type == "Cast" and dtype_of(graph.types.get(node.input[0])) in NARROW:
        return False  # weights are stored in such types, and sizes are not
    sizes = [size for size in shape_of(graph.types.get(node.output[0])) or () if isinstance(size, int)]
    return len(node.output) == 1 and math.prod(sizes) * 8 <= MAX_SHAPE_BYTES


def _is_constant(graph: Graph, name: str, settings: Collection[str]) -> bool:
    """Return True if a value is a constant but not a weight: it holds integers, or is one of `settings`."""
    return (name in settings or not is_float(graph.types.get(name))) and graph.constant(name) is not None


def _sizes(node: Node, shape: Shape | None) -> np.ndarray:
    """Return the result of Shape or Size as integers, or as objects if some sizes are symbols."""
    if shape is None:
        return UNKNOWN
    if node.op_type == "Size":
        return np.array(math.prod(shape), np.int64) if all(isinstance(size, int) for size in shape) else UNKNOWN
    ends = {attribute.name: attribute.i for attribute in node.attribute}
    return _as_integers(np.array(shape, object)[ends.get("start", 0) : ends.get("end", len(shape))])


def _picked(sizes: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    """Return the sizes that a Gather selects from a shape; `UNKNOWN` if the indices are not known or invalid."""
    if places is None or sizes is UNKNOWN or not np.all((-len(sizes) <= places) & (places < len(sizes))):
        return UNKNOWN
    return _as_integers(sizes[places])


def _as_integers(sizes: np.ndarray) -> np.ndarray:
    sizes = np.asarray(sizes, object)
    return sizes.astype(np.int64) if all(isinstance(size, int) for size in sizes.flat) else sizes


def _evaluate(graph: Graph, nodes: list[Node], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the results of `nodes`, which read constants, `values` and each other; {} if the run fails."""
    dtypes = {name: dtype_of(graph.types.get(name)) for node in nodes for name in node.output}
    if TensorProto.UNDEFINED in dtypes.values():
        return {}
    try:
        with within_budget(), limited_memory(GB // 2):
            results = Executor(_model(graph, nodes, values, dtypes))({})
    except Exception:  # such as a division by zero: the nodes stay, and fail in a run
        return {}
    return {name: array for name, array in results.items() if array.nbytes <= MAX_SHAPE_BYTES}


def _model(graph: Graph, nodes: list[Node], values: Mapping[str, np.ndarray], dtypes: Mapping[str, int]) -> ModelProto:
    """Return a model of `nodes` alone, with all operands as initializers. `dtypes` are the types of its outputs."""
    read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in dtypes)
    model = ModelProto(ir_version=max(graph.proto.ir_version, 4))
    model.opset_import.extend(entry for entry in graph.proto.opset_import if not entry.domain)
    model.graph.name = "constants"
    model.graph.node.extend(messages(nodes))
    for name in read:
        tensor = numpy_helper.from_array(values[name], name) if name in values else graph.initializers[name]
        model.graph.initializer.append(tensor)
    model.graph.output.extend(helper.make_tensor_value_info(name, dtype, None) for name, dtype in dtypes.items())
    return model
