"""What is written is what was proved: onnxruntime opens it before it has its name, or nothing is left of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.files import AtomicWriteGroup
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.jobs import build as build_job
from onnxgrad_cli.jobs.build import run_build
from tests.cli_harness import MLP, PROGRAM, WEIGHT, Shell, save, save_external
from tests.facts import raises

BUILD = ("build", "mlp.onnx", "--label", "t", "-o", "out/train.onnx")
TWICE = """
<ir_version: 8, opset_import: ["": 17]>
twice (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { h = MatMul(x, w) y = Relu(h) }
"""


def name_twice(model: ModelProto) -> None:
    """Make a model that the standard allows and onnxruntime does not open."""
    for node in model.graph.node[:2]:
        node.name = "twice"


def other_weights(model: ModelProto) -> None:
    """Make another model, which opens."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "w2")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.001, "w2"))


def spoil(monkeypatch: pytest.MonkeyPatch, module: str, function: str, change: Callable[[ModelProto], None]) -> None:
    """Let what a module writes be another model than the one that it has made."""
    whole = f"onnxgrad_cli.{module}.{function}"
    before = getattr(__import__(f"onnxgrad_cli.{module}", fromlist=[function]), function)

    def changed(*given: Any, **options: Any) -> Any:
        at = next(position for position, each in enumerate(given) if isinstance(each, ModelProto))
        other = copied(given[at])
        change(other)
        return before(*given[:at], other, *given[at + 1 :], **options)

    monkeypatch.setattr(whole, changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [(name_twice, "two nodes with same node name"), (other_weights, "not compute the same as the proved model")],
)
def test_a_file_that_is_not_what_was_proved_is_not_written(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, change: Callable[[ModelProto], None], words: str
) -> None:
    spoil(monkeypatch, "jobs.build", "stage_model", change)
    result = shell(*BUILD, "--report", "out/report.json")
    assert result.code == 4 and words in result.err, result.err
    assert "onnxgrad.tmp" not in result.err
    assert [file.name for file in Path("out").iterdir()] == ["report.json"]
    report = json.loads(Path("out/report.json").read_text())
    assert report["status"] == "check_failed" and report["proof"]["verdict"] == "failed"
    assert report["proof"]["steps"][-1]["name"] == build_job.WRITTEN
    assert [file["role"] for file in report["files"]] == ["source model"]
    assert shell(*BUILD, "--no-verify").code == 0


def test_a_model_too_large_to_be_proved_unasked_is_opened(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.jobs.build.is_quick", lambda model: False)
    monkeypatch.setattr("onnxgrad_cli.verification.proof.prove", lambda *_, **__: build_job.Proof("skipped", "large"))
    assert shell(*BUILD).code == 0
    spoil(monkeypatch, "jobs.build", "stage_model", name_twice)
    Path("out/train.onnx").unlink()
    result = shell(*BUILD, "--no-report", "--force")
    assert (result.code, result.facts[0]) == (4, "check_failed") and "same node" in result.err
    assert not Path("out/train.onnx").exists()


@pytest.mark.parametrize(
    ("module", "function", "command"),
    [
        ("jobs.derive", "save_model", ("derive", "mlp.onnx", "-o", "out/vjp.onnx")),
        ("jobs.expand", "stage_model", ("expand", "mlp.onnx", "-o", "out/plain.onnx")),
        ("jobs.export", "stage_model", ("export", "a.safetensors", "--model", "mlp.onnx", "-o", "out/t.onnx")),
        ("compat.artifacts", "stage_model", ("build", "mlp.onnx", "--artifacts", "out", "--no-report", "--no-verify")),
    ],
)
def test_other_commands_open_what_they_write(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, module: str, function: str, command: tuple[str, ...]
) -> None:
    if command[0] == "export":
        np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
        lora = ("--lora", "1", "--adapter", "a.safetensors", "--epochs", "1")
        assert shell("train", "mlp.onnx", "--data", "d.npz", *lora, "-o", "trained.onnx").code == 0
    spoil(monkeypatch, module, function, name_twice)
    result = shell(*command)
    assert (result.code, result.facts[0]) == (4, "check_failed") and "same node" in result.err, result.err
    assert not list(Path("out").iterdir())


def test_what_the_original_lacks_too_is_for_a_runtime_elsewhere(shell: Shell) -> None:
    text = TWICE.replace('"": 17', '"": 17, "my.ops": 1').replace("Relu", "my.ops.Twirl")
    save(text, Path("own.onnx"))
    assert shell("expand", "own.onnx", "-o", "out/own.onnx").code == 0
    assert Path("out/own.onnx").exists()


def test_names_that_onnxruntime_refuses_are_parted_beside_training_information(shell: Shell) -> None:
    model = parser.parse_model(TWICE)
    name_twice(model)
    onnx.save(model, "twice.onnx")
    options = ("--label", "t", "--training-info", "--optimizer", "sgd", "-o", "out/train.onnx")
    result = shell("build", "twice.onnx", *options)
    assert result.code == 0, result.err
    session = onnxruntime.InferenceSession("out/train.onnx")
    x = np.eye(2, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], [[1, 2], [3, 4]])
    assert [node.name for node in onnx.load("twice.onnx").graph.node] == ["twice", "twice"]


@pytest.mark.parametrize("location", ["../weights.bin", "/tmp/weights.bin", "C:weights.bin"])
@pytest.mark.parametrize(
    "command", [("build", "--label", "t"), ("derive",), ("expand",), ("build", "--optimizer", "sgd", "--training-info")]
)
def test_data_outside_the_folder_are_neither_read_nor_written(
    shell: Shell, location: str, command: tuple[str, ...]
) -> None:
    Path("pkg").mkdir()
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    save_external(Path("pkg/external.onnx"), location)
    before = shell.files()
    result = shell(command[0], "pkg/external.onnx", *command[1:], "-o", "out/train.onnx", "--force")
    assert result.code == 1 and location in result.err
    assert shell.files() == before


def test_external_data_of_a_loss_are_read_beside_the_loss(shell: Shell) -> None:
    """Those of a Constant too. Beside the model, another file has that name."""
    loss = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> l (float[n, 2] prediction, float[n, 2] label) => (float loss)'
        "{ c = Constant<value = float[2] {1, 2}>() d = Sub(prediction, label) e = Mul(d, c)"
        "  loss = ReduceSum<keepdims = 0>(e) }"
    )
    tensor = loss.graph.node[0].attribute[0].t
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="c.bin")
    Path("losses").mkdir()
    Path("losses/c.bin").write_bytes(np.float32([3, 5]).tobytes())
    Path("c.bin").write_bytes(bytes(8))
    onnx.save(loss, "losses/loss.onnx")
    result = shell("build", "mlp.onnx", "--loss", "losses/loss.onnx", "-o", "train.onnx")
    assert result.code == 0, result.err
    x, label = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
    (y,) = onnxruntime.InferenceSession("mlp.onnx").run(None, {"x": x})
    (found,) = onnxruntime.InferenceSession("train.onnx").run(["loss"], {"x": x, "label": label})
    np.testing.assert_allclose(found, (y * np.float32([3, 5])).sum(), rtol=1e-5)
    Path("losses/c.bin").unlink()
    result = shell("build", "mlp.onnx", "--loss", "losses/loss.onnx", "-o", "train.onnx", "--force")
    assert result.code == 1 and "c.bin" in result.err, result.err


def test_a_model_and_its_report_take_their_names_together(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell(*BUILD, "--force").code == 0
    before = shell.files()
    stage = AtomicWriteGroup.stage

    def full(self: AtomicWriteGroup, out: Path, *given: Any, **options: Any) -> None:
        if out.suffix == ".md":
            raise build_job.OnnxgradError("full")
        stage(self, out, *given, **options)

    monkeypatch.setattr(AtomicWriteGroup, "stage", full)
    result = shell(*BUILD, "--freeze", "w1")
    assert (result.code, result.problem and result.problem.message) == (1, "full")
    assert shell.files() == before


@pytest.mark.slow
def test_what_python_has_built_it_builds_again(tmp_path: Path) -> None:
    """No command stands in the report, which is ours all the same; what is not, is not replaced."""
    save(MLP, tmp_path / "m.onnx")
    for _ in range(2):
        assert run_build(tmp_path / "m.onnx", verify=False).status == "built"
    (tmp_path / "m.train.onnx.report.md").write_text("# What others have written\n" * 1000)
    with raises(UsageError, "file_exists", "m.train.onnx.report.md"):
        run_build(tmp_path / "m.onnx", verify=False)


@pytest.mark.slow
def test_two_processes_that_write_one_output_leave_one(shell: Shell) -> None:
    """One of them may hear that the other is writing; what is there opens."""
    import subprocess

    for _ in range(3):
        both = [
            subprocess.Popen(
                [*PROGRAM, *BUILD, "--freeze", weight], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for weight in ("w1", "w2")
        ]
        ended = [(process.communicate()[1], process.returncode) for process in both]
        assert 0 in {code for _, code in ended}
        assert all(code == 0 or "another process is writing it" in said for said, code in ended), ended
        onnxruntime.InferenceSession("out/train.onnx")
        assert {file.name for file in Path("out").iterdir()} == {"train.onnx", "train.onnx.report.md"}
