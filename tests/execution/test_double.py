"""The loss in float64, also where onnxruntime has no float64 kernel: compared with PyTorch's."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.execution import double
from onnxgrad_cli.execution.double import Deferred, DoubleExecutor
from onnxgrad_cli.execution.limits import at_once


def model_of(node: onnx.NodeProto, x: np.ndarray, *weights: np.ndarray) -> onnx.ModelProto:
    """A float32 model of one node."""
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in zip("wb", weights, strict=False)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_a_weight_that_is_computed_has_the_shape_that_it_is_given() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]> g (float[2, 3, 4, 5] x, float[6] a) => (float[2, 2, 4, 5] y)
    <int64[4] s = {2, 3, 1, 1}> { t = Abs(a) w = Reshape(t, s) y = Conv<kernel_shape = [1, 1]>(x, w) }
    """
    run, x, a = DoubleExecutor(onnx.parser.parse_model(text)), np.random.randn(2, 3, 4, 5), np.random.randn(6)
    expected = np.einsum("nchw,mc->nmhw", x, np.abs(a).reshape(2, 3))
    np.testing.assert_allclose(run({"x": x, "a": a})["y"], expected, rtol=1e-12, atol=1e-12)
    assert "onnx.reference" not in run.name


def test_operators_beside_one_without_a_kernel_stay_on_onnxruntime() -> None:
    """onnxruntime expands both operators into functions, and its error names Erf, which is part of Gelu.

    Keep it before other tests of Gelu: the executor remembers operators without a kernel.
    """
    head = '<ir_version: 10, opset_import: ["": 20]> g (float[n] x) => (float[n] y) <float low = {-0.1}>'
    x = np.linspace(-2, 2, 9)
    erf = torch.special.erf(torch.tensor(x / np.sqrt(2))).numpy()
    both = DoubleExecutor(onnx.parser.parse_model(f"{head} {{ c = Gelu(x) y = Clip(c, low) }}"))
    np.testing.assert_allclose(both({"x": x})["y"], np.maximum(x * (1 + erf) / 2, float(np.float32(-0.1))), rtol=1e-12)
    assert "onnx.reference" in both.name
    clip = DoubleExecutor(onnx.parser.parse_model(f"{head} {{ y = Clip(x, low) }}"))
    np.testing.assert_array_equal(clip({"x": x})["y"], np.maximum(x, float(np.float32(-0.1))))
    assert "onnx.reference" not in clip.name


def test_a_refusal_that_names_no_operator_leaves_the_model_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented("of an unheard kind")

    monkeypatch.setattr("onnxgrad_cli.execution.session.start_session", refuse)
    x = np.linspace(-2, 2, 9)
    run = DoubleExecutor(model_of(helper.make_node("Tanh", ["x"], ["y"]), x))
    np.testing.assert_allclose(run({"x": x})["y"], np.tanh(x), rtol=1e-12)
    assert run.name == "onnx.reference"


@pytest.mark.parametrize(
    ("op_type", "function"),
    [
        ("Erf", torch.special.erf),
        ("Gelu", torch.nn.functional.gelu),
        ("LeakyRelu", lambda x: torch.nn.functional.leaky_relu(x, 0.01)),
        ("Softplus", torch.nn.functional.softplus),
        ("Tanh", torch.tanh),
    ],
)
def test_operators_without_a_float64_kernel_run_on_the_reference(op_type: str, function: object) -> None:
    x = np.random.default_rng(0).normal(size=(5, 7))
    run = DoubleExecutor(model_of(helper.make_node(op_type, ["x"], ["y"]), x))
    expected = function(torch.tensor(x)).numpy()  # type: ignore[operator]
    np.testing.assert_allclose(run({"x": x})["y"], expected, rtol=1e-7 if op_type == "LeakyRelu" else 1e-12, atol=1e-12)
    assert ("onnx.reference" in run.name) == (op_type != "Tanh")


def test_pieces_on_both_executors_make_one_network() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(7, 7)).astype(np.float32)
    graph = onnx.parser.parse_graph(
        "g (float[N, 7] x) => (float[N, 7] y)"
        "{ a = MatMul(x, w) e = Erf(a) t = Tanh(e) s = Elu(t) u = Add(s, a) y = Exp(u) }"
    )
    graph.initializer.append(numpy_helper.from_array(w, "w"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    run = DoubleExecutor(model)
    x = rng.normal(size=(3, 7)) / 3
    a = torch.tensor(x) @ torch.tensor(w, dtype=torch.float64)
    expected = torch.exp(torch.nn.functional.elu(torch.tanh(torch.special.erf(a))) + a).numpy()
    for _ in range(2):
        np.testing.assert_allclose(run({"x": x})["y"], expected, rtol=1e-12)


def test_two_runs_at_the_same_time_are_those_one_after_the_other() -> None:
    """Cut in pieces, of which onnx.reference runs some."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]> g (float[n, 4] x) => (float[1, 1] y) {
        a = HardSigmoid(x) b = MatMul(a, a) c = HardSigmoid(b) y = ReduceSum(c) }""")
    rng = np.random.default_rng(0)
    points = [{"x": rng.standard_normal((4, 4))} for _ in range(8)]
    alone, beside = DoubleExecutor(model), DoubleExecutor(model, beside=True)
    expected = [alone(point)["y"] for point in points]
    for _ in range(5):
        assert [found["y"] for found in at_once(beside, points)] == expected
    assert "onnx.reference" in beside.name and "onnxruntime" in beside.name


def chain(count: int, rng: np.random.Generator) -> onnx.ModelProto:
    """A chain of products, of which one weight is read twice."""
    names = [f"w{i}" for i in range(count)]
    steps = "".join(f"a{i} = MatMul(h{i}, w{i}) h{i + 1} = Erf(a{i}) " for i in range(count))
    inputs = ", ".join(f"float[8, 8] {name}" for name in names)
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[2, 8] h0, {inputs}) => (float[2, 8] y) {{ {steps} y = MatMul(h{count}, w0) }}""")
    values = [rng.standard_normal((8, 8)).astype(np.float32) for _ in names]
    model.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in zip(names, values, strict=True))
    return model


@pytest.mark.parametrize("piece", [1, 1200, 10**9])
def test_pieces_compute_what_the_whole_does(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    rng = np.random.default_rng(0)
    model, x = chain(4, rng), rng.standard_normal((2, 8))
    expected = DoubleExecutor(model)({"h0": x})["y"]
    monkeypatch.setattr(double, "PIECE", piece)
    monkeypatch.setattr(double, "SHARED", 1)
    run = DoubleExecutor(model)
    for _ in range(2):
        np.testing.assert_allclose(run({"h0": x})["y"], expected, rtol=1e-14)
    other = rng.standard_normal((8, 8))
    fed = run({"h0": x, "w1": Deferred.copy(other.astype(np.float32))})["y"]
    np.testing.assert_allclose(fed, run({"h0": x, "w1": other.astype(np.float32).astype(np.float64)})["y"], rtol=1e-14)
    np.testing.assert_allclose(run({"h0": x})["y"], expected, rtol=1e-14)


def test_all_pieces_run_where_a_kernel_turns_out_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece is cut at Asinh, which no other test uses, and the later pieces stay."""
    rng = np.random.default_rng(0)
    model, h = chain(4, rng), rng.standard_normal((2, 8))
    x, weights = h, [numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer]
    for node in model.graph.node:
        if node.op_type == "Erf":
            node.op_type = "Asinh"
    for w in weights:
        h = np.arcsinh(h @ w)
    monkeypatch.setattr(double, "PIECE", 1)
    monkeypatch.setattr(double, "SHARED", 1)
    np.testing.assert_allclose(DoubleExecutor(model)({"h0": x})["y"], h @ weights[0], rtol=1e-12)
