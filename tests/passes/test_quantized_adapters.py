"""Adapters of matrices that are stored as integers: PyTorch's gradients, and what is written when they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.adapters.own_file import load_adapter
from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import LoraSpec, Options
from tests.cli_harness import Shell

Array = np.ndarray
K, N, RANK = 40, 24, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, K)).astype(np.float32)


@dataclass(frozen=True)
class Form:
    """A product with a matrix of integers: its nodes, what is stored, the matrix [K, N], and what is added to y."""

    nodes: list[onnx.NodeProto]
    stored: dict[str, Array]
    matrix: Array
    bias: Array = field(default_factory=lambda: np.zeros(N, np.float32))
    scale: float = 1.0
    weight: str = "q"


def few_bits(bits: int, block: int, zeros: bool = False, bias: bool = False, columns: int = K) -> Form:
    """MatMulNBits: rows of an output each, packed into bytes, the low bits first, with a scale for each block."""
    blocks = -(-columns // block)
    steps = RNG.integers(0, 2**bits, (N, blocks * block)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.1, (N, blocks)).astype(np.float32)
    shift = RNG.integers(0, 2**bits, (N, blocks)).astype(np.uint8) if zeros else np.full((N, blocks), 2 ** (bits - 1))
    matrix = ((steps - np.repeat(shift, block, 1).astype(np.float32)) * np.repeat(scales, block, 1))[:, :columns].T
    given = {"q": packed(steps, bits).reshape(N, blocks, -1), "s": scales.reshape(-1)}
    given |= {"z": packed(shift, bits).reshape(-1)} if zeros else {}
    given |= {"b": RNG.standard_normal(N).astype(np.float32)} if bias else {}
    names = ["x", "q", "s", "z" if zeros else "", "", "b" if bias else ""]
    node = helper.make_node("MatMulNBits", names, ["y"], name="product", domain="com.microsoft", K=columns, N=N,
                            bits=bits, block_size=block)  # fmt: skip
    return Form([node], given, matrix, *([given["b"]] if bias else []))


def packed(values: Array, bits: int) -> Array:
    """Numbers of some bits in bytes, each row filled up."""
    each = 8 // bits
    filled = np.pad(values, ((0, 0), (0, -values.shape[1] % each))).reshape(len(values), -1, each)
    return (filled.astype(np.uint32) << (bits * np.arange(each))).sum(2).astype(np.uint8)


def dequantized(kind: Any, shape: tuple[int, int], per: str, nodes: list[onnx.NodeProto], **more: Any) -> Form:
    """DequantizeLinear of one scale, of one for each column, or for each block of 8 rows, in front of a product."""
    name = helper.np_dtype_to_tensor_dtype(np.dtype(kind)) if not isinstance(kind, int) else kind
    low, high = (-7, 7) if name == TensorProto.INT4 else (0, 255) if name == TensorProto.UINT8 else (-127, 127)
    steps = RNG.integers(low, high, shape)
    sizes: tuple[int, ...] = {"tensor": (), "axis": (shape[1],), "block": (shape[0] // 8, shape[1])}[per]
    scale = np.asarray(RNG.uniform(0.01, 0.1, sizes), np.float32)
    zero = np.asarray(RNG.integers(max(low, 0), 5, sizes))
    wide = [np.repeat(each, 8, 0) if per == "block" else each for each in (scale, zero)]
    dtype = helper.tensor_dtype_to_np_dtype(name)
    attributes = {"tensor": {}, "axis": {"axis": 1}, "block": {"axis": 0, "block_size": 8}}[per]
    first = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], name="dequantize", **attributes)
    given = {"q": steps.astype(dtype), "s": scale, "z": zero.astype(dtype)}
    matrix = ((steps - wide[1]) * wide[0]).astype(np.float32)
    bias = more.pop("bias", None)
    given |= {} if bias is None else {"b": bias}
    return Form([first, *nodes], given, matrix.T if shape == (N, K) else matrix,
                np.zeros(N, np.float32) if bias is None else bias, **more)  # fmt: skip


MATMUL = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
TURNED = [helper.make_node("Transpose", ["w"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"], name="product")]
GEMM = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="product", transB=1, alpha=0.5)]
LEFT = [
    helper.make_node("Transpose", ["x"], ["t"]),
    helper.make_node("MatMul", ["w", "t"], ["u"], name="product"),
    helper.make_node("Transpose", ["u"], ["y"]),
]
GEMM_LEFT = [
    helper.make_node("Gemm", ["w", "x"], ["u"], name="product", transB=1, alpha=0.5),
    helper.make_node("Transpose", ["u"], ["y"]),
]
BIAS = RNG.standard_normal(N).astype(np.float32)
FORMS = {
    "4 bits": few_bits(4, 16),
    "4 bits, all": few_bits(4, 32, zeros=True, bias=True),
    "8 bits": few_bits(8, 16, zeros=True),
    "2 bits": few_bits(2, 16, zeros=True, bias=True),
    "int8": dequantized(np.int8, (K, N), "tensor", MATMUL),
    "uint8 by columns": dequantized(np.uint8, (K, N), "axis", MATMUL),
    "int4 by blocks": dequantized(TensorProto.INT4, (K, N), "block", MATMUL),
    "transposed": dequantized(np.int8, (N, K), "axis", TURNED),
    "gemm": dequantized(np.int8, (N, K), "tensor", GEMM, bias=BIAS, scale=0.5),
    "on the left": dequantized(np.uint8, (N, K), "axis", LEFT),
    "gemm on the left": dequantized(np.int8, (N, K), "tensor", GEMM_LEFT, scale=0.5),
}


def model_of(form: Form) -> ModelProto:
    graph = helper.make_graph(
        form.nodes, "g", [helper.make_tensor_value_info("x", 1, ["n", K])],
        [helper.make_tensor_value_info("y", 1, ["n", N])],
        [numpy_helper.from_array(values, name) for name, values in form.stored.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def with_factors(model: ModelProto, values: Mapping[str, Array]) -> ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    return model


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_pytorchs_and_the_branch_stays(name: str) -> None:
    form = FORMS[name]
    model = model_of(form)
    before = Executor(model, fallback=False)({"x": X})["y"]
    expected = form.scale * X @ form.matrix + form.bias
    np.testing.assert_allclose(before, expected, rtol=1e-4, atol=1e-4)
    built = build(model_of(form), Options(lora=LoraSpec(RANK, 6.0), keep_outputs=True))
    (adapter,) = describe(built.model).adapters
    assert adapter.weight == form.weight and not built.training.not_trained[form.weight].startswith("quantized")
    stored = {t.name: numpy_helper.to_array(t) for t in built.model.graph.initializer}
    values = {name: RNG.standard_normal(stored[name].shape).astype(np.float32) / 5 for name in (adapter.a, adapter.b)}
    label = RNG.standard_normal((5, N)).astype(np.float32)
    found = Executor(with_factors(built.model, values), fallback=False)({"x": X, "label": label})

    leaves = {name: torch.tensor(each, dtype=torch.float64, requires_grad=True) for name, each in values.items()}
    a, b = leaves[adapter.a], leaves[adapter.b]
    a, b = (a if a.shape == (K, RANK) else a.T), (b if b.shape == (RANK, N) else b.T)
    w = torch.tensor(form.matrix, dtype=torch.float64) + 2.0 * a @ b
    y = form.scale * torch.tensor(X, dtype=torch.float64) @ w + torch.tensor(form.bias)
    torch.nn.functional.mse_loss(y, torch.tensor(label, dtype=torch.float64)).backward()
    np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-4, atol=1e-4)
    for factor, leaf in leaves.items():
        assert leaf.grad is not None
        np.testing.assert_allclose(found[f"{factor}_grad"], leaf.grad, rtol=1e-4, atol=1e-5 * leaf.grad.abs().max())

    written = merge(model, [adapter], values)
    onnx.checker.check_model(written, full_check=True)
    kept = {t.name: numpy_helper.to_array(t) for t in written.graph.initializer}
    assert np.array_equal(kept["q"], form.stored["q"])
    np.testing.assert_allclose(Executor(written, fallback=False)({"x": X})["y"], y.detach(), rtol=1e-4, atol=1e-4)


def language_model() -> ModelProto:
    """Two products of 4 bits, one of them behind a module's path, a table of 8 bits that is looked up, and no float."""
    first, second = few_bits(4, 16), few_bits(4, 32)
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["table", "step"], ["floats"], name="dequantize"),
            helper.make_node("Gather", ["floats", "ids"], ["x"], name="lookup"),
            helper.make_node("MatMulNBits", ["x", "q1", "s1"], ["h"], name="/layers.0/self_attn/q_proj/MatMul",
                             domain="com.microsoft", K=K, N=N, bits=4, block_size=16),
            helper.make_node("MatMulNBits", ["x", "q2", "s2"], ["g"], name="/layers.0/mlp/up_proj/MatMul",
                             domain="com.microsoft", K=K, N=N, bits=4, block_size=32),
            helper.make_node("Tanh", ["g"], ["t"]),
            helper.make_node("Mul", ["h", "t"], ["m"]),
            helper.make_node("MatMul", ["m", "head"], ["logits"], name="/lm_head/MatMul"),
        ],
        "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "t"])],
        [helper.make_tensor_value_info("logits", 1, ["n", "t", 12])],
        [numpy_helper.from_array(values, name) for name, values in {
            "table": RNG.integers(-90, 90, (12, K)).astype(np.int8), "step": np.float32(0.02),
            "q1": first.stored["q"], "s1": first.stored["s"], "q2": second.stored["q"], "s2": second.stored["s"],
            "head": RNG.standard_normal((N, 12)).astype(np.float32) / 5,
        }.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(language_model(), "lm.onnx")
    ids = (np.arange(24)[:, None] + np.arange(7)) % 12
    np.savez("text.npz", ids=ids, label=ids)
    return Shell(tmp_path, capsys)


def test_a_language_model_of_four_bits_learns(shell: Shell) -> None:
    """The trained model has the adapters beside its products, and an adapter alone comes to the same by `export`."""
    words = ("--loss", "causal-lm", "--data", "text.npz", "--epochs", "30", "--learning-rate", "0.02", "--threads", "1")
    result = shell(
        "train", "lm.onnx", "--lora", "4", *words, "-o", "taught.onnx", "--adapter", "a.safetensors", "--json"
    )
    assert result.code == 0, result.err
    losses = [epoch["loss"] for epoch in result.json["epochs"]]
    assert losses[-1] < losses[0] / 2
    taught = onnx.load("taught.onnx")
    assert sum(node.op_type == "MatMulNBits" for node in taught.graph.node) == 2
    adapters, _ = load_adapter(Path("a.safetensors"))
    assert [adapter.weight for adapter in adapters] == ["head", "q1", "q2"]
    assert shell("export", "a.safetensors", "--model", "lm.onnx", "-o", "again.onnx").code == 0
    feeds = {"ids": np.arange(12)[None]}
    wanted = Executor(taught, fallback=False)(feeds)["logits"]
    np.testing.assert_allclose(Executor(onnx.load("again.onnx"), fallback=False)(feeds)["logits"], wanted, rtol=1e-5)
    assert not np.allclose(Executor(language_model(), fallback=False)(feeds)["logits"], wanted, rtol=1e-2)


def test_a_matrix_in_an_unknown_form_is_told(shell: Shell) -> None:
    """The columns of a first layer are in another order, which no definition knows; the second layer is adapted."""
    model = language_model()
    product = model.graph.node[2]
    product.input.extend(["", "order"])
    order = np.arange(K, dtype=np.int32)[::-1] // 16
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(order), "order"))
    del model.graph.node[5:]
    model.graph.node.append(helper.make_node("Add", ["h", "t"], ["logits"]))
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = N
    onnx.save(model, "ordered.onnx")
    told = shell("build", "ordered.onnx", "--loss", "causal-lm", "--lora", "4", "-o", "t.onnx", "--json")
    assert told.code == 0, told.err
    reasons = {tensor["name"]: tensor["reason"] for tensor in told.json["not_trained"]}
    assert reasons["q1"].startswith("'/layers.0/self_attn/q_proj/MatMul' (MatMulNBits) ")
    assert "reordered" in reasons["q1"]
    assert [adapter["weight"] for adapter in told.json["adapters"]] == ["q2"]
    del model.graph.node[3:]
    model.graph.node.append(helper.make_node("Identity", ["h"], ["logits"]))
    onnx.save(model, "alone.onnx")
    refused = shell("build", "alone.onnx", "--loss", "causal-lm", "--lora", "4", "-o", "u.onnx")
    assert refused.code == 3
    assert refused.facts[:3] == ("refused", "/layers.0/self_attn/q_proj/MatMul", "com.microsoft::MatMulNBits")


def test_an_adapter_of_another_model_makes_no_base(shell: Shell) -> None:
    """Of equal names, and of other sizes: nothing is written."""
    words = ("--loss", "causal-lm", "--data", "text.npz", "--epochs", "1", "--lora", "4", "--lora-target", "head")
    done = shell("train", "lm.onnx", *words, "-o", "taught.onnx", "--adapter", "a.safetensors")
    assert done.code == 0, done.err
    model = language_model()
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    head.CopyFrom(numpy_helper.from_array(np.zeros((N, 13), np.float32), "head"))
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 13
    onnx.save(model, "other.onnx")
    for way in ("--adaptable", "--merge"):
        refused = shell("export", "a.safetensors", "--model", "other.onnx", way, "-o", "base.onnx")
        assert refused.code == 1 and "head" in refused.facts
        assert not Path("base.onnx").exists()


def test_what_could_not_be_written_back_is_told_before_training(shell: Shell) -> None:
    """Under the estimator an operator on integers is trained as a float one; in the file it stays what it is."""
    model = language_model()
    stored = {"q": RNG.integers(-90, 90, (K, N)).astype(np.int8), "one": np.float32(0.1)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in stored.items())
    model.graph.node[2].CopyFrom(
        helper.make_node("DynamicQuantizeMatMul", ["x", "q", "one"], ["h"], domain="com.microsoft")
    )
    onnx.save(model, "dynamic.onnx")
    words = (
        "train",
        "dynamic.onnx",
        "--quantization",
        "ste",
        "--lora",
        "4",
        "--loss",
        "causal-lm",
        "--data",
        "text.npz",
    )
    refused = shell(*words, "-o", "taught.onnx")
    assert refused.code == 2 and refused.facts == ("conflict", "q", "h", "DynamicQuantizeMatMul")
    assert not Path("taught.onnx").exists() and not Path("taught.onnx.run").exists()
    done = shell(*words, "--lora-target", "mlp", "--epochs", "1", "-o", "taught.onnx")
    assert done.code == 0, done.err


def test_a_head_whose_rows_are_embeddings_too(shell: Shell) -> None:
    """The adapter adds to the product alone: embeddings are looked up in what is stored."""
    model = language_model()
    head = next(node for node in model.graph.node if node.name == "/lm_head/MatMul")
    model.graph.node.remove(head)
    columns = np.eye(N, K, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(columns, "columns"))
    model.graph.node.extend([
        helper.make_node("DequantizeLinear", ["table", "step"], ["again"], name="dequantize_again"),
        helper.make_node("Transpose", ["again"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["m", "columns"], ["wide"]),
        helper.make_node("MatMul", ["wide", "turned"], ["logits"], name="head"),
    ])  # fmt: skip
    onnx.save(model, "tied.onnx")
    words = ("--loss", "causal-lm", "--data", "text.npz", "--epochs", "2", "--lora", "3", "--lora-target", "table")
    done = shell("train", "tied.onnx", *words, "-o", "taught.onnx", "--adapter", "a.safetensors")
    assert done.code == 0, done.err
    adapters, values = load_adapter(Path("a.safetensors"))
    (adapter,) = adapters
    built = build(onnx.load("tied.onnx"), Options(lora=LoraSpec(3), lora_target=("table",), keep_outputs=True)).model
    ids = np.arange(12).reshape(2, 6)
    label = np.zeros((2, 6, 12), np.float32)
    wanted = Executor(with_factors(built, values), fallback=False)({"ids": ids, "label": label})["logits"]
    found = Executor(onnx.load("taught.onnx"), fallback=False)({"ids": ids})["logits"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(values[adapter.b]).max() > 0


def test_bytes_that_are_looked_up_by_rows_too(shell: Shell) -> None:
    """As onnxruntime-genai ties a head to its embeddings: the same bytes, of two axes where they are looked up."""
    head = few_bits(4, 16, columns=48)
    stored = head.stored | {"s": head.stored["s"].reshape(N, -1), "two_axes": np.array([N, -1])}
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["q", "two_axes"], ["rows"]),
            helper.make_node("GatherBlockQuantized", ["rows", "ids", "s"], ["x"], domain="com.microsoft", bits=4,
                             block_size=16, gather_axis=0, quantize_axis=1),
            helper.make_node("Tanh", ["x"], ["t"]),
            helper.make_node("MatMulNBits", ["t", "q", "s"], ["logits"], name="/lm_head/MatMul", domain="com.microsoft",
                             K=48, N=N, bits=4, block_size=16),
        ],
        "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "t"])],
        [helper.make_tensor_value_info("logits", 1, ["n", "t", N])],
        [numpy_helper.from_array(values, name) for name, values in stored.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), "tied.onnx")
    words = ("--loss", "causal-lm", "--data", "text.npz", "--epochs", "3", "--lora", "4", "--learning-rate", "0.02")
    feeds = {"ids": np.arange(12)[None]}
    for form in ("a.safetensors", "a.onnx_adapter", "folder"):
        done = shell("train", "tied.onnx", *words, "-o", f"{form}.onnx", "--adapter", form)
        assert done.code == 0, done.err
        assert shell("export", form, "--model", "tied.onnx", "-o", "again.onnx", "--force").code == 0
        before, wanted, found = (
            Executor(onnx.load(name), fallback=False)(feeds)["logits"]
            for name in ("tied.onnx", f"{form}.onnx", "again.onnx")
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert np.abs(wanted - before).max() > 0.01
    refused = shell("export", "a.safetensors", "--model", "tied.onnx", "--merge", "-o", "merged.onnx")
    assert refused.code == 2 and refused.facts[1:] == ("merge", "q") and not Path("merged.onnx").exists()


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (("q1",), ["q1"]),
        (("layers.0.self_attn.q_proj",), ["q1"]),
        (("q_proj", "lm_head"), ["head", "q1"]),
        (("layers.*.mlp.*",), ["q2"]),
        (("attention",), ["q1"]),
        (("mlp",), ["q2"]),
        (("all-linear",), ["head", "q1", "q2"]),
        ((), ["head", "q1", "q2"]),
    ],
)
@pytest.mark.thinned(3)
def test_targets_may_be_modules(targets: tuple[str, ...], adapted: list[str]) -> None:
    built = build(language_model(), Options(lora=LoraSpec(4), lora_target=targets))
    assert [adapter.weight for adapter in built.training.adapters] == adapted
    assert set(built.training.not_trained) >= {"q1", "q2"} - set(adapted) or not targets


def test_modules_of_the_dynamo_exporter() -> None:
    model = language_model()
    model.graph.node[2].name = "node_linear_3"
    model.graph.node[4].name = "node_tanh"
    scopes = "['', 'model', 'model.blocks.3', 'model.blocks.3.proj', 'linear_3']"
    head = next(node for node in model.graph.node if node.name == "/lm_head/MatMul")
    head.name = "node_linear_9"
    head.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    built = build(model, Options(lora=LoraSpec(4), lora_target=("blocks.*.proj",)))
    assert [adapter.weight for adapter in built.training.adapters] == ["head"]


def test_what_gets_no_adapter_is_told(shell: Shell) -> None:
    """A rank that is too large for one matrix, names that there are not, and targets without a rank."""
    bare = shell("build", "lm.onnx", "--loss", "causal-lm", "--lora-target", "q_proj", "-o", "t.onnx")
    assert bare.code == 2 and bare.facts == ("missing_value", "lora_target")
    told = shell("build", "lm.onnx", "--loss", "causal-lm", "--lora", "12", "-o", "t.onnx", "--json")
    assert told.code == 0, told.err
    reasons = {tensor["name"]: tensor["reason"] for tensor in told.json["not_trained"]}
    assert reasons["head"].endswith(", 12")
    assert "head" in [caution["subject"] for caution in told.json["cautions"]]
    wide = shell("build", "lm.onnx", "--loss", "causal-lm", "--lora", str(N), "-o", "t.onnx", "--force", "--json")
    assert wide.code == 2 and wide.facts == ("wrong_value", "lora", str(N))
    assert any(each.startswith("q1: ") and each.endswith(f", {N}") for each in wide.problem.details)
    refused = shell(
        "build", "lm.onnx", "--loss", "causal-lm", "--lora", "2", "--lora-target", "atention", "-o", "u.onnx"
    )
    assert refused.code == 2 and refused.facts == ("unknown_name", "lora_target", "atention")
    assert not Path("u.onnx").exists()
