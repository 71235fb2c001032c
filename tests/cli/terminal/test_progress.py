"""What is told while a training goes on: on terminals of 80 and 120 columns, a dumb one, without colours, in a pipe."""

from __future__ import annotations

import io
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rich.status
from rich.console import Console as Terminal

from onnxgrad_cli.cli.terminal import progress
from onnxgrad_cli.cli.terminal.console import Console
from onnxgrad_cli.training.run.watch import Judged, Stepped
from tests.cli_harness import MLP, PROGRAM, Shell, save
from tests.jobs.train.test_train import shell as shell
from tests.terminal import record

EPOCH = Judged(
    45, 90, 1, 2, 1e-3, {"loss": 0.693147, "val_loss": 3e-6, "val_accuracy": 0.8125, "val_f1-macro": 0.75},
    1234.4, 65.2, True, True,
)  # fmt: skip
ONE_LINE = (
    "epoch 1/2  loss 0.6931  val_loss 3.000e-06  val_accuracy 0.8125  val_f1-macro 0.7500  rate 0.001  "
    "1,234 samples/s  1:05 left  best"
)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, [ONE_LINE]),
        (120, [ONE_LINE.removesuffix("  1:05 left  best"), "    1:05 left  best"]),
        (80, ["epoch 1/2  loss 0.6931  val_loss 3.000e-06  val_accuracy 0.8125",
              "    val_f1-macro 0.7500  rate 0.001  1,234 samples/s  1:05 left  best"]),
    ],
)  # fmt: skip
def test_the_line_of_an_epoch_fits_the_terminal(width: int | None, lines: list[str]) -> None:
    assert progress.fitted(progress.judged_words(EPOCH), width).split("\n") == lines
    assert all(len(line) <= (width or 1000) for line in lines)


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (750, "12:30"), (3723, "1:02:03"), (59.6, "1:00")])
def test_a_clock(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text


def step(number: int) -> Stepped:
    return Stepped(number, 1000, 1, 10, 3e-6, 0.001)


BARS = {
    80: "epoch 1/10 ━━━━━━━━━━━━━━━━ step 1000/1000  loss 3.000e-06  rate 0.001 00:00",
    120: "epoch 1/10 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ step 1000/1000  loss 3.000e-06  rate 0.001 00:00",
}


@pytest.mark.parametrize("width", BARS)
@pytest.mark.parametrize("colors", [True, False])
def test_the_bar_has_epoch_step_loss_and_rate_and_messages_stand_above_it(
    width: int, colors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colors:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    terminal = Terminal(file=stream, force_terminal=True, width=width, highlight=False, legacy_windows=False)
    console = Console()
    with progress.above(console, terminal), progress.bar_on(terminal) as bar:
        bar.show(step(1))
        console.say("120 of 600 samples are held out [red]", 0)
        bar.show(step(1000))
    text = stream.getvalue()
    assert bool(re.search(r"\x1b\[[0-9;]*3\dm|\x1b\[90m|38;5", text)) is colors
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    assert "120 of 600 samples are held out [red]" in shown and BARS[width] in shown
    assert all(len(line) <= width for line in shown)


TRAIN = ("train", "mlp.onnx", "--data", "data.npz", "--val", "0.2", "--epochs", "2", "--threads", "1", "-o", "t.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["xterm", "NO_COLOR", "dumb"])
def test_on_a_terminal(shell: Shell, environment: dict[str, str]) -> None:
    shown = record(*TRAIN, **environment)
    assert shown.code == 0, shown.sent
    epochs = [line for line in shown.lines if re.match(r"epoch \d/2  loss ", line)]
    assert len(epochs) == 2 and any("10 of 50 " in line for line in shown.lines)
    moves = environment.get("TERM") != "dumb"
    assert ("━" in shown.sent) is moves and ("\x1b[2K" in shown.sent) is moves
    assert not any("━" in line for line in shown.stays()), "the bar goes when it is over"
    if moves:
        assert any(line.startswith("epoch 2 of 2, best by validation loss, ") for line in shown.stays())
        assert not any(line.startswith("epoch  loss") for line in shown.lines)  # what was told is not told again


def test_in_a_pipe_there_are_plain_lines(shell: Shell) -> None:
    done = shell(*TRAIN)
    lines = [line for line in done.err.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"] and all("samples/s" in line for line in lines)
    assert "━" not in done.err and "\r" not in done.err and "\x1b[?25" not in done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ["loss", "validation", "epoch"]


def test_quiet_is_quiet_and_json_is_json(shell: Shell) -> None:
    done = shell(*TRAIN, "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = shell(*TRAIN, "-q", "--json", "--run", "other")
    assert len(done.json["epochs"]) == 2 and done.err == ""


@pytest.mark.slow
def test_an_epoch_is_told_when_it_is_over(shell: Shell) -> None:
    """The first line can be read while the run goes on: it waits for nothing."""
    command = [*PROGRAM, *TRAIN, "--epochs", "100000", "--max-steps", "100000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = next(line for line in process.stderr if line.startswith("epoch 1/100000 "))
        assert process.poll() is None and "left" in first
        process.kill()


@pytest.mark.parametrize(("delay", "shown"), [(0.0, True), (60.0, False)])
def test_what_takes_long_is_told_on_a_terminal_until_it_ends(
    delay: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich.console

    stream, console, drawn = io.StringIO(), Console(), threading.Event()
    terminal = Terminal(file=stream, force_terminal=True, width=80, legacy_windows=False)
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(rich.console, "Console", lambda **_: terminal)
    monkeypatch.setattr(stream, "flush", drawn.set)
    with progress.working(console, delay) as tell:
        tell("checking: gradients [bold]", 1)
        assert not shown or drawn.wait(5)
        tell("3 samples are left out", 0)
    text = stream.getvalue()
    assert ("\x1b[?25l" in text) is shown and text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K" if shown else "left out\n")
    assert ("checking: gradients [bold]" in text) is shown and "3 samples are left out" in text


def test_in_a_pipe_nothing_is_told_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    with progress.working(console, 0.0) as tell:
        assert tell == console.say


SLOW = {
    "attack": "--data data.npz",
    "build": "-o other.onnx",
    "check": "",
    "derive": "-o derived.onnx",
    "evaluate": "--data data.npz",
    "expand": "-o expanded.onnx",
    "explain": "--data data.npz",
    "export": "--model mlp.onnx",
    "inspect": "",
    "predict": "--data data.npz",
    "tune": "--repeat 1 --size batch=2",
    "view": "-o mlp.html",
}
SUBJECTS = {"check": "train.onnx", "export": "weights.safetensors"}


class AtOnce(threading.Timer):
    """A timer that does not wait."""

    def __init__(self, interval: float, function: Callable[[], object]) -> None:
        super().__init__(0, function)

    def start(self) -> None:
        self.function()


@pytest.mark.parametrize("command", SLOW)
def test_every_command_that_may_take_long_tells_what_it_does(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save_file

    shown: list[str] = []

    class Line(rich.status.Status):
        def start(self) -> None:
            shown.append("begun")

        def stop(self) -> None:
            shown.append("ended")

    monkeypatch.chdir(tmp_path)
    shell, rng = Shell(tmp_path, capsys), np.random.default_rng(0)
    save(MLP, tmp_path / "mlp.onnx")
    if command == "check":
        assert shell("build", "mlp.onnx", "-o", "train.onnx", "-q").code == 0
    np.savez("data.npz", x=rng.random((8, 4), np.float32), label=rng.random((8, 2), np.float32))
    save_file({"b1": np.zeros(3, np.float32)}, "weights.safetensors")
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(rich.status, "Status", Line)
    monkeypatch.setattr(threading, "Timer", AtOnce)
    found = shell(command, SUBJECTS.get(command, "mlp.onnx"), *SLOW[command].split())
    assert found.code == 0, found.err
    assert shown == ["begun", "ended"]
