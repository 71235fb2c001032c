"""Weights that a file stores as integers, made floats again that are quantized as they are read.

So a model that was quantized after training can be trained further, by the straight-through estimator: the weight
moves in float, and what the forward part computes with stays the quantized one.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.errors import Caution
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.ir.types import dtype_of, is_external, is_float
from onnxgrad_cli.passes.prepare.quantized_operators import QUANTIZED


def put_fake_quantizers(graph: Graph) -> list[Caution]:
    """Write float weights, and QuantizeLinear behind them, where DequantizeLinear reads integers that are stored.

    What is stored as int32, as biases are, becomes a float weight alone: no runtime quantizes to int32.

    Args:
        graph: typed; changed in place, and typed again.

    Returns:
        What was done, if anything was.
    """
    quantized, plain, nodes = 0, 0, list[NodeProto]()
    read = [name for node in graph.nodes if node.op_type == "DequantizeLinear" for name in node.input]
    for node in graph.nodes:
        weight = _stored(graph, node)
        if weight is None:
            nodes.append(node)
        elif dtype_of(graph.types[node.input[0]]) == TensorProto.INT32:
            graph.store(node.output[0], weight)
            plain += 1
        else:
            nodes += _through_quantizer(graph, node, weight)
            quantized += 1
    if not quantized and not plain:
        return []
    graph.set_nodes(nodes)
    graph.drop_unread(read)
    infer_types(graph)
    text = f"{quantized} stored integer weights are floats again, quantized as they are read"
    text += f"; {plain} stored as int32 are floats and are not quantized" if plain else ""
    return [Caution("note", "quantization", text)]


def _stored(graph: Graph, node: NodeProto) -> np.ndarray | None:
    """The values that a DequantizeLinear gives, where all that it reads is stored in the model."""
    stored = all(name in graph.initializers and name not in graph.input_names for name in node.input if name)
    if node.op_type != "DequantizeLinear" or node.domain or not stored or graph.added(node.input[0]):
        return None
    if not is_float(graph.types.get(node.output[0])) or node.output[0] in graph.output_names:
        return None
    folder = str(graph.path.parent) if graph.path else ""
    given = [graph.initializers[name] for name in node.input if name]
    if any(is_external(tensor) for tensor in given) and not folder:
        return None
    q, scale, *rest = (numpy_helper.to_array(tensor, base_dir=folder) for tensor in given)
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    steps = q.astype(np.float32)
    if rest:
        steps = steps - _spread(rest[0].astype(np.float32), steps, **attributes)
    values = steps * _spread(scale.astype(np.float32), steps, **attributes)
    return values.astype(helper.tensor_dtype_to_np_dtype(dtype_of(graph.types[node.output[0]])))


def _spread(values: np.ndarray, like: np.ndarray, axis: int = 1, block_size: int = 0, **_: int) -> np.ndarray:
    """Scales, or zero points, so that they broadcast with what they are of."""
    if values.size == 1:
        return values.reshape(())
    if block_size:
        return np.repeat(values, block_size, axis).take(range(like.shape[axis]), axis)
    return values.reshape([-1 if i == axis % like.ndim else 1 for i in range(like.ndim)])


def _through_quantizer(graph: Graph, node: NodeProto, weight: np.ndarray) -> list[NodeProto]:
    integers = graph.initializers[node.input[0]]
    name = graph.fresh(integers.name.removesuffix(QUANTIZED))
    graph.store(name, weight)
    zero = node.input[2] if len(node.input) > 2 else ""
    if not zero:
        scale = graph.initializers[node.input[1]]
        zero = graph.fresh(f"{name}_zero_point")
        zeros = np.zeros(list(scale.dims), helper.tensor_dtype_to_np_dtype(integers.data_type))
        graph.add_initializer(zero, zeros)
    quantized = graph.fresh(f"{name}{QUANTIZED}")
    quantizer = onnx.helper.make_node("QuantizeLinear", [name, node.input[1], zero], [quantized], name=quantized)
    quantizer.attribute.extend(a for a in node.attribute if a.name in ("axis", "block_size"))
    node.input[:] = [quantized, node.input[1], zero]
    return [quantizer, node]
