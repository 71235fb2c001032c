"""The graph of initial values in training information."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.standard.training_info import check_training_info
from tests.cli_harness import MLP, Shell, save
from tests.standard.test_training_info import begun, packed


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def weighted(text: str, **shapes: tuple[int, ...]) -> ModelProto:
    """A model of a text, with random weights of the given shapes."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    rng = np.random.default_rng(0)
    model.graph.initializer.extend(
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in shapes.items()
    )
    return model


FANS = {
    "MatMul": ("g (float[n, 40] x) => (float[n, 30] z) { z = MatMul(x, w) }", (40, 30), (40, 30)),
    "MatMul-left": ("g (float[40, n] x) => (float[30, n] z) { z = MatMul(w, x) }", (30, 40), (40, 30)),
    "MatMul-transposed": (
        "g (float[n, 40] x) => (float[n, 30] z) { v = Transpose(w) z = MatMul(x, v) }", (30, 40), (40, 30)),
    "Gemm": ("g (float[n, 40] x) => (float[n, 30] z) { z = Gemm(x, w) }", (40, 30), (40, 30)),
    "Gemm-transB": ("g (float[n, 40] x) => (float[n, 30] z) { z = Gemm <transB = 1> (x, w) }", (30, 40), (40, 30)),
    "Gemm-transA": ("g (float[40, n] x) => (float[30, n] z) { z = Gemm <transA = 1> (w, x) }", (40, 30), (40, 30)),
    "Conv": ("g (float[n, 8, 9, 9] x) => (float[n, 12, a, b] z) { z = Conv(x, w) }", (12, 8, 3, 5), (120, 180)),
    "Conv-group": (
        "g (float[n, 8, 9, 9] x) => (float[n, 40, a, b] z) { z = Conv <group = 4> (x, w) }", (40, 2, 3, 5), (30, 150)),
    "ConvTranspose": (
        "g (float[n, 8, 9, 9] x) => (float[n, 12, a, b] z) { z = ConvTranspose(x, w) }", (8, 12, 3, 5), (120, 180)),
    "Gather": ("g (int64[n] x) => (float[n, 30] z) { z = Gather(w, x) }", (40, 30), (30, 30)),
    "MatMul-row": ("g (float[900, n] x) => (float[n] z) { z = MatMul(w, x) }", (900,), (900, 1)),
    "MatMul-column": ("g (float[n, 900] x) => (float[n] z) { z = MatMul(x, w) }", (900,), (900, 1)),
    "Einsum": (
        'g (float[n, 40] x) => (float[n, 5, 6] z) { z = Einsum <equation = "ni,ihd->nhd"> (x, w) }',
        (40, 5, 6), (40, 30)),
    "RNN": ("g (float[t, n, 40] x) => (float[t, 1, n, 30] z) { z = RNN <hidden_size = 30> (x, w, r) }",
            (1, 30, 40), (40, 30)),
    "LSTM": ("g (float[t, n, 40] x) => (float[t, 1, n, 30] z) { z = LSTM <hidden_size = 30> (x, w, r) }",
             (1, 120, 40), (40, 30)),
    "table of positions": ("g (float[n, 50, 30] x) => (float[n, 50, 30] z) { z = Add(x, w) }", (50, 30), (30, 30)),
}  # fmt: skip
"""Operator -> a model that reads `w`, its shape, and its fan in and fan out, counted by hand."""


@pytest.mark.parametrize("name", FANS)
@pytest.mark.parametrize("how", ["xavier", "he", "normal"])
@pytest.mark.thinned(4)
def test_fans(name: str, how: str) -> None:
    text, shape, (fan_in, fan_out) = FANS[name]
    others = {"r": (1, shape[1], 30)} if " r)" in text else {}
    model = weighted(text, w=shape, **others)
    values, _ = begun(model, init=how, seed=1)
    w = values["w"].astype(np.float64)
    assert w.shape == shape
    spread = {"xavier": np.sqrt(2 / (fan_in + fan_out)), "he": np.sqrt(2 / fan_in), "normal": 0.02}[how]
    np.testing.assert_allclose(w.std(), spread, rtol=0.1)
    assert abs(w.mean()) < 4 * spread / np.sqrt(w.size)
    if how == "xavier":
        assert np.abs(w).max() <= np.sqrt(6 / (fan_in + fan_out))
        assert np.abs(w).max() > 0.95 * np.sqrt(6 / (fan_in + fan_out))


CONSTANTS: dict[str, tuple[str, tuple[int, ...], float]] = {
    "LayerNormalization": ("s = LayerNormalization(k, w, b)", (4,), 1.0),
    "bias of LayerNormalization": ("s = LayerNormalization(k, b, w)", (4,), 0.0),
    "Add": ("s = Add(k, w)", (4,), 0.0),
    "Add of [1, 1, 4]": ("s = Add(k, w)", (1, 1, 4), 0.0),
    "Mul": ("s = Mul(k, w)", (1, 1, 4), 1.0),
    "PRelu": ("s = PRelu(k, w)", (4,), 0.25),
    "bias of Gemm": ("s = Gemm(x, m, w)", (4,), 0.0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_scales_biases_and_slopes(name: str) -> None:
    node, shape, expected = CONSTANTS[name]
    text = f"g (float[n, 5] x) => (float[a, b, 4] z) {{ k = MatMul(x, m) {node} i = Shape(s) z = Expand(s, i) }}"
    used = {"m": (5, 4), "w": shape, "b": (4,)}
    model = weighted(text, **{name: dims for name, dims in used.items() if f" {name})" in text or f" {name}," in text})
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    values, _ = begun(model, init="he", losses=(LossSpec("identity"),))
    assert (values["w"] == expected).all()


def test_seeds() -> None:
    model = parser.parse_model(MLP)
    first, _ = begun(model, init="he", seed=5)
    again, _ = begun(model, init="he", seed=5)
    other, _ = begun(model, init="he", seed=6)
    for name in ("w1", "w2"):
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])
    assert not np.array_equal(first["w1"].ravel()[:6], first["w2"].ravel())
    square = "g (float[n, 4] x) => (float[n, 4] z) { h = MatMul(x, w) z = MatMul(h, v) }"
    alike, _ = begun(weighted(square, w=(4, 4), v=(4, 4)), init="xavier", seed=0)
    assert np.abs(alike["w"] - alike["v"])[0].min() > 1e-3  # seeds 0 and 1, or 1 and 2, begin alike
    _, without = begun(model, init="he")
    draws = [node for node in without.training_info[0].initialization.node if node.op_type == "RandomNormal"]
    assert len(draws) == 2
    assert not any(attribute.name == "seed" for node in draws for attribute in node.attribute)


def test_keep_resets_the_state_alone() -> None:
    values, model = begun(parser.parse_model(MLP), optimizer="adagrad",
                          optimizer_options={"initial_accumulator_value": 0.25})  # fmt: skip
    assert list(values) == ["step", "w1_v", "b1_v", "w2_v"]
    assert values["step"] == 0
    assert all((values[name] == 0.25).all() for name in list(values)[1:])
    assert values["w1_v"].shape == (4, 3)
    assert [pair.key for pair in model.training_info[0].update_binding][:3] == ["w1", "b1", "w2"]


def test_weights_of_16_bits_are_drawn_in_float32() -> None:
    weight = numpy_helper.from_array(np.zeros((64, 64), np.float16), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 64]) for name in "xz")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["z"])], "half", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    values, _ = begun(model, init="he", seed=0)
    assert values["w"].dtype == np.float16
    np.testing.assert_allclose(values["w"].astype(np.float64).std(), np.sqrt(2 / 64), rtol=0.05)


def test_init_without_training_info_is_refused(shell: Shell) -> None:
    save(MLP, shell.folder / "model.onnx")
    result = shell("build", "model.onnx", "--init", "he")
    assert result.code == 2
    assert "--training-info" in result.err


def test_an_initialization_alone_becomes_no_step(shell: Shell) -> None:
    model = parser.parse_model(MLP)
    info = model.training_info.add()
    info.initialization.CopyFrom(
        parser.parse_graph("i () => (float[3] b) { b = Constant <value_floats=[1.0,2.0,3.0]>() }")
    )
    info.initialization_binding.add(key="b1", value="b")
    onnx.save(model, "begun.onnx")
    pieces = shell("expand", "begun.onnx", "-o", "plain.onnx", "--json").json
    assert [piece["path"] for piece in pieces] == ["plain.onnx", "plain.init0.onnx"]
    assert not Path("plain.step0.onnx").exists()


@pytest.mark.parametrize(
    ("key", "faults"), [("b1", ["v", "b1"]), ("w1", ["v", "w1"]), ("w2", ["v", "3", "w2", "3", "2"])]
)
def test_an_initial_value_is_of_its_variable_type(key: str, faults: list[str]) -> None:
    model = parser.parse_model(MLP)
    info = model.training_info.add()
    kind = "float" if key == "w2" else "double"
    number = int(TensorProto.FLOAT if key == "w2" else TensorProto.DOUBLE)
    text = f"i () => ({kind}[3] v) {{ c = Constant <value_floats=[1.0,2.0,3.0]>() v = Cast <to={number}> (c) }}"
    info.initialization.CopyFrom(parser.parse_graph(text))
    info.initialization_binding.add(key=key, value="v")
    with pytest.raises(OnnxgradError) as caught:
        check_training_info(model)
    (detail,) = caught.value.details
    assert re.findall(r"(?<=')\w+(?=')|\d(?=[],])", detail.partition(": ")[2]) == faults


def test_an_initialization_is_not_checked_as_a_training_model(shell: Shell) -> None:
    onnx.save(packed(parser.parse_model(MLP)), "described.onnx")
    assert shell("expand", "described.onnx", "-o", "plain.onnx").code == 0
    result = shell("check", "plain.init0.onnx")
    assert result.code == 2 and result.facts == ("wrong_type",)
