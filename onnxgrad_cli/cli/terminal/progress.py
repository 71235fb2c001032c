"""Show the progress of a training: print a line for each epoch, and on a terminal a progress bar below the lines.

If stderr is a pipe or a file, only the lines are printed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from onnxgrad_cli.cli.terminal.console import Console, fitting, is_dumb
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import as_cli_flags
from onnxgrad_cli.common.stdio import abandon

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.progress import Progress

    from onnxgrad_cli.training.run.watch import Judged, Stepped, Watch

REFRESH = 0.1
"""Minimum number of seconds between two updates of the progress bar. Steps may take much less time."""


def is_terminal() -> bool:
    """Return True if stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and not is_dumb()


@contextmanager
def training(console: Console) -> Iterator[Watch]:
    """In the block, print a line for each evaluation of a training.

    On a terminal, also show a progress bar below the lines.

    Returns:
        The function to call with the events of the training: steps and evaluations.
    """
    from onnxgrad_cli.training.run.watch import unwatched

    if console.level < 0:
        yield unwatched
    elif not is_terminal():
        yield partial(_tell, console, None)
    else:
        from rich.console import Console as Terminal

        terminal = Terminal(stderr=True, highlight=False)
        with above(console, terminal), bar_on(terminal) as bar:
            yield partial(_tell, console, bar)


def _tell(console: Console, bar: Bar | None, event: Stepped | Judged) -> None:
    from onnxgrad_cli.training.run.watch import Stepped

    if isinstance(event, Stepped):
        if bar is not None:
            bar.show(event)
    else:
        console.narrate(fitted(map(escaped, judged_words(event)), bar.width if bar is not None else None))


def judged_words(event: Judged) -> list[str]:
    """Return the parts of the line about an evaluation. Lines are wrapped between parts only."""
    from onnxgrad_cli.report.formatting import figure

    place = f"epoch {event.epoch}/{event.epochs}" if event.ends else f"step {event.step}/{event.steps}"
    words = [place, *(f"{name} {figure(value)}" for name, value in event.results.items()), *_rate(event)]
    if math.isfinite(event.speed):
        words.append(f"{figure(event.speed)} samples/s")
    if event.step < event.steps and math.isfinite(event.left):
        words.append(f"{clock(event.left)} left")
    return [*words, "best"] if event.best and "val_loss" in event.results else words


def _rate(event: Stepped | Judged) -> list[str]:
    """Return the learning rate in words, as a list. It is empty for an optimizer without a learning rate."""
    return [f"rate {event.rate:.3g}"] if math.isfinite(event.rate) else []


def clock(seconds: float) -> str:
    """Format a duration as a clock: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fitted(words: Iterable[str], width: int | None) -> str:
    """Join the parts of a line.

    If the line is wider than `width`, break it between parts, and indent the later lines.
    """
    lines: list[str] = []
    for word in words:
        if lines and (width is None or len(lines[-1]) + 2 + len(word) <= width):
            lines[-1] += f"  {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    return "\n".join(lines)


class Bar:
    """A progress bar for the steps of a training: epoch, step, loss, learning rate and remaining time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None
        self._shown = -math.inf

    @property
    def width(self) -> int:
        """The number of columns of the terminal."""
        return self._progress.console.width

    def show(self, event: Stepped) -> None:
        """Update the bar with a step, unless the last update was too recent."""
        from onnxgrad_cli.report.formatting import figure

        now = time.monotonic()
        if now - self._shown < REFRESH and event.step < event.steps:
            return
        self._shown = now
        if self._task is None:
            self._task = self._progress.add_task("", total=event.steps, completed=event.step - 1, epoch="", words="")
        self._progress.update(
            self._task, completed=event.step, epoch=f"epoch {event.epoch}/{event.epochs}",
            words="  ".join([f"step {event.step}/{event.steps}", f"loss {figure(event.loss)}", *_rate(event)]),
        )  # fmt: skip


@contextmanager
def bar_on(terminal: Terminal) -> Iterator[Bar]:
    """Show a progress bar on a terminal while the block runs."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = BarColumn(bar_width=max(5, min(40, terminal.width - 64)))
    columns = TextColumn("{task.fields[epoch]}"), bar, TextColumn("{task.fields[words]}"), TimeRemainingColumn(True)
    progress = Progress(*columns, console=terminal, transient=True, redirect_stdout=False, redirect_stderr=False)
    progress.start()
    try:
        yield Bar(progress)
    finally:
        with suppress(OSError):  # the terminal may have gone
            progress.stop()


@contextmanager
def above(console: Console, terminal: Terminal) -> Iterator[None]:
    """While the block runs, print the messages of a console above the progress bar."""
    from rich.text import Text

    def say(text: str) -> None:
        try:
            terminal.print(Text(fitting(text, sys.stderr)), soft_wrap=True)
        except OSError:
            abandon(sys.stderr)

    before, console.narrate = console.narrate, say
    try:
        yield
    finally:
        console.narrate = before


@contextmanager
def working(console: Console, seconds: float = 2.0) -> Iterator[Callable[[str, int], None]]:
    """Show the current task on a terminal, in a line that appears after `seconds` and disappears after the block.

    Returns:
        The function to call with messages. The line shows the last message.
    """
    if console.level != 0 or not is_terminal():
        yield console.say
        return
    from threading import Timer

    from rich.console import Console as Terminal
    from rich.markup import escape
    from rich.status import Status

    terminal = Terminal(stderr=True, highlight=False)
    status = Status("reading the model", console=terminal)
    timer = Timer(seconds, status.start)
    timer.daemon = True

    def tell(text: str, level: int = 0) -> None:
        if level == 1:
            status.update(escape(escaped(as_cli_flags(text)))[: terminal.width - 4])
        console.say(text, level)

    with above(console, terminal):
        timer.start()
        try:
            yield tell
        finally:
            timer.cancel()
            if timer.is_alive():
                timer.join()
            with suppress(OSError):
                status.stop()
