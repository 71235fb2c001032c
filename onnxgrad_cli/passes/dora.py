"""DoRA: replace an adapted matrix by trained magnitudes, one for each output, times directions of length 1.

Let V = W + scale A B, and let v be the column of V that belongs to an output. The adapted column is m v / ||v||, where
m is the trained magnitude of the output. The norm is computed again at each step and counts as a constant in
derivatives, as the authors suggest and PEFT does. No second matrix of the size of W is needed: ||v||² = ||w||² + 2
scale (wᵀ A) b + scale² bᵀ (Aᵀ A) b, where w and b are columns of W and B, and the first term is stored.

Source: S. Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, ICML 2024, equation 5 and section 4.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, messages
from onnxgrad_cli.ir.node_values import attributes_of, behind, read_by
from onnxgrad_cli.ir.types import dtype_of
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.passes.stored_integers import stored_array

BIAS = {"Gemm": 2, "Conv": 2, "MatMulNBits": 5}
"""Map from an operator that adds a bias to the input position of the bias, which is its last input."""


def squared_norms(graph: Graph, value: str, inputs_first: bool) -> np.ndarray | None:
    """Return the squared norm of each output's weights in a matrix, in float64, or None if values are unavailable.

    Args:
        graph: the model.
        value: the name of the matrix as a product reads it. It must be computed from stored values only.
        inputs_first: True if its first axis is the axis of the inputs, as for x W.
    """
    nodes = behind(graph.nodes, [value])
    made = {name for node in nodes for name in node.output}
    stored = {name: stored_array(graph, name) for name in {value, *read_by(nodes)} - made}
    arrays = {name: array for name, array in stored.items() if array is not None}
    if len(arrays) < len(stored):
        return None
    if not nodes:
        return _squares(arrays[value], inputs_first)
    model = ModelProto(ir_version=max(graph.proto.ir_version, 4), opset_import=graph.proto.opset_import)
    model.graph.name = "matrix"
    model.graph.node.extend(messages(nodes))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    model.graph.output.append(helper.make_tensor_value_info(value, dtype_of(graph.types[value]), None))
    return _squares(Executor(model)({})[value], inputs_first)


def _squares(matrix: np.ndarray, inputs_first: bool) -> np.ndarray:
    wide = matrix.astype(np.float64)
    found: np.ndarray = np.square(wide).sum(0 if inputs_first else tuple(range(1, wide.ndim)))
    return found


def store(graph: Graph, weight: str, squares: np.ndarray, dtype: np.dtype) -> tuple[str, str]:
    """Store the initial magnitudes, which are the norms, and the squared norms. Return both names.

    With these magnitudes, the model initially computes the same as without an adapter.
    """
    magnitude = graph.fresh(f"{weight}_lora_magnitude")
    graph.add_initializer(magnitude, np.sqrt(squares).astype(dtype))
    wide = np.float64 if dtype == np.float64 else np.float32
    return magnitude, graph.add_constant(squares.astype(wide), f"{weight}_squared_norms")


def gains(op: Op, adapter: Adapter, known: str, matrix: Val, first: Val, last: Val, inputs_first: bool) -> Val:
    """Return the gain m / ||v|| of each output, [outputs]. In derivatives, the norm counts as a constant.

    Args:
        op: the emitter.
        adapter: the adapter that the magnitudes belong to.
        known: the squared norms of the frozen matrix.
        matrix: the frozen matrix as a product reads it: [inputs, outputs], or [outputs, inputs, 1, ...] if
            `inputs_first` is false.
        first, last: the LoRA matrices, [rank, inputs] and [rank, outputs].
        inputs_first: True if the first axis of `matrix` is the axis of the inputs.
    """
    if matrix.rank > 2:
        matrix = op.Reshape(matrix, op.ints([0, -1]), shape=matrix.shape[:2])
    along = first @ matrix if inputs_first else op.Gemm(first, matrix, transB=1)
    a, b = op.wide(first), op.wide(last)
    # ||w + d||^2 - ||w||^2 = 2 w d + d d, where d = scale A b
    twice = 2 * adapter.scale * op.wide(along)
    own = adapter.scale**2 * ((a @ op.transpose(a, [1, 0])) @ b)
    squares = op.val(known) + op.sum(b * (twice + own), [0], keepdims=False)
    norm = op.Sqrt(squares)
    op.graph.held.add(norm.name)
    magnitude = op.val(adapter.magnitude)
    return op.cast(op.wide(magnitude) / norm, magnitude)


def bias_apart(node: Node) -> tuple[str, float]:
    """Remove the bias of a product. Return its name ("" if there is none) and the factor by which it is multiplied."""
    at = BIAS.get(node.op_type, len(node.input))
    bias = node.input[at] if len(node.input) > at else ""
    del node.input[at:]
    own: dict[str, Any] = attributes_of(node)
    return bias, own.get("beta", 1.0) if node.op_type == "Gemm" else 1.0
