"""A decoder of seven billion parameters, whose weights are one sparse file: a build must not read them.

It is written without a framework, for that would need 27 GB for the weights. Architecture: H. Touvron et al., LLaMA,
2023, arXiv:2302.13971, the 7B model: RMS normalisation, rotary positions, SiLU-gated feed-forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

OPSET = 18


class _Writer:
    def __init__(self, data: Path) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self._data, self._end = data, 0

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Write a node; the name of its output."""
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def const(self, name: str, values: np.ndarray) -> str:
        """An initializer with values."""
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """A float32 initializer whose values are a hole in the data file."""
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        length = 4 * int(np.prod(shape, dtype=np.int64))
        for key, value in (("location", self._data.name), ("offset", self._end), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.weights.append(tensor)
        self._end += length
        return name

    def make_data(self) -> None:
        """Write the data file, which takes no space."""
        with self._data.open("wb") as file:
            file.truncate(self._end)


def llama(
    path: Path,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    hidden: int = 11008,
    vocabulary: int = 32000,
    sequence: int = 128,
) -> Path:
    """Write a LLaMA-like decoder, token ids [batch, sequence] -> logits [batch, sequence, vocabulary], at `path`.

    Args:
        path: where to; the weights' file is beside it, and of the apparent size of the weights.
        layers, width, heads, hidden, vocabulary: of the network; by default those of 7B.
        sequence: how many tokens.
    """
    op = _Writer(path.with_suffix(".data"))
    size = width // heads
    angles = np.outer(np.arange(sequence), 10000.0 ** (-np.arange(0, size, 2) / size))
    turns = np.concatenate([angles, angles], axis=-1).astype(np.float32)
    cos, sin = op.const("cos", np.cos(turns)), op.const("sin", np.sin(turns))
    mask = op.const("mask", np.triu(np.full((sequence, sequence), -1e9, np.float32), 1))
    split, merge = op.const("split", np.array([0, 0, heads, size])), op.const("merge", np.array([0, 0, width]))
    half, whole = op.const("half", np.array([size // 2])), op.const("whole", np.array([size]))
    begin, last = op.const("begin", np.array([0])), op.const("last", np.array([-1]))
    epsilon, two = op.const("epsilon", np.array(1e-5, np.float32)), op.const("two", np.array(2, np.float32))
    root = op.const("root", np.array(size**0.5, np.float32))

    def normalised(x: str, name: str) -> str:
        mean = op("ReduceMean", op("Pow", x, two), last, keepdims=1)
        return op("Mul", op("Div", x, op("Sqrt", op("Add", mean, epsilon))), op.weight(name, width))

    def by_head(x: str) -> str:
        return op("Transpose", op("Reshape", x, split), perm=[0, 2, 1, 3])

    def rotated(x: str) -> str:
        turned = op("Concat", op("Neg", op("Slice", x, half, whole, last)), op("Slice", x, begin, half, last), axis=-1)
        return op("Add", op("Mul", x, cos), op("Mul", turned, sin))

    def attention(x: str, layer: str) -> str:
        q, k, v = (by_head(op("MatMul", x, op.weight(f"{layer}.{name}", width, width))) for name in "qkv")
        scores = op("MatMul", rotated(q), op("Transpose", rotated(k), perm=[0, 1, 3, 2]))
        weights = op("Softmax", op("Add", op("Div", scores, root), mask), axis=-1)
        found = op("Reshape", op("Transpose", op("MatMul", weights, v), perm=[0, 2, 1, 3]), merge)
        return op("MatMul", found, op.weight(f"{layer}.o", width, width))

    def feed_forward(x: str, layer: str) -> str:
        gate = op("MatMul", x, op.weight(f"{layer}.gate", width, hidden))
        up = op("MatMul", x, op.weight(f"{layer}.up", width, hidden))
        return op(
            "MatMul", op("Mul", op("Mul", gate, op("Sigmoid", gate)), up), op.weight(f"{layer}.down", hidden, width)
        )

    x = op("Gather", op.weight("embedding", vocabulary, width), "ids")
    for layer in (f"layer{i}" for i in range(layers)):
        x = op("Add", x, attention(normalised(x, f"{layer}.norm1"), layer))
        x = op("Add", x, feed_forward(normalised(x, f"{layer}.norm2"), layer))
    op.nodes.append(
        helper.make_node("MatMul", [normalised(x, "norm"), op.weight("head", width, vocabulary)], ["logits"])
    )
    op.make_data()
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", sequence])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", sequence, vocabulary])
    graph = helper.make_graph(op.nodes, "llama", [ids], [logits], op.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10), path)
    return path
