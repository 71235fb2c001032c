"""Ranks and types that follow from an operator alone, where onnx infers none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import shape_of
from tests.cli_harness import Shell

RNG = np.random.default_rng(3)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, capsys)


def floats(*shape: int) -> np.ndarray:
    return np.float32(RNG.standard_normal(shape))


CASES = {
    "STFT": (
        "float[n, s, 1] x, int64 step, int64 length",
        "r = STFT<onesided = 1>(x, step, , length)",
        {"x": floats(2, 16, 1), "step": np.array(4), "length": np.array(8)},
    ),
    "AffineGrid": (
        "float[n, 2, 3] x, int64[k] size",
        "r = AffineGrid(x, size)",
        {"x": floats(2, 2, 3), "size": np.array([2, 3, 4, 5])},
    ),
    "CenterCropPad": (
        "float[n, m] x, int64[k] size",
        "r = CenterCropPad(x, size)",
        {"x": floats(4, 6), "size": np.array([5, 3])},
    ),
    "Conv": (
        "float[n, c, l] x, float[o, d, k] w",
        "r = Conv<dilations = [2], strides = [3], pads = [1, 1]>(x, w)",
        {"x": floats(2, 4, 9), "w": floats(3, 4, 3)},
    ),
    "ConvTranspose": (
        "float[n, c, l] x, float[c, o, k] w",
        "r = ConvTranspose(x, w)",
        {"x": floats(2, 3, 5), "w": floats(3, 2, 4)},
    ),
    "Attention": (
        "float[n, s, d] x, float[n, s, d] k",
        "a, p, r = Attention<q_num_heads = 2, kv_num_heads = 2>(k, k, x)",
        {"x": floats(2, 3, 4), "k": floats(2, 3, 4)},
    ),
    "LabelEncoder": (
        "float[n, m] x, string[k] words",
        'i = ai.onnx.ml.LabelEncoder<classes_strings = ["a", "b"], default_int64 = 1>(words) r = Gather(x, i)',
        {"x": floats(2, 3), "words": np.array(["b", "b", "a"])},
    ),
    "Squeeze": (
        "float[n, m, l] x, int64[1] axes",
        "r = Squeeze(x, axes)",
        {"x": floats(4, 1, 3), "axes": np.array([1])},
    ),
    "Unsqueeze": (
        "float[n, m] x, int64[2] axes",
        "r = Unsqueeze(x, axes)",
        {"x": floats(4, 3), "axes": np.array([1, 0])},
    ),
    "ReduceSum": (
        "float[n, m] x, int64[k] axes",
        "r = ReduceSum<keepdims = 1>(x, axes)",
        {"x": floats(4, 3), "axes": np.array([0])},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_follows_from_the_operator(case: str, shell: Shell) -> None:
    """The gradient of the mean needs the rank of what is averaged; all of these operators are linear in x."""
    inputs, node, feeds = CASES[case]
    head = '<ir_version: 10, opset_import: ["": 23, "ai.onnx.ml": 1]>'
    tail = "m = ReduceMean<keepdims = 0>(r, last) y = Add(m, b)"
    text = f"{head} g ({inputs}, float[1] b) => (float y) <int64[1] last = {{-1}}> {{ {node} {tail} }}"
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    file, derived = shell.folder / "model.onnx", shell.folder / "derived.onnx"
    onnx.save(model, file)
    wrt = ("--wrt", "x", "--wrt", "b")
    result = shell("derive", file, *wrt, "--no-infer-by-run", "--no-verify", "-o", derived)
    assert result.code == 0, result.err
    forward = onnxruntime.InferenceSession(file)
    here = {**feeds, "b": floats(1)}
    y = forward.run(None, here)[0]
    g = np.float32(RNG.standard_normal(y.shape))
    names = ["x_grad", "b_grad"]
    x_grad, b_grad = onnxruntime.InferenceSession(derived).run(names, {**here, "y_grad": g})
    direction = floats(*here["x"].shape)
    change = forward.run(None, {**here, "x": here["x"] + direction})[0] - y
    np.testing.assert_allclose(np.sum(x_grad * direction), np.sum(g * change), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(b_grad, [g.sum()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 10, 11])
@pytest.mark.parametrize(("axis", "shape"), [("<axis = 0>", ("?", 4)), ("<axis = -1>", (3, "?")), ("", ("?",))])
def test_compress_keeps_an_unknown_number(opset: int, axis: str, shape: tuple[int | str, ...]) -> None:
    graph = Graph(
        parser.parse_model(f"""
        <ir_version: 5, opset_import: ["": {opset}]>
        net (float[3, 4] x, bool[2] c) => (float[] y) {{ z = Compress{axis}(x, c) y = Relu(z) }}""")
    )
    infer_types(graph)
    found = shape_of(graph.types["z"])
    assert found is not None
    assert tuple(size if isinstance(size, int) else "?" for size in found) == shape


@pytest.mark.parametrize("is_observed", [False, True])
def test_a_shape_that_a_run_has_shown_is_not_assumed(is_observed: bool) -> None:
    """Only shapes that come from the model's declarations alone are reported as assumed."""
    graph = Graph(parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[n, m] x, int64[k] shape) => (float[n, 2] z) { y = Reshape(x, shape)  z = Relu(y) }"""))  # fmt: skip
    declared = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    graph.hints = {"y": declared}
    graph.observed = {"y": declared.type} if is_observed else {}
    infer_types(graph)
    assert len(shape_of(graph.types["y"]) or ()) == 2
    assert ("y" in graph.assumed) == (not is_observed) and "y" in graph.declared_shapes
