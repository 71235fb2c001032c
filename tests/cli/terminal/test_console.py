"""What stays on a terminal of 80 and of 120 columns, on a dumb one, without colours, and what goes into a pipe."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from onnxgrad_cli.cli.terminal.console import fitting
from tests.cli_harness import PROGRAM
from tests.terminal import Recording, record

SAMPLES = Path(__file__).parents[3] / "sample_models"
DATA = ("--data", "digits.npz", "--label", "y")
LOSS = ("--loss", "cross-entropy")
COMMANDS = {
    "train": (
        *("train", "digits_cnn.onnx", *DATA, *LOSS, "--prefix", "train_", "--val", "0.2", "--epochs", "2"),
        *("--batch-size", "128", "--metric", "accuracy", "--metric", "f1-macro", "-o", "trained.onnx"),
    ),
    "build": ("build", "digits_cnn.onnx", *LOSS, "-o", "again.onnx", "--train", "fc2.*", "--dim", "batch=3"),
    "evaluate": ("evaluate", "digits_cnn.onnx", *DATA, *LOSS, "--prefix", "test_", "--metric", "top-k"),
    "explain": (
        *("explain", "digits_cnn.onnx", "--data", "digits.npz", "--prefix", "test_", "--sample", "0", "--sample", "1"),
        *("--method", "integrated-gradients", "-o", "why.npz"),
    ),
    "check": ("check", "train.onnx"),
    "inspect": ("inspect", "digits_cnn.onnx"),
}
WORDS = {
    "train": ["287 of 1437 samples are held out for validation", "epoch 2/2", "best by validation accuracy", "trained"],
    "build": ["Built and proved: every check passed.", "next onnxgrad train", "built"],
    "evaluate": ["360 samples", "top-k", "label \\ predicted"],
    "explain": ["integrated gradients in 50 steps", "gradients proved", "wrote why.npz", "explained"],
    "check": ["passed gradients against differences of the loss", "proved"],
    "inspect": ["Differentiable: 12 weights will get a gradient.", "running variance of a BatchNormalization"],
}
"""Of each, words that can be read in the end."""

TERMINALS: dict[str, tuple[int, dict[str, str]]] = {
    "80": (80, {}),
    "120": (120, {}),
    "NO_COLOR": (80, {"NO_COLOR": "1"}),
    "dumb": (80, {"TERM": "dumb"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its data, and a training model that was built before."""
    folder = tmp_path_factory.mktemp("terminals")
    for name in ("digits_cnn.onnx", "digits.npz"):
        (folder / name).symlink_to(SAMPLES / name)
    build = [*PROGRAM, "build", "digits_cnn.onnx", *LOSS, "-o", "train.onnx", "-q"]
    subprocess.run(build, cwd=folder, check=True)
    return folder


def told(text: str) -> str:
    """Words in turn, however they were broken into lines; figures and durations are all alike."""
    plain = re.sub(r"\d[\d.,:]*(e[-+]\d+)?(%| m?s\b)?", "#", text)
    return " ".join(plain.split())


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.thinned(3)
def test_a_command_on_each_terminal(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shown = {name: recorded(command, name) for name in TERMINALS}
    wide = told("\n".join(shown["120"].stays()))
    for name, (width, _) in TERMINALS.items():
        recording, stays = shown[name], shown[name].stays()
        assert [line for line in recording.lines if len(line) > width] == [], name
        assert not any("━" in line for line in stays), f"{name}: the bar goes when it is over"
        assert command == "train" or told("\n".join(stays)) == wide, f"{name}: nothing is lost where it is narrow"
        words = " ".join(" ".join(stays).split())
        assert [word for word in WORDS[command] if word not in words] == []
    assert not shown["NO_COLOR"].colored and "\x1b" not in shown["dumb"].sent
    assert command == "train" or ("\r\n" in shown["dumb"].sent and "\r" not in shown["dumb"].sent.replace("\r\n", ""))


def recorded(command: str, name: str) -> Recording:
    width, environment = TERMINALS[name]
    found = record(*COMMANDS[command], *afresh(command, name), width=width, **environment)
    assert found.code == 0, found.sent
    return found


def afresh(command: str, name: str) -> list[str]:
    """A run folder of its own for each training."""
    return ["--run", f"run_{name}"] if command == "train" else []


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.thinned(3)
def test_in_a_pipe_nothing_moves_and_no_line_is_broken(command: str, folder: Path) -> None:
    words = [*PROGRAM, *COMMANDS[command], *afresh(command, "pipe")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
    text = " ".join(f"{done.stderr} {done.stdout}".split())
    assert [word for word in WORDS[command] if word not in text] == []
    if command != "evaluate" and command != "inspect":  # which say how they ended by what they print
        assert done.stderr.rstrip().split("\n")[-1].startswith(f"{WORDS[command][-1]} | "), "the last line is whole"


class Terminal:
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("a sentence that is longer than all that fits", ["a sentence that is longer than", "  all that fits"]),
        ("  the node: a reason that is longer yet", ["  the node: a reason that is", "    longer yet"]),
        ("passed  gradients against differences", ["passed  gradients against", "        differences"]),
        ("Abs        ai.onnx        rule     at 0", ["Abs        ai.onnx  rule  at 0"]),
        ("see /a/path/that/is/longer/than/any-line/at/all", ["see", "  /a/path/that/is/longer/than/any-line/at/all"]),
        ("one\nand two", ["one", "and two"]),
    ],
)
def test_lines_are_broken_between_words(text: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert fitting(text, Terminal()).split("\n") == lines  # type: ignore[arg-type]


def test_nothing_is_broken_but_on_a_terminal(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        assert fitting("word " * 100, file) == "word " * 100
