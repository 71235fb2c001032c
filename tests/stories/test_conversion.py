"""Who converts a folder of models in CI: many at once, by settings in a file, through pipes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser

from tests.cli_harness import PROGRAM, UNKNOWN_OPS, Shell, save

SETTINGS = """
label = "target"
[build]
loss = "huber"
out-dir = "built"
jobs = 2
"""


def perceptron(hidden: int) -> onnx.ModelProto:
    """4 -> hidden -> 2, with random weights."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        net (float[n, 4] x) => (float[n, 2] y) { h = Gemm(x, w, b) a = Tanh(h) y = MatMul(a, v) }""")
    random = np.random.default_rng(hidden)
    for name, shape in {"w": (4, hidden), "b": (hidden,), "v": (hidden, 2)}.items():
        values = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def by_pytorch(model: onnx.ModelProto, x: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    weights = {t.name: torch.tensor(numpy_helper.to_array(t), requires_grad=True) for t in model.graph.initializer}
    y = torch.tanh(torch.tensor(x) @ weights["w"] + weights["b"]) @ weights["v"]
    loss = torch.nn.functional.huber_loss(y, torch.tensor(target))
    loss.backward()
    return {"loss": loss.detach().numpy(), **{f"{name}_grad": w.grad.numpy() for name, w in weights.items()}}


@pytest.mark.slow
def test_four_models_one_of_them_foreign(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {f"m{hidden}": perceptron(hidden) for hidden in range(2, 5)}
    for name, model in models.items():
        onnx.save(model, f"{name}.onnx")
    save(UNKNOWN_OPS, Path("twirl.onnx"))
    Path("ci.toml").write_text(SETTINGS)
    summary = Path("summary.md")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    files = sorted(map(str, Path().glob("*.onnx")))
    done = shell("build", *files, "--config", "ci.toml")
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert done.code == 3 and "Twirl" in done.err and "::error" in done.err, "one is refused, and the code says so"
    assert "twirl.onnx" in summary.read_text() and "m4.onnx" in summary.read_text()
    assert len(list(Path("built").glob("*.train.onnx"))) == 3
    x, target = (np.random.default_rng(seed).standard_normal((5, n)).astype(np.float32) for seed, n in ((0, 4), (1, 2)))
    for name, model in models.items():
        session = onnxruntime.InferenceSession(f"built/{name}.train.onnx")
        names = [value.name for value in session.get_outputs()]
        found = dict(zip(names, session.run(names, {"x": x, "target": target}), strict=True))
        for key, wanted in by_pytorch(model, x, target).items():
            np.testing.assert_allclose(found[key], wanted, rtol=1e-4, atol=1e-5)
    said = shell("check", *sorted(map(str, Path("built").glob("*.train.onnx"))), "--json").document
    assert said["exit_code"] == 0 and [each["verdict"] for each in said["result"]] == ["proved"] * 3


def piped(given: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([*PROGRAM, *words], input=given, capture_output=True, env=environment, check=False)


@pytest.mark.slow
def test_through_pipes_it_is_the_same_model_byte_by_byte(shell: Shell) -> None:
    onnx.save(perceptron(3), "m.onnx")
    built = piped(Path("m.onnx").read_bytes(), "build", "-", "--loss", "huber", "-o", "-")
    assert shell("build", "m.onnx", "--loss", "huber", "-o", "t.onnx").code == 0
    assert built.stdout == Path("t.onnx").read_bytes()
    checked = piped(built.stdout, "check", "-", "--json")
    assert checked.returncode == 0 and json.loads(checked.stdout)["result"]["verdict"] == "proved"
    refused = piped(b"no model", "build", "-", "-o", "-")
    assert refused.returncode != 0 and refused.stdout == b"" and b"Traceback" not in refused.stderr
