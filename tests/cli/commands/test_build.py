"""`onnxgrad build`: results, reports, options and proofs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from tests.cli.test_cli import outputs
from tests.cli_harness import Shell


def test_build(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--label", "t")
    assert result.code == 0, result.err
    assert set(shell.files()) == {"mlp.onnx", "mlp.train.onnx", "mlp.train.onnx.report.md"}
    assert outputs("mlp.train.onnx") == ["loss", "w1_grad", "b1_grad", "w2_grad"]
    assert "every check passed" in result.out
    assert re.fullmatch(r"built \| \d+\.\d\d s\n", result.err), "the command line is not repeated"
    session = onnxruntime.InferenceSession("mlp.train.onnx")
    x, t = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
    y = onnxruntime.InferenceSession("mlp.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(session.run(["loss"], {"x": x, "t": t})[0], np.mean(y**2), rtol=1e-6)


def test_reports(shell: Shell) -> None:
    reports = ("--report", "r.md", "--report", "r.html", "--report", "r.json")
    assert shell("build", "mlp.onnx", *reports).code == 0
    assert {"r.md", "r.html", "r.json"} == set(shell.files()) - {"mlp.onnx", "mlp.train.onnx"}
    data = json.loads(Path("r.json").read_text())
    assert data["status"] == "built" and data["proof"]["status"] == "passed"
    assert shell("build", "mlp.onnx", *reports).code == 0, "its own reports are replaced without asking"
    assert shell("build", "mlp.onnx", "-o", "other.onnx", "--no-report").code == 0
    assert "other.onnx.report.md" not in shell.files()


def test_dump_passes_and_stop_after(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--dump-passes", "dump", "--stop-after", "backward")
    assert result.code == 0, result.err
    names = ["1-prepare.onnx", "2-loss.onnx", "3-yield.onnx", "4-backward.onnx"]
    assert sorted(path.name for path in Path("dump").iterdir()) == names
    kinds = [{node.op_type for node in onnx.load(Path("dump") / name).graph.node} for name in names]
    assert ["YieldOp" in kind for kind in kinds] == [False, False, True, True]
    assert "YieldOp" in {node.op_type for node in onnx.load("mlp.backward.onnx").graph.node}
    assert "mlp.train.onnx" not in shell.files()
    assert result.err.startswith("stopped | ")
    assert shell("build", "mlp.onnx", "--dump-passes", "dump").code == 0, "its own dumps are replaced"
    last = {node.op_type for node in onnx.load("dump/8-cleanup.onnx").graph.node}
    assert "YieldOp" not in last and "ConstantOfShape" in last


def test_losses_and_names(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--loss", "mse:y:t", "--loss", "mae:y:u:0.5", "--freeze", "b*",
                   "--grad-of-input", "x", "--keep-outputs", "-o", "t.onnx")  # fmt: skip
    assert result.code == 0, result.err
    assert outputs("t.onnx") == ["loss", "w1_grad", "w2_grad", "x_grad", "y"]
    assert {"t", "u"} < {value.name for value in onnx.load("t.onnx").graph.input}


def test_loss_options(shell: Shell) -> None:
    command = ("build", "mlp.onnx", "--loss", "huber", "-o", "t.onnx", "--json")
    assert shell(*command, "--loss-option", "delta=0.5").json["asked"]["options"]["loss options"] == "delta=0.5"
    assert shell(*command, "--loss-option", "delta=wide").code == 2
    assert shell(*command, "--loss-option", "deltas=1").code == 2


def test_shapes(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--dim", "batch=8").code == 0
    dims = onnx.load("mlp.train.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [8, 4]
    assert shell("build", "mlp.onnx", "--shape", "x:5,4").code == 0
    dims = onnx.load("mlp.train.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [5, 4]


def test_failed_proof_writes_no_model(shell: Shell) -> None:
    """A wrong rule for Sigmoid: code 4, the report says so, and there is no model to train with."""
    Path("rules.py").write_text(
        "from onnxgrad_cli import rule\n@rule('Sigmoid', override=True)\ndef sigmoid(op, g, y, x):\n    return g * y\n"
    )
    from onnxgrad_cli.autodiff import registry

    with registry.scoped():
        result = shell("build", "mlp.onnx", "--rules", "rules.py")
        assert result.code == 4
        assert result.facts == ("check_failed",)
        assert set(shell.files()) == {"mlp.onnx", "rules.py", "mlp.train.onnx.report.md"}
        assert "check failed" in Path("mlp.train.onnx.report.md").read_text().lower()
        assert shell("build", "mlp.onnx", "--rules", "rules.py", "--no-verify").code == 0
    assert shell("check", "mlp.train.onnx").code == 4
