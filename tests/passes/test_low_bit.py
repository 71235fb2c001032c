"""Matrices of few bits in training models: kernels in the forward part, late floats in the backward part.

The gradients are PyTorch's with the same matrices as floats; what onnxruntime makes of a model is read from the file
that it writes after optimization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import LoraSpec, Options, RecomputeSpec
from onnxgrad_cli.passes import low_bit
from onnxgrad_cli.verification.proof import prove
from tests.passes.test_quantized_adapters import packed

Array = np.ndarray
RANK = 3


class Net:
    """x -> tanh(x W₁ᵀ + b) W₂ᵀ, of matrices of few bits; and the matrices as floats."""

    def __init__(
        self, bits: int = 4, block: int = 16, zeros: str = "", bias: bool = False, opset: int = 21,
        sizes: tuple[int, int, int] = (40, 48, 24), dtype: Any = np.float32, lead: tuple[str, ...] = ("n",),
        **attributes: int,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng([bits, block, len(zeros)])
        self.matrices, self.biases, nodes, stored = [], [], [], {}
        for i, (columns, rows) in enumerate(pairwise(sizes)):
            blocks = -(-columns // block)
            steps = rng.integers(0, 2**bits, (rows, blocks * block)).astype(np.uint8)
            scales = rng.uniform(0.01, 0.1, (rows, blocks)).astype(dtype)
            shift = np.full((rows, blocks), 2.0 ** (bits - 1))
            if zeros == "packed":
                shift = rng.integers(0, 2**bits, (rows, blocks)).astype(np.uint8)
                stored[f"z{i}"] = packed(shift, bits)
            elif zeros == "floats":
                shift = rng.uniform(0, 2**bits, (rows, blocks)).astype(dtype)
                stored[f"z{i}"] = shift
            wide = [np.repeat(np.asarray(each, np.float64), block, 1) for each in (shift, scales)]
            self.matrices.append(((steps - wide[0]) * wide[1])[:, :columns])
            self.biases.append(rng.standard_normal(rows).astype(dtype) if bias else np.zeros(rows, dtype))
            stored |= {f"q{i}": packed(steps, bits).reshape(rows, blocks, -1), f"s{i}": scales}
            stored |= {f"b{i}": self.biases[-1]} if bias else {}
            names = [f"t{i}", f"q{i}", f"s{i}", f"z{i}" if zeros else "", "", f"b{i}" if bias else ""]
            sized = {"K": columns, "N": rows, "bits": bits, "block_size": block, **attributes}
            nodes += [
                helper.make_node("MatMulNBits", names, [f"y{i}"], f"product{i}", domain="com.microsoft", **sized),
                helper.make_node("Tanh", [f"y{i}"], [f"t{i + 1}"], f"tanh{i}"),
            ]
        nodes[0].input[0], self.kind = "x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        graph = helper.make_graph(
            nodes[:-1], "g", [helper.make_tensor_value_info("x", self.kind, [*lead, sizes[0]])],
            [helper.make_tensor_value_info("y1", self.kind, [*lead, sizes[2]])],
            [numpy_helper.from_array(values, name) for name, values in stored.items()],
        )  # fmt: skip
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        self.model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        shape = [3, 2, 5][-len(lead) :]
        self.x = rng.standard_normal([*shape, sizes[0]]).astype(dtype)
        self.label = rng.standard_normal([*shape, sizes[2]]).astype(dtype)

    def trained(self, **options: Any) -> ModelProto:
        """The training model of its adapters, whose factors are no zeros."""
        model = build(self.model, Options(lora=LoraSpec(RANK), **options)).model
        rng = np.random.default_rng(1)
        for tensor in model.graph.initializer:
            if "lora" in tensor.name:
                values = rng.standard_normal(list(tensor.dims)) / 5
                tensor.CopyFrom(
                    numpy_helper.from_array(values.astype(numpy_helper.to_array(tensor).dtype), tensor.name)
                )
        return model

    def gradients(self, factors: Mapping[str, Array]) -> dict[str, Array]:
        """PyTorch's, of each factor."""
        leaves = {n: torch.tensor(x.astype(np.float64), requires_grad=True) for n, x in factors.items()}
        h = torch.tensor(self.x.astype(np.float64))
        for i, (matrix, bias) in enumerate(zip(self.matrices, self.biases, strict=True)):
            branch = leaves[f"q{i}_lora_B"] @ leaves[f"q{i}_lora_A"]
            h = h @ (torch.tensor(matrix) + branch).T + torch.tensor(bias.astype(np.float64))
            h = torch.tanh(h) if i == 0 else h
        torch.nn.functional.mse_loss(h, torch.tensor(self.label.astype(np.float64))).backward()
        return {name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}

    def check(self, model: ModelProto, tolerance: float = 1e-5) -> Array:
        """Hold the gradients of a training model against PyTorch's."""
        found = Executor(model, fallback=False)({"x": self.x, "label": self.label})
        factors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if "lora" in t.name}
        expected = self.gradients(factors)
        assert len(expected) == 4
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[f"{name}_grad"], gradient, rtol=0, atol=tolerance * np.abs(gradient).max())
        return found["loss"]


def kinds(model: ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


FORMS = {
    "4 bits": {},
    "zero points, rows that end within a block, a bias": {"zeros": "packed", "block": 32, "bias": True},
    "zero points that are floats": {"zeros": "floats"},
    "2 bits": {"bits": 2},
    "2 bits, zero points": {"bits": 2, "zeros": "packed"},
    "2 bits, zero points that are floats": {"bits": 2, "zeros": "floats", "block": 32},
    "8 bits": {"bits": 8},
    "8 bits, zero points": {"bits": 8, "zeros": "packed"},
    "a kernel that may round": {"accuracy_level": 4},
    "three axes": {"lead": ("n", "t")},
    "opset 14": {"opset": 14},
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in pieces"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(3)
def test_gradients_are_pytorchs(form: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel stays, without leave to round; the matrix is unpacked as a whole, or in four pieces."""
    net = Net(**FORMS[form])  # type: ignore[arg-type]
    if not whole:
        monkeypatch.setattr(low_bit, "MIN_UNPACKED", 1)
        monkeypatch.setattr(low_bit, "PIECES", 3.5)
    model = net.trained()
    counts = kinds(model)
    assert counts["MatMulNBits"] == 2
    assert counts["DequantizeLinear"] == (1 if whole else 4) * 8 // FORMS[form].get("bits", 4)  # type: ignore[operator]
    assert not any(a.name == "accuracy_level" for node in model.graph.node for a in node.attribute)
    net.check(model)


@pytest.mark.parametrize(
    "form", ["4 bits", "zero points, rows that end within a block, a bias", "zero points that are floats"]
)
def test_float16(form: str) -> None:
    net = Net(dtype=np.float16, **FORMS[form])  # type: ignore[arg-type]
    net.check(net.trained(), 2e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 2e-2)])
def test_derivatives_are_pytorchs(dtype: Any, tolerance: float) -> None:
    """Of the input: a vector-Jacobian product, and a Jacobian-vector product."""
    net = Net(zeros="packed", bias=True, dtype=dtype)
    tangent, cotangent = (np.ones_like(each) / 8 for each in (net.x, net.label))
    cotangent[0] *= -2

    def network(x: torch.Tensor) -> torch.Tensor:
        first, second = (torch.tensor(matrix) for matrix in net.matrices)
        biases = [torch.tensor(bias.astype(np.float64)) for bias in net.biases]
        return torch.tanh(x @ first.T + biases[0]) @ second.T + biases[1]

    x, v, g = (torch.tensor(each.astype(np.float64)) for each in (net.x, tangent, cotangent))
    feeds = {"x": net.x, "y1_grad": cotangent, "x_tangent": tangent}
    for kind, expected in (
        ("vjp", torch.autograd.functional.vjp(network, x, g)[1]),
        ("jvp", torch.autograd.functional.jvp(network, x, v)[1]),
    ):
        model = derive(net.model, kind, wrt=["x"])  # type: ignore[arg-type]
        fed = {value.name: feeds[value.name] for value in model.graph.input if value.name in feeds}
        assert len(fed) == 2
        (found,) = list(Executor(model, fallback=False)(fed).values())[-1:]
        limit = tolerance * float(expected.abs().max())
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=limit)


@pytest.mark.parametrize("scales", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_scales_of_another_type_are_refused(scales: int) -> None:
    """No runtime computes with them, so that nothing could be proved."""
    model = onnx.ModelProto()
    model.CopyFrom(Net().model)
    for tensor in model.graph.initializer:
        if tensor.name.startswith("s"):
            values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(scales))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    with pytest.raises(UnsupportedError) as raised:
        build(model, Options(grad_of_input=("x",)))
    assert [refusal.node for refusal in raised.value.refusals if "scales" in refusal.reason] == ["product0"]


def test_the_training_model_is_proved_in_float64() -> None:
    net = Net(zeros="packed", bias=True)
    model = build(net.model, Options(lora=LoraSpec(RANK))).model
    proof = prove(model, describe(model), original=net.model)
    assert proof.verdict == "proved", proof.steps
    assert "in float64" in proof.steps[-1].detail


def optimized(model: ModelProto, path: Path) -> ModelProto:
    """What onnxruntime makes of a model when a user opens it, with the settings that it has by default."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path), 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def floats_of_a_matrix(model: ModelProto) -> list[str]:
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    return [t.name for t in model.graph.initializer if t.data_type in floats and np.prod(t.dims) >= 24 * 40]


def test_nothing_is_unpacked_when_the_model_is_loaded(tmp_path: Path) -> None:
    ours = optimized(Net().trained(), tmp_path / "ours.onnx")
    assert floats_of_a_matrix(ours) == []
    assert kinds(ours)["MatMulNBits"] == 2
    assert kinds(ours)["QuantizeLinear"] == 0


def test_a_matrix_is_unpacked_when_its_cotangent_has_come() -> None:
    """All that is made of what is stored reads, at some distance, the cotangent that the product multiplies."""
    model = Net().trained()
    after: dict[str, set[str]] = {}
    for node in model.graph.node:
        after[node.output[0]] = set().union(node.input, *(after.get(name, ()) for name in node.input))
    made = [node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(made) == 2  # of the second matrix, for both places in a byte: nobody asks for the gradient of x
    views = {node.output[0] for node in model.graph.node if node.input[0] in made}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in views]
    assert len(products) == 2
    assert all(node.input[0] in after[node.input[1]] for node in products)


def test_recomputation_runs_the_kernel_again() -> None:
    net = Net()
    model = net.trained(recompute=RecomputeSpec("block", "tanh0", 0))
    assert net.check(model) == net.check(net.trained())


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda"])
def test_targets_have_it_too(target: str) -> None:
    net = Net()
    model = net.trained(target=target)
    assert kinds(model)["MatMulNBits"] == 2
    net.check(model)


def test_scales_that_are_trained_stay_floats_of_the_standard() -> None:
    net = Net(sizes=(16, 16, 16))
    built = build(net.model, Options(train=("s0",)))
    assert built.training.trained == ["s0"]
    assert kinds(built.model)["MatMulNBits"] == 1, "the second matrix is frozen"
    proof = prove(built.model, describe(built.model), original=net.model)
    assert proof.verdict == "proved", proof.steps


def test_a_table_of_few_bits_stays() -> None:
    """Rows that are looked up have no gradient to hand on: nothing of their table becomes floats."""
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 16, (9, 32))
    nodes = [
        helper.make_node("GatherBlockQuantized", ["table", "ids", "s"], ["x"], "lookup", domain="com.microsoft",
                         bits=4, block_size=16, gather_axis=0, quantize_axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]  # fmt: skip
    stored = {
        "table": packed(steps, 4), "s": rng.uniform(0.01, 0.1, (9, 2)).astype(np.float32),
        "w": rng.standard_normal((32, 5)).astype(np.float32),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "t"])],
        [helper.make_tensor_value_info("y", 1, ["n", "t", 5])],
        [numpy_helper.from_array(values, name) for name, values in stored.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    original = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model = build(original).model
    assert kinds(model)["GatherBlockQuantized"] == 1 and not kinds(model)["DequantizeLinear"]
    proof = prove(model, describe(model), original=original)
    assert proof.verdict == "proved" and "in float64" in proof.steps[-1].detail, proof.steps


# -- DequantizeLinear -----------------------------------------------------------------------------------------------


def dequantized(kind: int, per: str, product: str, lead: tuple[str, ...] = ("n",)) -> tuple[ModelProto, list[Array]]:
    """x -> tanh(x W₁) W₂, of integers that DequantizeLinear makes floats of; and the matrices."""
    rng, nodes, stored, matrices = np.random.default_rng(3), [], {}, []
    for i in range(2):
        sizes = {"tensor": (), "columns": (64,), "blocks": (4, 64)}[per]
        steps, scale = rng.integers(-7, 8, (64, 64)), np.asarray(rng.uniform(0.01, 0.03, sizes), np.float32)
        settings = {"tensor": {}, "columns": {"axis": 1}, "blocks": {"axis": 0, "block_size": 16}}[per]
        turned = product == "turned"
        if turned:
            settings = {"columns": {"axis": 0}, "blocks": {"axis": 1, "block_size": 16}}.get(per, {})
        values = steps.T if turned else steps
        stored |= {f"q{i}": values.astype(helper.tensor_dtype_to_np_dtype(kind))}
        stored |= {f"s{i}": np.ascontiguousarray(scale.T) if turned else scale}
        nodes.append(helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}"], [f"w{i}"], f"floats{i}", **settings))
        matrices.append(steps * (np.repeat(scale, 16, 0) if per == "blocks" else scale).astype(np.float64))
        x, w = (f"t{i - 1}" if i else "x"), f"w{i}"
        if turned:
            nodes.append(helper.make_node("Transpose", [w], [f"v{i}"], f"turn{i}", perm=[1, 0]))
            w = f"v{i}"
        kind_of_product = "Gemm" if product == "gemm" else "MatMul"
        nodes.append(helper.make_node(kind_of_product, [x, w], [f"y{i}"], f"product{i}"))
        nodes.append(helper.make_node("Tanh", [f"y{i}"], [f"t{i}"], f"tanh{i}"))
    graph = helper.make_graph(
        nodes[:-1], "g", [helper.make_tensor_value_info("x", 1, [*lead, 64])],
        [helper.make_tensor_value_info("y1", 1, [*lead, 64])],
        [numpy_helper.from_array(values, name) for name, values in stored.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), matrices


DEQUANTIZED = [
    (TensorProto.INT8, "tensor", "matmul", ("n",)),
    (TensorProto.INT8, "columns", "turned", ("n",)),
    (TensorProto.INT8, "columns", "gemm", ("n",)),
    (TensorProto.INT4, "blocks", "matmul", ("n",)),
    (TensorProto.INT4, "blocks", "turned", ("n", "t")),
    (TensorProto.INT4, "tensor", "turned", ("n",)),
    (TensorProto.INT8, "blocks", "matmul", ("n", "t")),
]


@pytest.mark.parametrize(("kind", "per", "product", "lead"), DEQUANTIZED)
def test_products_with_dequantized_matrices_are_exact_by_default(
    kind: int, per: str, product: str, lead: tuple[str, ...], tmp_path: Path
) -> None:
    """onnxruntime would make kernels of few bits of them, and round to 8 bits what these multiply."""
    original, matrices = dequantized(kind, per, product, lead)
    built = build(original, Options(lora=LoraSpec(RANK)))
    rng = np.random.default_rng(1)
    shape = [3, 5][-len(lead) :]
    feeds = {name: rng.standard_normal([*shape, 64]).astype(np.float32) for name in ("x", "label")}
    factors = {}
    for tensor in built.model.graph.initializer:
        if "lora" in tensor.name:
            factors[tensor.name] = (rng.standard_normal(list(tensor.dims)) / 8).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(factors[tensor.name], tensor.name))
    ours = optimized(built.model, tmp_path / "ours.onnx")
    assert not kinds(ours)["MatMulNBits"] and not kinds(ours)["QuantizeLinear"]
    assert [t for t in floats_of_a_matrix(ours)] == []
    session = onnxruntime.InferenceSession(built.model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, feeds), strict=True))
    with_our_settings = Executor(built.model, fallback=False)(feeds)
    np.testing.assert_allclose(with_our_settings["loss"], found["loss"], rtol=1e-6)
    leaves = {name: torch.tensor(x.astype(np.float64), requires_grad=True) for name, x in factors.items()}
    h = torch.tensor(feeds["x"].astype(np.float64))
    for i, matrix in enumerate(matrices):
        branch = leaves[f"q{i}_lora_A"] @ leaves[f"q{i}_lora_B"]
        branch = (leaves[f"q{i}_lora_B"] @ leaves[f"q{i}_lora_A"]).T if product == "turned" else branch
        h = h @ (torch.tensor(matrix) + branch)
        h = torch.tanh(h) if i == 0 else h
    torch.nn.functional.mse_loss(h, torch.tensor(feeds["label"].astype(np.float64))).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        np.testing.assert_allclose(found[f"{name}_grad"], leaf.grad, rtol=0, atol=1e-5 * float(leaf.grad.abs().max()))


def test_integers_that_meet_integers_keep_the_form_of_their_kernels() -> None:
    """Where both factors are dequantized, runtimes multiply the integers: the graph says so, and it stays."""
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    g (float[N, 8] x) => (float[N, 8] y)
        <float s = {0.05}, int8 z = {0}>
    { q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) w = DequantizeLinear(m, s, z)
      h = MatMul(a, w) y = Mul(h, scale) }
    """
    original = onnx.parser.parse_model(text)
    stored = {"m": np.arange(64, dtype=np.int8).reshape(8, 8), "scale": np.ones(8, np.float32)}
    original.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in stored.items())
    model = build(original, Options(train=("scale",))).model
    (node,) = (node for node in model.graph.node if node.op_type == "MatMul")
    assert list(node.input) == ["a", "w"]


# -- in float64 -----------------------------------------------------------------------------------------------------
