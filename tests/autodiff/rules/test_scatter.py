"""Of several updates of one place the one that stays has the gradient, by the command and against differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad_cli.cli import run

SIZE = 6
FORMS = {
    "ScatterElements": ("x, i, u", [7], "", [SIZE], [7]),
    "ScatterElements along axis 1": ("x, i, u", [2, 7], "<axis = 1>", [2, SIZE], [2, 7]),
    "rows": ("x, i, u", [7, 1], "", [SIZE, 3], [7, 3]),
    "single numbers": ("x, i, u", [7, 2], "", [SIZE, 4], [7]),
}
"""Operands, and the shapes of the indices, of the data and of the updates."""


def model(form: str, indices: np.ndarray, stored: bool, folder: Path, known: bool = True) -> Path:
    operands, _, attributes, data, updates = FORMS[form]
    op = "ScatterElements" if form.startswith("Scatter") else "ScatterND"
    sizes = {"i": indices.shape, "x": data, "u": updates, "y": data}
    shown = {
        name: list(size) if known else [f"{name}{axis}" for axis in range(len(size))] for name, size in sizes.items()
    }
    shown = {name: ", ".join(map(str, size)) for name, size in shown.items()}
    fed = "" if stored else f"int64[{shown['i']}] i, "
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g ({fed}float[{shown["x"]}] x, float[{shown["u"]}] u) => (float[{shown["y"]}] y)
    {{ y = {op} {attributes} ({operands}) }}
    """
    made = onnx.parser.parse_model(text)
    if stored:
        made.graph.initializer.append(onnx.numpy_helper.from_array(indices, "i"))
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("known", [True, False], ids=["sizes", "symbols"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "fed"])
@pytest.mark.parametrize("form", FORMS)
def test_the_update_that_stays_has_the_gradient(form: str, stored: bool, known: bool, tmp_path: Path) -> None:
    _, shape, _, data, updates = FORMS[form]
    rng = np.random.default_rng(3)
    indices = rng.integers(-2, 3, shape)  # of which several name one place, from the front or from the end
    made = tmp_path / "made.onnx"
    source = model(form, indices, stored, tmp_path, known)
    assert run(["derive", str(source), "--kind", "vjp", "--no-verify", "-o", str(made)]) == 0
    x, u, g = (np.float32(rng.standard_normal(size)) for size in (data, updates, data))
    given = {} if stored else {"i": indices}
    got = onnxruntime.InferenceSession(made).run(["x_grad", "u_grad"], {**given, "x": x, "u": u, "y_grad": g})
    forward = onnxruntime.InferenceSession(source)
    for name, array, gradient in (("x", x, got[0]), ("u", u, got[1])):
        for position in np.ndindex(array.shape):  # linear, so that a difference is a derivative
            moved = array.copy()
            moved[position] += 1
            pair = [forward.run(None, {**given, "x": x, "u": u, name: each})[0] for each in (moved, array)]
            difference = np.sum((pair[0] - pair[1]) * g)
            np.testing.assert_allclose(gradient[position], difference, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_many_updates_of_few_places_with_several_threads(tmp_path: Path) -> None:
    """ScatterElements keeps the last one at any size, with any number of threads."""
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (int64[N, 8] i, float[16, 8] x, float[N, 8] u) => (float[16, 8] y) { y = ScatterElements <axis = 0> (x, i, u) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    made = tmp_path / "made.onnx"
    assert run(["derive", str(tmp_path / "model.onnx"), "--wrt", "u", "--no-verify", "-o", str(made)]) == 0
    rng = np.random.default_rng(4)
    i, g = rng.integers(0, 16, (200_000, 8)), np.float32(rng.standard_normal((16, 8)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    x, u = np.zeros((16, 8), np.float32), np.float32(np.arange(i.size).reshape(i.shape))
    y = onnxruntime.InferenceSession(tmp_path / "model.onnx", options).run(None, {"i": i, "x": x, "u": u})[0]
    wanted = np.zeros_like(u)
    stayed = np.int64(y).ravel()  # each update is its own number
    wanted.reshape(-1)[stayed] = g.ravel()
    session = onnxruntime.InferenceSession(made, options)
    for _ in range(5):
        got = session.run(["u_grad"], {name: each for name, each in {"i": i, "x": x, "u": u, "y_grad": g}.items()
                                       if name in {value.name for value in session.get_inputs()}})[0]  # fmt: skip
        np.testing.assert_array_equal(got, wanted)


def test_repeated_indices_of_a_scatter_that_has_no_order_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[N] x) => (float[4] y) <float[3] w = {1, 2, 3}, float[4] z = {0, 0, 0, 0}, int64[3, 1] i = {1, 2, 1}>
    { a = ScatterND (z, i, w) s = ReduceSum (x) y = Mul (a, s) }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    made = tmp_path / "made.onnx"
    assert run(["build", str(tmp_path / "model.onnx"), "--loss", "mse", "--label", "t", "-o", str(made)]) == 0
    assert "the gradient is that of the last one" in Path(f"{made}.report.md").read_text()
    assert "proved" in capsys.readouterr().out
