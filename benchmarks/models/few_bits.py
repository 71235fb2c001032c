"""Networks whose matrices have 4 bits, in blocks of 32 with a scale each, as onnxruntime's quantizer writes them.

They are written without a framework, of random numbers: what they compute is of no matter, what they cost is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

BITS, BLOCK = 4, 32
MICROSOFT = "com.microsoft"


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[TensorProto] = []
        self._random = np.random.default_rng(0)

    def __call__(self, op_type: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        """Write a node; the name of its last output."""
        name = f"{op_type}_{len(self.nodes)}"
        made = [f"{name}_out{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, made, name, domain=domain, **attributes))
        return made[-1]

    def store(self, name: str, values: np.ndarray) -> str:
        """An initializer."""
        self.stored.append(numpy_helper.from_array(values, name))
        return name

    def matrix(self, name: str, rows: int, columns: int) -> tuple[str, str]:
        """The bytes and the scales of a matrix, whose entries have the size that a layer begins with."""
        steps = self._random.integers(0, 256, (rows, columns // BLOCK, BLOCK // 2), np.uint8)
        size = 1 / np.sqrt(columns) / 4.6  # of the numbers from -8 to 7
        scales = self._random.uniform(0.5 * size, 1.5 * size, (rows, columns // BLOCK)).astype(np.float32)
        return self.store(f"{name}.quant.weight", steps), self.store(f"{name}.scale", scales)

    def product(self, x: str, name: str, rows: int, columns: int) -> str:
        """x times the transpose of a matrix."""
        return self(
            "MatMulNBits", x, *self.matrix(name, rows, columns), domain=MICROSOFT,
            K=columns, N=rows, bits=BITS, block_size=BLOCK,
        )  # fmt: skip

    def model(self, result: str, width: int, shape: list[Any], x: onnx.ValueInfoProto) -> ModelProto:
        """The model from input to result."""
        self.nodes[-1].output[0] = "y"
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [*shape, width])
        graph = helper.make_graph(self.nodes, "few_bits", [x], [y], self.stored)
        imports = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)


def stack(layers: int = 8, width: int = 2048) -> ModelProto:
    """x -> tanh(x Wᵀ), several times."""
    write, h = _Writer(), "x"
    for i in range(layers):
        h = write("Tanh", write.product(h, f"layers.{i}.proj", width, width))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])
    return write.model(h, width, ["batch"], x)


def decoder(
    layers: int = 24, width: int = 896, heads: int = 14, groups: int = 2, hidden: int = 4864, vocabulary: int = 151_936
) -> ModelProto:
    """A decoder in the shape of Qwen2.5-0.5B, but that its attention knows no positions, and its biases are left out.

    Source: A. Yang et al., Qwen2.5 Technical Report, 2024, arXiv:2412.15115.
    """
    write, size = _Writer(), width // heads
    bytes_, scales = (write.store(f"embed.{n}", v) for n, v in _table(vocabulary, width).items())
    rows = {"bits": BITS, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    h = write("GatherBlockQuantized", bytes_, "ids", scales, domain=MICROSOFT, **rows)
    for i in range(layers):
        at = f"model.layers.{i}"
        x = write("RMSNormalization", h, write.store(f"{at}.norm1", np.ones(width, np.float32)))
        q = write.product(x, f"{at}.self_attn.q_proj", width, width)
        k, v = (write.product(x, f"{at}.self_attn.{n}_proj", groups * size, width) for n in "kv")
        seen = write("Attention", q, k, v, q_num_heads=heads, kv_num_heads=groups, is_causal=1)
        h = write("Add", h, write.product(seen, f"{at}.self_attn.o_proj", width, width))
        x = write("RMSNormalization", h, write.store(f"{at}.norm2", np.ones(width, np.float32)))
        gate, up = (write.product(x, f"{at}.mlp.{n}_proj", hidden, width) for n in ("gate", "up"))
        opened = write("Mul", write("Mul", gate, write("Sigmoid", gate)), up)
        h = write("Add", h, write.product(opened, f"{at}.mlp.down_proj", width, hidden))
    h = write("RMSNormalization", h, write.store("model.norm", np.ones(width, np.float32)))
    h = write.product(h, "lm_head", vocabulary, width)
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])
    return write.model(h, vocabulary, ["batch", "sequence"], ids)


def _table(rows: int, columns: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "weight": random.integers(0, 256, (rows, columns // 2), np.uint8),
        "scale": random.uniform(0.05, 0.15, (rows, columns // BLOCK)).astype(np.float32),
    }
