"""The exit codes of all commands: 1 for a file that can't be read or written, 2 for wrong usage."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np
import pytest

from onnxgrad_cli.cli import cli, run
from onnxgrad_cli.cli.parsing.click_option import FilePath
from tests.cli.terminal.test_document import GOOD
from tests.cli_harness import MLP, Shell, save

BESIDE: dict[tuple[str, str], tuple[str, ...]] = {
    ("build", "--tokenizer"): ("--verify", "--test-data", "t.jsonl"),
    ("derive", "--tokenizer"): ("--verify", "--test-data", "t.jsonl"),
    ("check", "--tokenizer"): ("--data", "t.jsonl"),
    ("train", "--adapter"): ("--lora", "1"),
    ("train", "--metric"): ("--val", "d.npz"),
    ("export", "--test-data"): ("--merge",),
    ("explain", "--baseline"): ("--method", "integrated-gradients"),
}
"""Words that an option needs beside it."""


SPECIAL = {("explain", "--tokenizer"), ("export", "--roles"), ("export", "--tokenizer")}
"""Options of models that these tests lack: of tokens, with weights as inputs, and with adapters on integers."""


def params_of(name: str) -> list[click.Parameter]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command.params


def with_paths() -> Iterator[tuple[str, str]]:
    """Yield each command with each of its options, and arguments, that take a file or a folder."""
    for name in GOOD:
        for param in params_of(name):
            if isinstance(param, click.Argument) and isinstance(param.type, FilePath):
                yield name, ""
            elif isinstance(param.type, FilePath) or "FILE" in (param.metavar or ""):
                yield name, max(param.opts, key=len)


def absent(name: str, flag: str) -> str:
    """Return a path in a folder that does not exist; for an option that makes its folder, a path below a file."""
    param = next(param for param in params_of(name) if flag in param.opts)
    assert isinstance(param, click.Option)
    metavar = param.metavar or ""
    if metavar == "DIR" and flag != "--runtime":
        return "d.npz/folder"
    if metavar == "FILE.py:FUNCTION":
        return "absent/f.py:function"
    ending = next(
        (each for each in ("safetensors", "onnx", "html", "npz", "json", "toml", "py") if each in metavar), "npz"
    )
    return f"absent/f.{ending}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    with contextlib.chdir(folder):
        save(MLP, Path("mlp.onnx"))
        x, label = rng.standard_normal((8, 4)).astype(np.float32), np.eye(2, dtype=np.float32)[[0, 1] * 4]
        np.savez("d.npz", x=x, label=label)
        Path("t.jsonl").write_text('{"text": "a"}\n')
        Path("broken.npz").write_bytes(b"PK")
        assert run(["build", *GOOD["build"]]) == 0
        assert run(["train", *GOOD["train"], "--lora", "1"]) == 0
    return folder


@pytest.fixture
def files(shell: Shell, made: Path) -> Shell:
    shutil.copytree(made, shell.folder, dirs_exist_ok=True)
    return shell


def without_data(words: Sequence[str], *more: str) -> list[str]:
    """Return the words without --data if it is in `more`, because `train` takes several."""
    at = words.index("--data") if "--data" in words and "--data" in more else len(words)
    return [*words[:at], *words[at + 2 :]]


@pytest.mark.parametrize(("name", "flag"), [each for each in with_paths() if each not in SPECIAL])
def test_a_missing_file_fails(files: Shell, name: str, flag: str) -> None:
    words, file = [word for word in GOOD[name] if word != "--no-report"], "absent/model.onnx"
    words += ["--force"] if name == "train" else []
    if flag:
        file = absent(name, flag)
        words = [*without_data(words, flag), *BESIDE.get((name, flag), ()), flag, file]
    else:
        words[0] = file
    result = files(name, *words)
    assert result.code == 1 and file.partition(":")[0].rpartition("/")[0] in result.err, result.err


@pytest.mark.parametrize("name", GOOD)
def test_wrong_usage(files: Shell, name: str) -> None:
    assert files(name, *GOOD[name], "--no-such-option").code == 2
    if name != "list":
        assert files(name).code == 2


@pytest.mark.parametrize("name", GOOD)
def test_an_empty_path_is_wrong_usage(files: Shell, name: str) -> None:
    for param in params_of(name):
        if isinstance(param, click.Option) and isinstance(param.type, FilePath):
            flag = max(param.opts, key=len)
            result = files(name, *GOOD[name], f"{flag}=")
            assert result.code == 2 and result.facts[0] == "wrong_value" and flag in result.facts, result.err


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("check", ("--original", "."), "--original: '.' is a directory\nhint: name a file\n"),
        ("view", ("--config", "."), "--config: '.' is a directory\nhint: name a file\n"),
        ("build", ("--out-dir", "d.npz"), "--out-dir: 'd.npz' is a file\nhint: name a folder\n"),
        ("evaluate", ("--data", "mlp.onnx"), "can't read data of the format of 'mlp.onnx'"),
        ("train", ("--force", "--data", "broken.npz"), "'broken.npz' can't be read as an .npz file"),
        ("train", ("--run", "new", "--resume", "must"), "'new' contains no checkpoint"),
    ],
)
def test_a_file_of_another_kind_fails(files: Shell, name: str, words: tuple[str, ...], message: str) -> None:
    result = files(name, *without_data(GOOD[name], *words), *words)
    assert message in result.err
    assert result.code == (2 if "format" in message else 1)
