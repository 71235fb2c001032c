"""In a workflow of GitHub: annotations, the step's summary, and no command that a stranger's name could give."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from markdown_it import MarkdownIt
from onnx import parser

from onnxgrad_cli.cli.terminal.github import annotation, harmless
from tests.cli.test_cli import HOME
from tests.cli_harness import MLP, PROGRAM, UNKNOWN_OPS, Shell, save

ACTION = HOME / ".github" / "actions" / "onnxgrad"


def commands(text: str) -> list[str]:
    """The lines that a runner obeys: `ActionCommand.TryParseV2` and `TryParse` of actions/runner."""
    return [line for line in text.splitlines() if line.lstrip().startswith("::") or "##[" in line]


@pytest.fixture
def github(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    return shell


def test_annotations_are_escaped() -> None:
    told = annotation("error", "50% of\r\nit: a, b", title="a:b,c%", file="")
    assert told == "::error title=a%3Ab%2Cc%25::50%25 of\\r%0Ait: a, b"
    assert annotation("warning", "x") == "::warning::x"


def test_errors_and_refusals_are_annotated(github: Shell) -> None:
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    told = github("inspect", "unknown.onnx", "--json")
    (error, *_) = commands(told.err)
    assert error.startswith("::error title=onnxgrad inspect,file=unknown.onnx::")
    assert "my.ops::Twirl" in error and "%0A" in error and not commands(told.out)
    rows = Path("summary.md").read_text()
    assert "| unknown.onnx | refused | " in rows
    github("build", "mlp.onnx", "--no-verify", "--no-report")
    assert "| mlp.onnx | done | built | " in Path("summary.md").read_text() and rows in Path("summary.md").read_text()


def test_what_was_found_and_made_is_in_the_summary(github: Shell) -> None:
    np.savez("d.npz", x=np.eye(4, dtype=np.float32), label=np.array([0, 1, 0, 1]))
    on = ("--data", "d.npz", "--loss", "cross-entropy")
    evaluated = github("evaluate", "mlp.onnx", *on, "--json")
    loss, accuracy = evaluated.json["results"].values()
    assert f"| mlp.onnx | done | loss {loss:.4g}, accuracy {accuracy:.4f} | " in Path("summary.md").read_text()
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    assert github("train", "mlp.onnx", *on, "--epochs", "1", "-o", "t.onnx").code == 0
    row = Path("summary.md").read_text().splitlines()[-2]
    assert "trained&#58; epoch 1 of 1, the last one" in row and row.endswith("| t.onnx, t.onnx.run |"), row


def test_elsewhere_nothing_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert not commands(shell("build", "gone.onnx").err) and not Path("summary.md").exists()


EVIL = ("::error::x", "  ::add-mask::y", "##[add-path]/tmp", "a\n::stop-commands::b", "%0A::warning::z", "<b>|`_*@me")


def test_no_name_gives_a_command(github: Shell) -> None:
    for text in EVIL:
        model = parser.parse_model(MLP)
        for node in model.graph.node:
            node.name = text
            node.domain = text if node.op_type == "Sigmoid" else ""
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
        model.graph.name = model.graph.initializer[0].name = text
        model.graph.node[0].input[1] = text
        model.opset_import.add(domain=text, version=1)
        onnx.save(model, "evil.onnx")
        for command in (("inspect", "evil.onnx"), ("view", "evil.onnx"), ("inspect", "evil.onnx", "--json")):
            told = github(*command)
            assert not commands(told.out), (command, told.out)
            assert all(re.match("::(error|warning) title=onnxgrad ", line) for line in commands(told.err)), told.err
        told = github("build", f"{text}.onnx")
        assert len(commands(told.err)) == 1
    page = MarkdownIt("gfm-like", {"linkify": False}).parse(Path("summary.md").read_text())
    assert {token.type for token in page} >= {"table_open"}
    inline = {child.type for token in page if token.type == "inline" for child in token.children or ()}
    assert inline <= {"text", "text_special"}, inline


def test_json_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    text = json.dumps(["::a", "##[b]", "c"], indent=0)
    assert json.loads(harmless(text)) == ["::a", "##[b]", "c"] and not commands(harmless(text))


def test_a_summary_that_can_not_be_written_fails_nothing(github: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "gone/summary.md")
    told = github("build", "mlp.onnx", "--no-verify", "--no-report")
    assert told.code == 0 and "::warning::the step's summary can't be written" in told.err


# -- the action and the hooks -----------------------------------------------------------------------------------------


def test_inputs_reach_no_shell_as_text() -> None:
    action: dict[str, Any] = yaml.safe_load((ACTION / "action.yml").read_text())
    programs = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    assert programs and not any("${{" in program for program in programs)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="runs bash")
def test_the_action_runs(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "onnxgrad"
    program.write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    save(MLP, Path("a b.onnx"))
    environment = {
        **os.environ, "PYTHONPATH": str(HOME), "PATH": f"{program.parent}:{os.environ['PATH']}", "COMMAND": "inspect",
        "ARGUMENTS": "--label t", "RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "output"),
    }  # fmt: skip

    def code(models: str) -> int:
        return subprocess.run(
            ["bash", ACTION / "run.sh"], env={**environment, "MODELS": models}, check=False
        ).returncode

    assert code("*.onnx") == 0
    assert (tmp_path / "output").read_text() == f"exit-code=0\njson={tmp_path}/onnxgrad.json\n"
    assert code("$(touch${IFS}pwned) gone.onnx") == 1 and not Path("pwned").exists()


def test_the_hooks_are_commands(shell: Shell) -> None:
    hooks = yaml.safe_load((HOME / ".pre-commit-hooks.yaml").read_text())
    assert shell("build", "mlp.onnx", "--no-verify").code == 0
    for hook in hooks:
        files = [file for file in ("mlp.onnx", "mlp.train.onnx") if re.search(hook["files"], file)]
        files = [file for file in files if not re.search(hook.get("exclude", "^$"), file)]
        assert len(files) == 1
        assert shell(*hook["entry"].split()[1:], *files).code == 0, hook
