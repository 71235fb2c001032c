"""Pairs of QuantizeLinear and DequantizeLinear against PyTorch's fake quantization; and what is refused.

The straight-through estimator is no derivative, so no difference can prove it: PyTorch is the source. It knows learned
scales in float32 only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.builder import build
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.cli_harness import Shell, save
from tests.facts import raises

rng = np.random.default_rng(11)


def gradients(model: onnx.ModelProto, wanted: list[str], feeds: Arrays, g: np.ndarray, ste: bool = True) -> Arrays:
    """The gradients of `wanted` through output y, with its cotangent `g`, on onnxruntime."""
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    op = Op(graph)
    seed = op.const(g)
    found = differentiate(graph, {"y": seed}, wanted, op, Training(straight_through=ste))
    graph.nodes.extend(op.nodes)
    del graph.proto.graph.output[:]
    for name in wanted:
        cotangent = found[name]
        graph.add_output((op.fill(0.0, op.val(name)) if cotangent is None else cotangent).name)
    graph.set_nodes([*graph.nodes, *(node for node in op.nodes if node not in graph.nodes)])
    graph.remove_unused()
    results = list(Executor(graph.commit(), fallback=False)(feeds).values())
    return dict(zip(wanted, results, strict=True))


def pair(x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, opset: int = 21, **attributes: Any) -> Any:
    """x -> QuantizeLinear -> DequantizeLinear -> y, as a model with the inputs x and scale; their values."""
    zeros = ["zero"] if zero is not None else []
    nodes = [
        helper.make_node(kind, [value, "scale", *zeros], [result], name=kind, **attributes)
        for kind, value, result in (("QuantizeLinear", "x", "q"), ("DequantizeLinear", "q", "y"))
    ]
    floats = {"x": x, "scale": scale}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in floats.items()]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    stored = [numpy_helper.from_array(zero, "zero")] if zero is not None else []
    graph = helper.make_graph(nodes, "pair", infos, [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), floats


def fake(function: Callable[..., torch.Tensor], x: np.ndarray, scale: np.ndarray, g: np.ndarray) -> Arrays:
    """PyTorch's gradients of x and scale."""
    leaves = [torch.tensor(np.float32(value), requires_grad=True) for value in (x, scale)]
    function(*leaves).backward(torch.tensor(np.float32(g)))
    return {name: leaf.grad.numpy() for name, leaf in zip(("x", "scale"), leaves, strict=True) if leaf.grad is not None}


def agree(found: Arrays, wanted: Arrays) -> None:
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4 * np.abs(value).max(), err_msg=name)


INTEGERS = [
    (np.int8, 13), (np.uint8, 13), (np.int8, 19), (np.uint8, 21), (np.int16, 21), (np.uint16, 21), (np.int8, 23),
    (ml_dtypes.int4, 21), (ml_dtypes.uint4, 21), (ml_dtypes.int2, 25), (ml_dtypes.uint2, 25), (np.uint8, 24),
]  # fmt: skip


def limits(kind: Any) -> tuple[int, int]:
    info = np.iinfo(kind) if np.dtype(kind).kind in "iu" else ml_dtypes.iinfo(kind)
    return int(info.min), int(info.max)


def spread(kind: Any, shape: tuple[int, ...], scale: Any, zero: Any) -> np.ndarray:
    """Values of which one in three lies beyond the range, none within a tenth of a step of a tie."""
    least, greatest = limits(kind)
    width = greatest - least
    steps = rng.integers(least - width // 4 - 1, greatest + width // 4 + 2, shape) + rng.uniform(-0.4, 0.4, shape)
    return ((steps - zero) * scale).astype(np.float32)


@pytest.mark.parametrize(("kind", "opset"), INTEGERS, ids=str)
@pytest.mark.parametrize("shifted", [False, True])
def test_one_scale(kind: Any, opset: int, shifted: bool) -> None:
    least, greatest = limits(kind)
    zero = np.array((least + greatest) // 2 + 1 if shifted else 0, kind)
    scale = np.array(0.0625, np.float32)
    x = spread(kind, (5, 9), scale, int(zero))
    g = rng.standard_normal(x.shape).astype(np.float32)
    model, feeds = pair(x, scale, zero, opset)
    found = gradients(model, ["x", "scale"], feeds, g)

    def learned(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        z = torch.tensor([float(zero)], dtype=torch.float32)
        return torch._fake_quantize_learnable_per_tensor_affine(x, s.reshape(1), z, least, greatest, 1.0)

    agree(found, fake(learned, x, scale, g))
    plain = fake(lambda x, s: torch.fake_quantize_per_tensor_affine(x, 0.0625, int(zero), least, greatest), x, scale, g)
    agree(found, plain)
    assert (found["x"] == 0).any() and (found["x"] != 0).any()


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [np.int8, np.uint8, ml_dtypes.int4], ids=str)
def test_one_scale_for_each_channel(kind: Any, axis: int) -> None:
    shape = (3, 4, 5)
    least, greatest = limits(kind)
    scale = rng.uniform(0.01, 0.1, shape[axis]).astype(np.float32)
    zero = rng.integers(max(least, -3), 4, shape[axis])
    along = [-1 if i == axis % 3 else 1 for i in range(3)]
    x = spread(kind, shape, scale.reshape(along), zero.reshape(along))
    g = rng.standard_normal(shape).astype(np.float32)
    model, feeds = pair(x, scale, zero.astype(kind), axis=axis)

    def learned(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        z = torch.tensor(zero, dtype=torch.float32)
        return torch._fake_quantize_learnable_per_channel_affine(x, s, z, axis % 3, least, greatest, 1.0)

    agree(gradients(model, ["x", "scale"], feeds, g), fake(learned, x, scale, g))


@pytest.mark.parametrize(("axis", "blocks", "size"), [(0, 2, 3), (1, 2, 4), (-1, 5, 1)])
def test_one_scale_for_each_block(axis: int, blocks: int, size: int) -> None:
    """PyTorch knows no blocks, so each is a channel of a tensor that is laid out anew; the last may be cut short."""
    shape = (5, 8, 5)
    full = [blocks if i == axis % 3 else n for i, n in enumerate(shape)]
    scale, zero = rng.uniform(0.01, 0.1, full).astype(np.float32), rng.integers(-3, 4, full)

    def stretched(values: Any) -> Any:
        whole = values.repeat_interleave(size, axis) if isinstance(values, torch.Tensor) else values.repeat(size, axis)
        return whole[tuple(slice(n) for n in shape)]

    x = spread(np.int8, shape, stretched(scale), stretched(zero))
    g = rng.standard_normal(shape).astype(np.float32)
    model, feeds = pair(x, scale, zero.astype(np.int8), axis=axis, block_size=size)

    def learned(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        z = torch.tensor(stretched(zero), dtype=torch.float32).reshape(-1)
        each = (x.reshape(-1, 1), stretched(s).reshape(-1), z)
        return torch._fake_quantize_learnable_per_channel_affine(*each, 0, -128, 127, 1.0).reshape(shape)

    agree(gradients(model, ["x", "scale"], feeds, g), fake(learned, x, scale, g))


def test_without_a_zero_point_the_type_is_uint8() -> None:
    scale = np.array(0.5, np.float32)
    x = spread(np.uint8, (40,), 0.5, 0)
    g = rng.standard_normal(40).astype(np.float32)
    model, feeds = pair(x, scale, None)
    plain = fake(lambda x, s: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, 0, 255), x, scale, g)
    agree(gradients(model, ["x"], feeds, g), plain)


def test_symbolic_axes_and_half_precision() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    pair (float16[n, m] x, float16[k] scale) => (float16[n, m] y) <int8[1] zero = {3}>
    {
      q = QuantizeLinear(x, scale, zero)
      y = DequantizeLinear(q, scale, zero)
    }
    """
    x = rng.uniform(-9, 9, (4, 5)).astype(np.float16)
    scale, g = np.array([0.0625], np.float16), rng.standard_normal((4, 5)).astype(np.float16)
    found = gradients(parser.parse_model(text), ["x", "scale"], {"x": x, "scale": scale}, g)
    wanted = np.where(np.abs(np.round(x.astype(float) / 0.0625) + 3.5) <= 127.6, g, 0)
    assert found["x"].dtype == found["scale"].dtype == np.float16
    np.testing.assert_allclose(found["x"], wanted, rtol=1e-3)


def test_the_estimate_can_be_differentiated_again() -> None:
    """Within the range x passes as it is, so that the second derivative of 0.5 y^3 is 3 y."""
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    cube (float[n] x) => (float[n] y) <float s = {0.5}, int8 zero = {0}, float half = {0.5}>
    {
      q = QuantizeLinear(x, s, zero)
      d = DequantizeLinear(q, s, zero)
      a = Mul(d, d)
      b = Mul(a, d)
      y = Mul(b, half)
    }
    """
    graph = Graph(parser.parse_model(text))
    infer_types(graph)
    for source, target in (("y", "first"), ("first", "second")):
        op = Op(graph)
        ones = op.fill(1.0, op.val(source))
        found = differentiate(graph, {source: ones}, ["x"], op, Training(straight_through=True))["x"]
        op.rename(found, target)
        graph.set_nodes([*graph.nodes, *op.nodes])
    graph.add_output("first")
    graph.add_output("second")
    x = np.array([-70.0, -1.3, 0.1, 0.4, 3.2, 64.0], np.float32)
    found = Executor(graph.commit())({"x": x})
    d, inside = found["y"], np.abs(x) < 63.7
    d = np.cbrt(2 * d)
    np.testing.assert_allclose(found["first"], np.where(inside, 1.5 * d**2, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["second"], np.where(inside, 3 * d, 0), rtol=1e-5, atol=1e-6)


# -- whole models -----------------------------------------------------------------------------------------------

QDQ = """
<ir_version: 10, opset_import: ["": 21]>
qdq (float[batch, 4] x) => (float[batch, 2] y)
<float[4, 3] w1 = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3}, float[3] b1 = {1, 2, 3},
 float[3, 2] w2 = {1, 2, 3, 4, 5, 6}, float s1 = {0.0707}, float[3] s2 = {0.0213, 0.031, 0.047}, float s3 = {0.0119},
 int8 z1 = {0}, int8[3] z2 = {0, 0, 0}, uint8 z3 = {7}>
{
  xq = QuantizeLinear(x, s3, z3)
  xd = DequantizeLinear(xq, s3, z3)
  w1q = QuantizeLinear <axis = 1> (w1, s2, z2)
  w1d = DequantizeLinear <axis = 1> (w1q, s2, z2)
  h = MatMul(xd, w1d)
  k = Add(h, b1)
  s = Sigmoid(k)
  sq = QuantizeLinear(s, s3, z3)
  sd = DequantizeLinear(sq, s3, z3)
  w2q = QuantizeLinear(w2, s1, z1)
  w2d = DequantizeLinear(w2q, s1, z1)
  y = MatMul(sd, w2d)
}
"""
FEW = """
<ir_version: 10, opset_import: ["": 21]>
{name} (float[n] x) => (float[n] y) <float[1] w = {{2}}, float s = {{0.5}}, uint8 z = {{3}}, float t = {{4}}>
{{
  v = Mul(x, w)
{nodes}
}}
"""
PRODUCT = """
<ir_version: 10, opset_import: ["": 21]>
product (float[n, 4] x) => (float[n, 4] y) <float[4, 4] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4},
 uint8[4, 4] m = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}, float s = {0.5}, uint8 z = {3}>
{
  n = Shape(x)
  v = MatMul(x, w)
%s
}
"""


def test_a_model_trained_with_quantization_in_it_is_as_in_pytorch() -> None:
    model = parser.parse_model(QDQ)
    values = {tensor.name: np.float32(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    scales = ("s1", "s2", "s3")
    options = Options(quantization="ste", losses=(LossSpec("mse"),), train=("w*", "b1", *scales))
    built = build(model, options)
    x = rng.uniform(-0.5, 3.5, (6, 4)).astype(np.float32)
    label = rng.standard_normal((6, 2)).astype(np.float32)
    found = Executor(built.model)({"x": x, "label": label})

    leaves = {name: torch.tensor(values[name], requires_grad=True) for name in ("w1", "b1", "w2", *scales)}
    zero = torch.zeros(3, dtype=torch.float32)

    def learned(x: torch.Tensor, s: torch.Tensor, z: float, low: int, high: int) -> torch.Tensor:
        s, each = s.reshape(1), torch.tensor([z], dtype=torch.float32)
        return torch._fake_quantize_learnable_per_tensor_affine(x, s, each, low, high, 1.0)

    w1, b1, w2, s1, s2, s3 = leaves.values()
    w1 = torch._fake_quantize_learnable_per_channel_affine(w1, s2, zero, 1, -128, 127, 1.0)
    hidden = torch.sigmoid(learned(torch.tensor(np.float32(x)), s3, 7, 0, 255) @ w1 + b1)
    y = learned(hidden, s3, 7, 0, 255) @ learned(w2, s1, 0, -128, 127)
    loss = torch.nn.functional.mse_loss(y, torch.tensor(np.float32(label)))
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(
            found[f"{name}_grad"], leaf.grad, rtol=1e-3, atol=1e-4 * leaf.grad.abs().max().item(), err_msg=name
        )


def test_without_the_option_every_pair_is_refused_and_the_option_named() -> None:
    with pytest.raises(UnsupportedError) as found:
        build(parser.parse_model(QDQ), Options())
    refusals = found.value.refusals
    assert {refusal.op_type for refusal in refusals} == {"QuantizeLinear"} and len(refusals) == 2  # of w2 and of s
    assert all("`quantization='ste'`" in refusal.hint for refusal in refusals)


def test_what_lies_behind_the_last_pair_needs_no_estimate() -> None:
    built = build(parser.parse_model(FEW.format(name="bias", nodes="""
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        e = Mul(d, w)
        y = Add(e, v)""")), Options(train=("w",)))  # fmt: skip
    assert built.training.trained == ["w"]


WRITTEN_OUT = {"DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "Reshape"}
"""What is trained through by the straight-through estimator, and refused without it."""


@pytest.mark.parametrize("ste", [False, True], ids=["refuse", "ste"])
@pytest.mark.parametrize(
    ("nodes", "refused", "reason"),
    [
        ("i = BitCast <to = 6> (v) y = BitCast <to = 1> (i)", {"BitCast"}, "bits"),
        (
            "q = QuantizeLinear(v, s, z) r = Reshape(q, n) y = DequantizeLinear(r, s, z)",
            {"Reshape"},
            "quantized",
        ),
        ("q = QuantizeLinear(v, s, z) y = Cast <to = 1> (q)", {"Cast"}, "not dequantized"),
        (
            "q, t1, t2 = DynamicQuantizeLinear(v) y = DequantizeLinear(q, t1, t2)",
            {"DynamicQuantizeLinear"},
            "are computed from the data",
        ),
        (
            "q = QuantizeLinear(v, s, z) r = QLinearMatMul(q, s, z, m, s, z, s, z) y = DequantizeLinear(r, s, z)",
            {"QLinearMatMul"},
            "integers",
        ),
        (
            "q = QuantizeLinear(v, s, z) r = MatMulInteger(q, m) u = Cast <to = 1> (r) y = Mul(u, s)",
            {"MatMulInteger"},
            "integers",
        ),
    ],
    ids=lambda x: "" if isinstance(x, str) else "+".join(x),
)
def test_integers_are_refused_by_name(nodes: str, refused: set[str], reason: str, ste: bool) -> None:
    """Not passed over in silence, which would make the gradient of what lies before them zero."""
    if ste and refused <= WRITTEN_OUT:  # see tests/passes/prepare/test_quantized_operators.py
        pytest.skip("they are written as float operators between quantizers then")
    text = PRODUCT % nodes.replace(") ", ")\n")
    if "BitCast" in nodes:
        text = text.replace('"": 21', '"": 26')
    model = parser.parse_model(text)
    with pytest.raises((UnsupportedError, UsageError)) as found:
        build(model, Options(train=("w",), quantization="ste" if ste else "refuse"))
    refusals = {r.op_type: r.reason for r in found.value.refusals if ste or r.op_type != "QuantizeLinear"}
    assert set(refusals) == refused
    assert all(reason in why for why in refusals.values())


def test_a_float8_pair_is_refused() -> None:
    x = np.array([1.0, 2.0], np.float32)
    model, feeds = pair(x, np.array(0.5, np.float32), np.array(0, ml_dtypes.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match="float8e4m3fn"):
        gradients(model, ["x"], feeds, x)


def test_a_cast_to_integers_is_zero_as_ever() -> None:
    text = FEW.format(name="cut", nodes="  i = Cast <to = 7> (v)\n  f = Cast <to = 1> (i)\n  y = Add(f, x)")
    with raises(UnsupportedError, "refused", "train", "w", "y", "Cast_i"):
        build(parser.parse_model(text), Options(train=("w",)))


def test_onnxruntimes_own_pair_of_operators() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
    pair (float[n] x) => (float[n] y) <float s = {0.5}, uint16 zero = {9}>
    {
      q = com.microsoft.QuantizeLinear(x, s, zero)
      y = com.microsoft.DequantizeLinear(q, s, zero)
    }
    """
    x = np.array([-7.0, -4.0, 0.1, 9.0, 4e4], np.float32)
    g = rng.standard_normal(5).astype(np.float32)
    found = gradients(parser.parse_model(text), ["x"], {"x": x}, g)
    np.testing.assert_allclose(found["x"], g * [0, 1, 1, 1, 0])


def test_refused_operators_have_a_reason() -> None:
    refused = [rule for rule in registry.all_rules() if rule.refusal]
    assert len(refused) > 20
    assert all(rule.hint and not rule.is_zero and rule.source == "refused" for rule in refused)


# -- the command line -------------------------------------------------------------------------------------------


def test_the_option(shell: Shell) -> None:
    save(QDQ, Path("qdq.onnx"))
    result = shell("build", "qdq.onnx")
    assert result.code == 3 and "--quantization ste" in result.out + result.err
    assert "qdq.train.onnx" not in shell.files()
    assert shell("inspect", "qdq.onnx").code == 3
    assert shell("inspect", "qdq.onnx", "--quantization", "ste").code == 0
    built = shell("build", "qdq.onnx", "--quantization", "ste", "--json")
    assert built.code == 0, built.err
    assert built.json["asked"]["options"] == {"--quantization": "ste"}
    checked = shell("check", "qdq.train.onnx")
    assert checked.code == 4 and "not proved" in checked.err and "straight-through" in checked.out + checked.err
    Path("c.toml").write_text('quantization = "ste"\n')
    assert shell("build", "qdq.onnx", "--config", "c.toml", "-o", "other.onnx").code == 0
    assert shell("build", "qdq.onnx", "--quantization", "fake").code == 2
    listed = shell("list", "operators", "QLinearConv").out
    assert "straight-through" in listed and "--quantization ste" in listed
