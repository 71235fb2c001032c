"""`onnxgrad build`: which checks a proof has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxgrad_cli import LoraSpec, Options, run_build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.build import WRITTEN
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize(("mode", "compared"), [("keep", True), ("train", False)])
def test_outputs_are_compared_with_those_of_the_original_unless_the_mode_changes_them(
    shell: Shell, mode: str, compared: bool
) -> None:
    result = shell("build", "mlp.onnx", "--mode", mode, "--json")
    assert result.code == 0, result.err
    steps = {step["name"]: step["status"] for step in result.json["proof"]["steps"]}
    assert steps.get("computes what the original computes") == ("passed" if compared else None)


def test_a_training_model_is_no_source_unless_its_output_is_named(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--no-verify", "--keep-outputs").code == 0
    assert shell("build", "mlp.train.onnx", "--no-verify", "-o", "again.onnx").code == 2
    for more in (("--loss", "mse:y:second"), ("--output", "y", "--label", "second")):
        result = shell("build", "mlp.train.onnx", "--no-verify", "-o", "again.onnx", "--force", *more)
        assert result.code == 0, result.err


@pytest.mark.parametrize("more", [(), ("--training-info",), ("--weights", "inputs"), ("--keep-outputs",)])
def test_the_written_file_is_part_of_the_proof(shell: Shell, more: tuple[str, ...]) -> None:
    result = shell("build", "mlp.onnx", "--optimizer", "sgd", "--verify", *more, "--json")
    assert result.code == 0, result.err
    last = result.json["proof"]["steps"][-1]
    assert (last["name"], last["status"]) == (WRITTEN, "passed") and last["seconds"] > 0
    roles = {file["path"]: file["role"] for file in result.json["files"]}
    beside = ["mlp.train.json", "mlp.train.bin"] if "inputs" in more else []
    assert roles == {
        "mlp.onnx": "source model", "mlp.train.onnx": "training model", "mlp.train.onnx.report.md": "report",
        **dict.fromkeys(beside, "weights"),
    }  # fmt: skip
    assert all(Path(path).exists() for path in roles)


@pytest.mark.parametrize("fault", ["the file", ""])
def test_a_written_file_that_differs_fails_the_proof(fault: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrad_cli.verification.written_file.difference", lambda *_: fault)
    result = shell("build", "mlp.onnx")
    assert result.code == (4 if fault else 0) and Path("mlp.train.onnx").exists() == (not fault)
    if fault:
        assert result.problem is not None and result.problem.code == "check_failed"
        assert result.problem.details == [f"{WRITTEN}: {fault}"] and "--no-verify" in result.hint
        assert Path("mlp.train.onnx.report.md").exists()


def test_sizes_and_options_are_in_the_report(shell: Shell) -> None:
    sized = run_build("mlp.onnx", "t.onnx", Options(dims={"batch": 3}), verify=False, command="build it")
    plain = run_build("mlp.onnx", "u.onnx", verify=False)
    assert sized.asked.command == "build it" and plain.asked.command == "" and sized.cost != plain.cost


def test_each_pass_can_be_written_and_is_told(shell: Shell) -> None:
    said: list[tuple[str, int]] = []
    run_build("mlp.onnx", "t.onnx", verify=False, dump_passes="passes", tell=lambda *each: said.append(each))
    files = sorted(Path("passes").iterdir(), key=lambda file: int(file.name.partition("-")[0]))
    assert [file.name.partition("-")[0] for file in files] == [str(i) for i in range(1, len(files) + 1)]
    assert {(f"wrote {file}", 1) for file in files} < set(said)
    stopped = run_build("mlp.onnx", "s.onnx", stop_after="backward", dump_passes="some")
    assert stopped.status == "stopped" and len([*Path("some").iterdir()]) < len(files)
    with raises(UsageError, "unknown_name", "stop_after", "bakward"):
        run_build("mlp.onnx", "s.onnx", stop_after="bakward")
    with raises(UsageError, "file_exists", "1-prepare.onnx"):
        Path("passes/1-prepare.onnx").write_text("mine")
        run_build("mlp.onnx", "t.onnx", verify=False, dump_passes="passes")


@pytest.mark.parametrize(
    ("options", "more", "expected"),
    [
        (Options(init="he"), {}, ("conflict", "init", "seed", "training_info")),
        (Options(seed=3), {}, ("conflict", "init", "seed", "training_info")),
        (Options(training_info=True), {"weights": "inputs"}, ("conflict", "weights='inputs'", "training_info")),
        (Options(), {"weights": "inputs", "stop_after": "loss"}, ("conflict", "weights='inputs'", "stop_after")),
        (Options(), {"weights": "inputs", "out": "-"}, ("missing_value", "weights='inputs'")),
        (Options(), {"weights": "input"}, ("wrong_value", "weights='input'", "stored", "inputs")),
    ],
)
def test_options_that_do_not_go_together(
    options: Options, more: dict[str, Any], expected: tuple[str, ...], shell: Shell
) -> None:
    with raises(UsageError, *expected):
        run_build("mlp.onnx", **{"out": "t.onnx", "options": options, "verify": False, **more})
    assert not Path("t.onnx").exists()


def test_a_seed_goes_with_adapters(shell: Shell) -> None:
    assert run_build("mlp.onnx", "t.onnx", Options(seed=3, lora=LoraSpec(1)), verify=False).status == "built"
