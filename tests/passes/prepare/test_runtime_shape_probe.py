"""Ranks that can't be inferred are read off a run, if that is allowed."""

from __future__ import annotations

import re

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import InternalError, UnsupportedError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Shape, tensor_type
from onnxgrad_cli.options import Options
from tests.facts import raises

RNG = np.random.default_rng(11)


def squeezed() -> ModelProto:
    """A matrix product behind an If that squeezes, one does not know what."""
    text = """<ir_version: 8, opset_import: ["": 13]>
    g (float[n, one, 3] x) => (float y) <float[3, 2] w = {1, 2, 3, -1, 0.5, 1}, int64[1] i = {1}, int64[1] k = {1}> {
      s = Shape(x)
      d = Gather(s, i)
      e = Equal(d, k)
      q = Squeeze(e)
      t = Tanh(x)
      h = If(q) <then_branch = a () => (float u) { u = Squeeze(t) },
        else_branch = b () => (float v) { v = Identity(t) }>
      y = MatMul(h, w)
    }"""
    return with_outputs_of_any_rank(onnx.parser.parse_model(text))


def with_outputs_of_any_rank(model: ModelProto) -> ModelProto:
    """The model, of whose outputs, and of those of its bodies, no rank is declared: text can't say so."""
    bodies = [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.name != "to"]
    for graph in (model.graph, *(body for body in bodies if body.node)):
        graph.output[0].type.CopyFrom(tensor_type(TensorProto.FLOAT, None))
    return model


STORED = [
    (None, "read from a run"),
    (("n", "one", 3), "confirmed by a run"),
    (("n", 1, 3), "confirmed by a run"),
    (("one", "n", 3), "a run gave another shape"),
    (("n", 5, 3), "a run gave another shape"),
    (("n", 3), "a run gave another shape"),
    ((), "read from a run"),
]


@pytest.mark.parametrize(("stored", "told"), STORED)
def test_a_rank_is_read_off_a_run(stored: Shape | None, told: str) -> None:
    model = squeezed()
    if stored is not None:
        model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, stored))
    built = build(model)
    assert any(told in caution.text for caution in built.training.cautions)
    run, forward = Executor(built.model, fallback=False), Executor(squeezed(), fallback=False)
    with pytest.raises(Exception, match="rank"):  # of one axis less: no gradient rather than that of another network
        run({"x": np.ones((4, 1, 3), np.float32), "label": np.ones((4, 1, 2), np.float32)})
    for sizes, out in (((4, 5, 3), (4, 5, 2)), ((7, 2, 3), (7, 2, 2))):
        x, label = np.float32(RNG.standard_normal(sizes)), np.float32(RNG.standard_normal(out))
        y = forward({"x": x})["y"].astype(np.float64)
        expected = np.tensordot(np.tanh(x), 2 * (y - label) / y.size, ((0, 1), (0, 1)))
        got = run({"x": x, "label": label})["w_grad"]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def behind(condition: str, tail: str, taken: str = "Squeeze(h, i)") -> ModelProto:
    """A product whose middle axis goes on a condition of its size, and what comes of it."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, c, 4] x) => (float[n, 1] y)
    <float[3] b = {{0.5, -1, 2}}, int64[1] i = {{1}}, int64[1] k = {{1}}, int64[1] dozen = {{12}}> {{
      h = MatMul(x, w)
      s = Shape<start = 1, end = 2>(h)
      q = {condition}
      z = If(q) <then_branch = t () => (u) {{ u = {taken} }}, else_branch = e () => (v) {{ v = Identity(h) }}>
      {tail}
    }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.float32(RNG.standard_normal((4, 3))), "w"))
    return model


SUMMED = "r = Add(z, b) a = Tanh(r) f = Flatten(a) y = ReduceMean<axes = [1], keepdims = 1>(f)"


def test_a_rank_that_a_size_of_one_changes_is_kept_to() -> None:
    """As TorchScript exports squeeze(1): a bias after it has its gradient summed over one axis less."""
    torch = pytest.importorskip("torch")
    model = behind("Equal(s, k)", SUMMED)
    built = build(model)
    told = [caution.text for caution in built.training.cautions if caution.subject == "z"]
    assert len(told) == 1 and re.findall(r"\d", told[0])[:3] == ["2", "1", "3"] and "`dims`" in told[0]
    stored = {tensor.name: np.array(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    for middle, training in ((2, built.model), (5, built.model), (1, build(model, Options(dims={"c": 1})).model)):
        x, label = np.float32(RNG.standard_normal((3, middle, 4))), np.float32(RNG.standard_normal((3, 1)))
        w, b = (torch.tensor(stored[name], requires_grad=True) for name in ("w", "b"))
        y = torch.tanh((torch.tensor(x) @ w).squeeze(1) + b).flatten(1).mean(1, keepdim=True)
        torch.mean((y - torch.tensor(label)) ** 2).backward()
        got = Executor(training, fallback=False)({"x": x, "label": label})
        np.testing.assert_allclose(got["b_grad"], b.grad.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got["w_grad"], w.grad.numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(Exception, match="z/rank"):
        Executor(built.model, fallback=False)(
            {"x": np.ones((3, 1, 4), np.float32), "label": np.ones((3, 1), np.float32)}
        )


def test_ranks_of_several_sizes_are_told() -> None:
    """Of more than twelve rows the mean is taken."""
    tail, mean = SUMMED.replace("Tanh(r)", "Softmax<axis = -1>(r)"), "ReduceMean<axes = [1], keepdims = 0>(h)"
    model = behind("Greater(s, dozen)", tail, mean)
    with pytest.raises(UnsupportedError, match=r"; 'r' has 2 axes if .*16.*, and 3 axes if .*\[2, 8, 4\]"):
        build(model)


def test_without_a_run_it_is_refused() -> None:
    with pytest.raises(UsageError, match="rank"):
        build(squeezed(), Options(infer_by_run=False))


def test_sound_has_one_long_axis() -> None:
    """A kernel of 200 samples runs on no symbol of 64; an input of few numbers may be longer."""
    text = """<ir_version: 8, opset_import: ["": 13]>
    g (float[n, samples] x, float[1, 1, 200] w) => (float y) <int64[1] one = {1}, int64[1] i = {2}, int64[1] k = {1}> {
      u = Unsqueeze(x, one)
      c = Conv(u, w)
      s = Shape(c)
      d = Gather(s, i)
      e = Equal(d, k)
      q = Squeeze(e)
      h = If(q) <then_branch = a () => (float t) { t = Squeeze(c) },
        else_branch = b () => (float v) { v = Identity(c) }>
      y = ReduceMean<axes = [2], keepdims = 0>(h)
    }"""
    model = with_outputs_of_any_rank(onnx.parser.parse_model(text))
    kernel = np.float32(RNG.standard_normal((1, 1, 200)))
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(kernel, "w"))
    built = build(model)
    assert "shapes" in [caution.subject for caution in built.training.cautions]


def test_elements_that_no_operator_has_a_shape_of_are_no_internal_error() -> None:
    """As a file may claim of what an operator makes that nobody knows: its rank is taken from what is stored."""
    text = """<ir_version: 10, opset_import: ["": 22, "their": 1]> g (float[3] x) => (float[3] y) {
        a = their.Thing(x) b = ReduceSum<keepdims = 0>(x) y = Add(a, b)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.elem_type = 27  # a float of six bits
    with raises(UnsupportedError, "refused", "Add_y") as error:
        build(model)
    assert not isinstance(error.value, InternalError)


def test_a_stored_shape_stays_one_when_types_are_inferred_again() -> None:
    """As after an operator has given way to its definition: a run is still asked about what onnx does not know."""
    text = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
    g (int64[2, 3] ids, float[16] w) => (float[2, 3, 16] y) <float[8, 1] scales = {1, 2, 3, 4, 5, 6, 7, 8}> {
      e = com.microsoft.GatherBlockQuantized<block_size = 16, gather_axis = 0, quantize_axis = 1>(table, ids, scales)
      h = Mul(e, w)
      y = com.microsoft.QuickGelu(h)
    }"""
    model = onnx.parser.parse_model(text)
    table = helper.make_tensor(
        "table", TensorProto.UINT4, [8, 16], RNG.integers(0, 256, 64, np.uint8).tobytes(), raw=True
    )
    model.graph.initializer.append(table)
    model.graph.value_info.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, [5, 3, 16]))
    built = build(model, Options(grad_of_input=("w",)))
    (text,) = [caution.text for caution in built.training.cautions if caution.subject == "e"]
    assert "float[5, 3, 16]" in text
