"""Help that fits a screen, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click
import pytest

from onnxgrad_cli.cli import GROUPS, VARIABLE, cli
from onnxgrad_cli.cli.parsing.click_option import SectionOption
from onnxgrad_cli.cli.parsing.help import FIRST, MAX_OPTIONS, SECTIONS, VisibleContext, sections
from tests.cli.test_cli import HOME
from tests.cli_harness import PROGRAM, Shell


@pytest.mark.parametrize("command", list(cli.commands))
def test_help_fits_a_screen(command: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = shell(command, "--help").out.splitlines()
    whole = shell(command, "--help-all").out.splitlines()
    assert max(map(len, shown)) <= 80 and len(whole) >= len(shown) - 2
    if len(cli.commands[command].params) > MAX_OPTIONS:
        assert len(shown) <= 50 and shown[-1].endswith(f"more options: onnxgrad {command} --help-all")
        assert "Common options:" in shown and "Logging:" not in shown and "Logging:" in whole


def test_train_names_its_default_optimizer(shell: Shell) -> None:
    for asked in ("--help", "--help-all"):
        shown = " ".join(shell("train", asked).out.split())
        assert "--optimizer NAME Optimizer of the training" in shown and "[default: adam]" in shown
        assert "Append a step" not in shown and "Append a step of this optimizer" in shell("build", "--help").out


def test_the_group_and_no_arguments(shell: Shell) -> None:
    shown = shell("--help").out
    assert shown.startswith("Usage: onnxgrad COMMAND [OPTIONS]\n")
    assert "\n    onnxgrad build model.onnx --loss cross-entropy --label y -o train.onnx\n" in shown
    assert len(shown.splitlines()) <= 45 and max(map(len, shown.splitlines())) <= 80
    lines = shown.splitlines()
    for heading, commands in GROUPS.items():
        start = lines.index(f"{heading}:") + 1
        listed = [line.split()[0] for line in lines[start : start + len(commands)]]
        assert listed == list(commands) and lines[start + len(commands)] == ""
    result = shell("build", "--help-all", "--json")
    assert result.code == 0 and result.out.startswith("Usage: onnxgrad build"), "there is no result to print"


def test_help_is_a_command_too(shell: Shell) -> None:
    assert shell("help").out == shell("--help").out
    assert shell("help", "build").out == shell("build", "--help").out
    assert shell("help", "biuld").facts == ("unknown_name", "biuld", "build")
    assert shell("-V").out == shell("--version").out


def test_sections_hold_each_option_once() -> None:
    used = set()
    for name, command in cli.commands.items():
        context = VisibleContext(command, info_name=name, help_option_names=["-h", "--help"])
        shown = [option for _, options in sections(context) for option in options]
        assert len(shown) == len(set(shown)) == sum(isinstance(p, click.Option) for p in command.get_params(context))
        assert next(sections(context))[0] in (FIRST, "Options")
        own = [option for option in shown if "--help" not in option.opts]
        assert all(isinstance(option, SectionOption) for option in own)
        used |= {option.section for option in own if isinstance(option, SectionOption)}
    assert used == {*SECTIONS, ""}


WRITING = "--as-gradient-op --no-embed-state --identifiers --init --keep-outputs --seed --training-info --yield"
"""Options that say how a training model is written."""

AFTER_GRADIENTS = (
    "--accumulate --clip-norm --clip-value --ema --group --label --l1 --l2 --lora-dora --lora-dropout --lora-scaling "
    "--loss-scale --optimizer --optimizer-option --recompute --reduction --sample-weight --target --tuned "
    "--unbiased-variance"
)
"""Options that change neither the gradients of a model's nodes nor their shapes."""


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("inspect", WRITING),
        ("tune", f"{WRITING} {AFTER_GRADIENTS}"),
        ("explain", "--identifiers"),
        ("attack", "--identifiers"),
    ],
)
def test_a_command_has_no_option_without_effect(command: str, absent: str, shell: Shell) -> None:
    for flag in absent.split():
        result = shell(command, "mlp.onnx", flag)
        assert result.code == 2 and result.facts[:2] == ("unknown_name", flag)


def test_tune_and_inspect_keep_the_options_that_choose_weights(shell: Shell) -> None:
    for command in ("tune", "inspect"):
        flags = {flag for param in cli.commands[command].params for flag in param.opts}
        assert flags >= {"--train", "--freeze", "--lora", "--loss", "--output", "--mode", "--dim", "--shape", "--rules"}


def test_help_all_is_no_setting(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAD_LIST_HELP_ALL", "1")
    assert shell("list", "passes").out.startswith("pass")
    Path("c.toml").write_text("help-all = true\n")
    assert shell("list", "passes", "--config", "c.toml").facts == ("unknown_name", "config", "c.toml", "help-all")


# -- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(kind: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"_ONNXGRAD_COMPLETE={kind}_source onnxgrad" in (HOME / "docs" / "index.md").read_text()
    monkeypatch.setenv(VARIABLE, f"{kind}_source")
    result = shell()
    assert result.code == 0 and f"_ONNXGRAD_COMPLETE={kind}_complete" in result.out


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
        'eval "$(_ONNXGRAD_COMPLETE=bash_source onnxgrad)"; '
        f"COMP_WORDS=(onnxgrad {' '.join(words)}); COMP_CWORD={len(words)}; "
        '_onnxgrad_completion onnxgrad; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=True)
    assert sorted(done.stdout.split()) == found.split(), done.stderr
