"""`onnxgrad tune`: the sizes at which forms are measured, and what a build takes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli_harness import MLP, Shell, save


@pytest.mark.parametrize(("words", "size"), [((), 8), (("--size", "batch=3"), 3)])
def test_forms_are_measured_at_the_sizes_that_are_given(
    words: tuple[str, ...],
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save(MLP, Path("mlp.onnx"))
    result = Shell(tmp_path, capsys)("tune", "mlp.onnx", "--loss", "mse", "--repeat", "1", *words)
    assert result.code == 0 and f"batch = {size}" in result.err, result.err


def test_each_form_of_a_gradient_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 2, 6, 6] x) => (float[n, 3, 4, 4] y) { y = Conv(x, w) }""")
    weight = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, "conv.onnx")
    result = shell("tune", "conv.onnx", "--loss", "mse", "--repeat", "1", "--threads", "1", "--json")
    assert result.code == 0, result.err
    (measured,) = result.json["measured"]
    assert len(measured["milliseconds"]) > 1 and measured["best"] in measured["milliseconds"]
    assert shell("build", "conv.onnx", "--loss", "mse", "--tuned", "conv.tuned.toml", "--verify").code == 0
