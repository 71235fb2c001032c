"""`onnxgrad expand`: training information becomes models of plain operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.jobs.expand import run_expand
from tests.cli_harness import WEIGHT, Shell, save, save_external
from tests.standard.test_training_info import run, two_blocks


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def test_optimizers_of_an_old_opset_and_in_bodies_are_written_out(tmp_path: Path) -> None:
    text = """
        <ir_version: 8, opset_import: ["": OPSET, "ai.onnx.preview.training": 1]>
        step (float r, int64 t, bool c, float[2] x, float[2] g, float[2] v) => (float[2] y)
        { y = If (c) <
            then_branch = a () => (float[2] p) {
              p, q = ai.onnx.preview.training.Momentum
                <alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0> (r, t, x, g, v) },
            else_branch = b () => (float[2] i) { i = Identity(x) } > }
    """
    feeds = {"r": 0.5, "t": 1, "c": True, "x": [1.0, 2.0], "g": [1.0, -1.0], "v": [0.0, 2.0]}
    for opset in (11, 17):
        source = save(text.replace("OPSET", str(opset)), tmp_path / f"{opset}.onnx")
        (piece,) = run_expand(source)
        result = run(onnx.load(piece.path), {name: np.array(value) for name, value in feeds.items()})
        np.testing.assert_allclose(result["y"], [0.5, 2.0])


def test_other_operators_that_have_a_definition_stay(tmp_path: Path) -> None:
    source = save("""
        <ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
        step (float r, int64 t, float[2, 3] x, int64[2] c, float[2, 3] g, float[2, 3] v)
            => (float loss, float[2, 3] p, float[2, 3] q)
        {
          loss = SoftmaxCrossEntropyLoss(x, c)
          p, q = ai.onnx.preview.training.Momentum
            <alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0> (r, t, x, g, v)
        }
    """, tmp_path / "m.onnx")  # fmt: skip
    (piece,) = run_expand(source)
    found = onnx.load(piece.path).graph.node
    assert "SoftmaxCrossEntropyLoss" in [node.op_type for node in found] and not any(node.domain for node in found)


def test_functions_of_an_old_opset_are_written_out_before_it_is_raised(tmp_path: Path) -> None:
    """Softmax of opset 11 takes all axes from the first one on together."""
    source = save("""
        <ir_version: 8, opset_import: ["": 11, "my": 1, "ai.onnx.preview.training": 1]>
        step (float r, int64 t, float[2, 2] x, float[2, 2] g, float[2, 2] v) => (float[2, 2] p, float[2, 2] q)
        {
          s = my.soft(x)
          p, q = ai.onnx.preview.training.Momentum
            <alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0> (r, t, s, g, v)
        }
        <opset_import: ["": 11], domain: "my"> soft (x) => (y) { h = Neg(x) y = Softmax<axis = 0>(h) }
    """, tmp_path / "m.onnx")  # fmt: skip
    (piece,) = run_expand(source)
    x, g, v = np.random.default_rng(0).standard_normal((3, 2, 2))
    result = run(onnx.load(piece.path), {"r": np.array(0.1), "t": np.array(1), "x": x, "g": g, "v": v})
    soft = np.exp(-x) / np.exp(-x).sum()
    np.testing.assert_allclose(result["q"], 0.5 * v + g, rtol=1e-6)
    np.testing.assert_allclose(result["p"], soft - 0.1 * (0.5 * v + g), rtol=1e-5)


def test_expand_as_a_command(shell: Shell) -> None:
    onnx.save(two_blocks(), "blocks.onnx")
    assert shell("expand", "blocks.onnx", "-o", "-").code == 2
    (shell.folder / "plain.init0.onnx").write_bytes(b"mine")
    before = shell.files()
    result = shell("expand", "blocks.onnx", "-o", "plain.onnx")
    assert result.code == 2
    assert "--force" in result.err
    assert shell.files() == before
    assert shell("expand", "blocks.onnx", "-o", "blocks.onnx").code == 2
    result = shell("expand", "blocks.onnx", "-o", "plain.onnx", "--force")
    assert result.code == 0
    assert "a becomes a_new" in result.out
    assert "feed x, t, r" in result.out
    result = shell("expand", "plain.onnx", "-o", "again.onnx")
    assert result.code == 0
    assert "nothing to " in result.err
    assert onnx.load("again.onnx").graph == onnx.load("plain.onnx").graph


def test_external_weights_stay_external(shell: Shell) -> None:
    save_external(shell.folder / "model.onnx", location="w.bin")
    (shell.folder / "w.bin").write_bytes(WEIGHT.tobytes())
    result = shell("build", "model.onnx", "--training-info", "--optimizer", "adam", "-o", "described.onnx")
    assert result.code == 0, result.err
    (shell.folder / "elsewhere").mkdir()
    assert shell("expand", "described.onnx", "-o", "elsewhere/plain.onnx").code == 0
    step = onnx.load("elsewhere/plain.step0.onnx", load_external_data=False)
    assert {t.name for t in step.graph.initializer if t.data_location == TensorProto.EXTERNAL} == {"w"}
    session = ort.InferenceSession("elsewhere/plain.step0.onnx")
    x, y = np.ones((2, 8), np.float32), np.ones((2, 3), np.float32)
    (new,) = session.run(["w_next"], {"x": x, "label": y, "learning_rate": np.array(0.0, np.float32)})
    np.testing.assert_array_equal(new, WEIGHT.reshape(8, 3))


def test_an_optimizer_without_a_definition_is_refused_by_name(tmp_path: Path) -> None:
    source = save("""
        <ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
        step (float r, int64 t, float[2] x, float[2] g) => (float[2] p)
        { p = ai.onnx.preview.training.Lion (r, t, x, g) }
    """, tmp_path / "m.onnx")  # fmt: skip
    with pytest.raises(OnnxgradError) as caught:
        run_expand(source)
    assert "Lion" in str(caught.value) and not (tmp_path / "m.expanded.onnx").exists()


def test_the_pieces_are_described(shell: Shell) -> None:
    onnx.save(two_blocks(), "blocks.onnx")
    said: list[tuple[str, int]] = []
    pieces = run_expand("blocks.onnx", "plain.onnx", tell=lambda *each: said.append(each))
    assert (pieces[0].kind, pieces[0].index) == ("model", None)
    assert [piece.path for piece in pieces] == [str(Path(piece.path)) for piece in pieces if Path(piece.path).exists()]
    for piece in pieces:
        model = onnx.load(piece.path)
        assert piece.outputs == [value.name for value in model.graph.output]
        stored = {tensor.name for tensor in model.graph.initializer}
        assert piece.inputs == [value.name for value in model.graph.input if value.name not in stored]
        assert set(piece.bindings.values()) <= {*piece.outputs, *stored} and (piece.index is None) == (
            not piece.bindings
        )
    assert {level for _, level in said} == {1}, "there is something to expand"
    run_expand("plain.onnx", "again.onnx", tell=lambda *each: said.append(each))
    assert [level for _, level in said].count(0) == 1
