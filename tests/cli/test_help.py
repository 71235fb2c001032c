"""Help that fits a screen, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click
import pytest

from onnxgrad_cli.cli import cli
from onnxgrad_cli.cli.completion import VARIABLE
from onnxgrad_cli.cli.help import COMMON, FIRST, MANY, SECTIONS, VisibleContext, name_of, sections
from tests.cli.test_cli import HOME, shell
from tests.cli_harness import PROGRAM, Shell

__all__ = ["shell"]  # the fixture


@pytest.mark.parametrize("command", list(cli.commands))
def test_help_fits_a_screen(command: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = shell(command, "--help").out.splitlines()
    whole = shell(command, "--help-all").out.splitlines()
    assert max(map(len, shown)) <= 80 and len(whole) >= len(shown) - 2
    if len(cli.commands[command].params) > MANY:
        assert len(shown) <= 50 and shown[-1].endswith(f"more options: onnxgrad {command} --help-all")
        assert "Common options:" in shown and "How it speaks:" not in shown and "How it speaks:" in whole


def test_the_group_and_no_arguments(shell: Shell) -> None:
    assert shell("--help").out.startswith("Usage: onnxgrad [OPTIONS] COMMAND")
    result = shell("build", "--help-all", "--json")
    assert result.code == 0 and result.out.startswith("Usage: onnxgrad build"), "there is no result to print"


def test_sections_hold_each_option_once() -> None:
    known = {
        name_of(param) for each in cli.commands.values() for param in each.params if isinstance(param, click.Option)
    }
    named = [name for names in SECTIONS.values() for name in names.split()]
    assert len(named) == len(set(named)) and not COMMON & set(named)
    assert {*named, *COMMON} - {"help"} <= known
    for name, command in cli.commands.items():
        context = VisibleContext(command, info_name=name, help_option_names=["-h", "--help"])
        shown = [option for _, options in sections(context) for option in options]
        assert len(shown) == len(set(shown)) == sum(isinstance(p, click.Option) for p in command.get_params(context))
        assert next(sections(context))[0] in (FIRST, "Options")


def test_help_all_is_no_setting(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAD_PASSES_HELP_ALL", "1")
    assert shell("passes").out.startswith("pass")
    Path("c.toml").write_text("help-all = true\n")
    assert "unknown option 'help-all'" in shell("passes", "--config", "c.toml").err


# -- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(kind: str, shell: Shell) -> None:
    result = shell("completion", kind)
    assert result.code == 0 and f"_ONNXGRAD_COMPLETE={kind}_complete" in result.out
    assert shell("completion", "csh").code == 2


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("train", "m.onnx", "--loss", "cross"), ["cross-entropy"]),
        (("evaluate", "m.onnx", "--metric", "f1"), ["f1", "f1-macro", "f1-micro", "f1-weighted"]),
        (("build", "m.onnx", "--optimizer", "adamw"), ["adamw"]),
        (("train", "m.onnx", "--schedule", "c"), ["constant", "cosine", "cosine-restarts", "cyclic"]),
        (("build", "m.onnx", "--loss", "my_"), ["my_ as a file"]),
        *(((command, "m.onnx", flag, "d"), ["d as a file"]) for command, flag in (
            ("train", "--data"), ("train", "--val"), ("evaluate", "--data"), ("explain", "--data"), ("predict", "-o"),
            ("build", "-o"), ("build", "--test-data"), ("check", "--data"),
        )),
    ],
)  # fmt: skip
def test_values_are_completed(words: tuple[str, ...], found: list[str]) -> None:
    """Names of what there is, and files where an option takes some; a shell adds none of its own."""
    from click.shell_completion import BashComplete

    told = BashComplete(cli, {}, "onnxgrad", VARIABLE).get_completions(list(words[:-1]), words[-1])
    assert [each.value + f" as a {each.type}" * (each.type != "plain") for each in told] == found


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["bui"], "build"),
        (["build", "m.onnx", "--los"], "--loss --loss-chunks --loss-option --loss-scale"),
        (["build", "--mode", "e"], "eval"),
    ],
)
def test_bash_completes(words: list[str], found: str, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "onnxgrad"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    line = (
        f'eval "$(onnxgrad completion bash)"; COMP_WORDS=(onnxgrad {" ".join(words)}); COMP_CWORD={len(words)}; '
        '_onnxgrad_completion onnxgrad; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=True)
    assert sorted(done.stdout.split()) == found.split(), done.stderr
