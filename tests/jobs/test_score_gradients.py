"""The gradients by which a model is explained and attacked are proved, and `--verify` demands a proof."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli_harness import Shell, save

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
