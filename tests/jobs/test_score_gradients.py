"""The gradients by which a model is explained and attacked are proved, and `--verify` demands a proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli import run_attack, run_explain
from onnxgrad_cli.common.inputs import input_protection
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.score_gradients import ONE_BY_ONE, UNPROVED
from tests.cli_harness import Shell, save
from tests.facts import raises

DEAD = """
<ir_version: 8, opset_import: ["": 17]>
dead (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] low = {-1e9, -1e9}>
{ h = MatMul(x, w) k = Add(h, low) y = Relu(k) }
"""
"""Every gradient is zero, so that no fault in it would be seen."""


@pytest.mark.parametrize("command", ["explain", "attack"])
def test_a_proof_that_is_demanded(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    save(DEAD, Path("dead.onnx"))
    save(DEAD.replace("-1e9, -1e9", "1, 1").replace("Relu", "Tanh"), Path("live.onnx"))
    np.savez("x.npz", x=np.ones((1, 2), np.float32))
    codes = {
        (name, words): shell(command, f"{name}.onnx", "--data", "x.npz", *words).code
        for name in ("dead", "live")
        for words in ((), ("--verify",))
    }
    assert codes == {("dead", ()): 0, ("dead", ("--verify",)): 4, ("live", ()): 0, ("live", ("--verify",)): 0}


MIXED = """
<ir_version: 8, opset_import: ["": 17]>
mixed (float[n, 2] x) => (float[n, 2] y) { m = ReduceMean <axes = [0]> (x) h = Sub(x, m) y = Mul(h, h) }
"""
"""Each sample depends on the mean of the batch."""


@pytest.mark.parametrize("job", [run_explain, run_attack])
def test_samples_that_are_not_independent_are_run_one_by_one(job: Any, tmp_path: Path) -> None:
    for name, text in (("mixed", MIXED), ("live", DEAD.replace("-1e9, -1e9", "1, 1").replace("Relu", "Tanh"))):
        save(text, tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32))
    said: list[str] = []
    for name, alone in (("live", False), ("mixed", True)):
        found = job(tmp_path / f"{name}.onnx", tmp_path / "x.npz", verify=False, tell=lambda text, _: said.append(text))
        assert (ONE_BY_ONE in said) == alone and found.proof == UNPROVED and found.files == []


@pytest.mark.parametrize(
    ("out", "code"), [("f.txt", "wrong_value"), ("x.npz", "conflict"), ("mine.npz", "file_exists")]
)
@pytest.mark.parametrize("job", [run_explain, run_attack])
def test_the_output_is_checked_first(job: Any, out: str, code: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save(DEAD, Path("dead.onnx"))
    np.savez("x.npz", x=np.ones((1, 2), np.float32))
    Path("mine.npz").write_text("mine")
    with input_protection(), raises(UsageError, code, out):
        job("dead.onnx", "x.npz", out)
    assert Path("mine.npz").read_text() == "mine"
    if code == "file_exists":
        assert job("dead.onnx", "x.npz", out, force=True, verify=False).files == [Path("mine.npz")]
