"""Options and settings as other programs call them, and the one spelling of a setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli.cli import cli
from onnxgrad_cli.common.synonyms import COMMANDS, SYNONYMS
from onnxgrad_cli.losses import LOSSES
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.training.metrics import METRICS
from onnxgrad_cli.training.schedules import SCHEDULES
from tests.cli_harness import MLP, Shell, save


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("train", "--num-epochs", "use --epochs;"),
        ("train", "--num_train_epochs", "use --epochs;"),
        ("train", "--bs", "use --batch-size;"),
        ("train", "--wd", "use --optimizer-option weight-decay=0.01;"),
        ("build", "--wd", "use --optimizer-option weight-decay=0.01;"),
        ("train", "--device", "use --provider;"),
        ("evaluate", "--device", "use --provider;"),
        ("train", "--steps", "use --max-steps;"),
        ("train", "--random-state", "use --seed;"),
        ("build", "--criterion", "use --loss;"),
        ("build", "--lr", "'onnxgrad train' has --lr;"),
        ("build", "--classes", "'onnxgrad train' has --classes;"),
        ("build", "--num-epochs", "'onnxgrad train' has --epochs;"),
    ],
)
def test_an_option_of_another_program_is_known_by_its_meaning(
    shell: Shell, command: str, option: str, hint: str
) -> None:
    result = shell(command, "mlp.onnx", option, "1")
    assert result.code == 2 and result.facts[:2] == ("unknown_name", option), result.err
    assert f"hint: {hint} see 'onnxgrad {command} --help'" in result.err, result.err


def test_an_option_without_another_meaning_is_known_by_its_letters(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--lable", "y")
    assert result.code == 2 and result.facts[:2] == ("unknown_name", "--lable") and "--label" in result.facts[2:]


def test_a_configuration_and_a_setting_are_known_by_their_meaning_too(shell: Shell) -> None:
    Path("c.toml").write_text("num_train_epochs = 3\n")
    result = shell("build", "mlp.onnx", "--config", "c.toml")
    assert (
        result.code == 2
        and result.facts == ("unknown_name", "config", "c.toml", "num_train_epochs")
        and "epochs?" in result.hint
    )
    result = shell("build", "mlp.onnx", "--optimizer", "adam", "--optimizer-option", "wd=1")
    assert result.code == 2 and result.facts == ("unknown_name", "wd") and "`weight_decay`?" in result.hint


def test_every_name_of_another_program_leads_to_an_option() -> None:
    """None of the names is an option of `train` itself, and each leads to an option or to a setting."""
    names = {flag[2:] for param in cli.commands["train"].params for flag in param.opts if flag != "--lr"}
    catalogues = (*OPTIMIZERS, *LOSSES, *SCHEDULES, *METRICS)
    settings = {option.name.replace("_", "-") for each in catalogues for option in each.options}
    for use, others in SYNONYMS.items():
        option, _, value = use.partition(" ")
        assert option in names | settings, use
        assert option in settings or not names & set(others.split()), use
        assert not option.endswith("-option") or value.partition("=")[0] in settings, use


@pytest.mark.parametrize("use", COMMANDS)
def test_a_command_of_another_program_is_known_by_its_meaning(shell: Shell, use: str) -> None:
    assert shell(*use.split(), "--help").code == 0
    for name in COMMANDS[use].split():
        assert name not in cli.commands
        result = shell(name, "mlp.onnx")
        assert result.code == 2 and result.facts[:2] == ("unknown_name", name), result.err
        assert f"hint: use 'onnxgrad {use}'; see 'onnxgrad --help'" in result.err, result.err


@pytest.mark.parametrize(
    "words",
    [
        ("build", "--optimizer", "adamw", "--optimizer-option", "weight_decay=0.1"),
        ("build", "--optimizer", "adamw", "--group", "*:weight_decay=0"),
        ("build", "--loss", "cross-entropy", "--loss-option", "y:weight_decay=0"),
        ("train", "--data", "data.npz", "--schedule", "linear:weight_decay=0.1"),
        ("train", "--data", "data.npz", "--val", "0.2", "--metric", "mae:weight_decay=1"),
    ],
)
def test_settings_have_hyphens(shell: Shell, words: tuple[str, ...]) -> None:
    np.savez("data.npz", x=np.ones((9, 4), np.float32), label=np.ones((9, 2), np.float32))
    result = shell(words[0], "mlp.onnx", *words[1:], "-o", "t.onnx")
    assert result.code == 2 and result.facts == ("unknown_name", "weight_decay", "weight-decay"), result.err


@pytest.mark.parametrize(
    ("setting", "words"),
    [("weight-decay=-1", "weight-decay must not"), ("weight-decay=x", "weight-decay takes a number")],
)
def test_messages_name_a_setting_as_it_is_typed(shell: Shell, setting: str, words: str) -> None:
    result = shell("build", "mlp.onnx", "--optimizer", "adamw", "--optimizer-option", setting, "--no-verify")
    assert result.code == 2 and f"error: option {words}" in result.err, result.err


def test_a_list_is_typed_with_or_without_brackets(shell: Shell) -> None:
    loss = ("build", "mlp.onnx", "--loss", "cross-entropy", "--label", "t", "--no-verify", "--loss-option")
    models = []
    for text in ("class-weights=[1, 2]", "class-weights=1,2"):
        assert shell(*loss, text, "-o", "t.onnx").code == 0
        models.append(onnx.load("t.onnx").graph)
    assert models[0] == models[1]
    stored = [onnx.numpy_helper.to_array(tensor).tolist() for tensor in models[0].initializer]
    assert [1, 2] in stored, stored
    assert shell(*loss, "class-weights=[1]", "-o", "t.onnx").code == 2


def test_lr_is_the_learning_rate(shell: Shell) -> None:
    np.savez("data.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    train = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1")
    for name, option in (("a.onnx", "--lr"), ("b.onnx", "--learning-rate")):
        result = shell(*train, option, "0.25", "-o", name)
        assert result.code == 0 and "rate 0.25" in result.err, result.err
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    assert "--lr, --learning-rate RATE" in shell("train", "--help").out
