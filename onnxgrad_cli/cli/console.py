"""How every command speaks: results on stdout, as text or JSON; narration and errors on stderr, all told alike.

All that a command prints goes through here, and is made visible on the way (see `common.visible`).
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from onnxgrad_cli.cli.document import Problem, document
from onnxgrad_cli.cli.failures import chain
from onnxgrad_cli.cli.fitting import fitting, is_dumb
from onnxgrad_cli.cli.github import harmless, on_github, tell_github
from onnxgrad_cli.cli.paths import FilePath
from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.streams import abandon
from onnxgrad_cli.common.visible import visible, visible_lines
from onnxgrad_cli.common.wording import in_flags

if TYPE_CHECKING:
    from rich.console import RenderableType

    from onnxgrad_cli.errors import Refusal
    from onnxgrad_cli.report import Report

Command = TypeVar("Command", bound=Callable[..., Any])


EXIT_CODES = {"built": 0, "stopped": 0, "differentiable": 0, "failed": 1, "refused": 3, "check failed": 4}


OUTCOMES = {1: "failed", 2: "failed", 3: "refused", 4: "failed", 130: "interrupted"}
"""What the closing line says of an exit code."""


COLORS = {"failed": "red", "refused": "red", "interrupted": "yellow"}


TROUBLE = ("caution: ", "note: ", "warning: ")
"""What narration begins with that a careful reader should know."""


CONVENTIONS = ("kink", "run-time sum")
"""Kinds of cautions that nearly every model has: they are in the report, and no warnings."""


PRINTED = ("--tie",)
"""Subjects of cautions that are printed, too: what is trained may not be what the model's program is."""


class Console:
    """What a command says, and how loudly.

    As JSON all of it is one document, which is printed at the end: see `cli.document`.

    Attributes:
        json: whether results are JSON.
        level: -1 quiet, 0 normal, 1 -v, 2 -vv.
        traceback: whether errors show where they were raised.
        mute: print nothing, as another process of the same run does; with `traceback` errors are printed all the same.
        done: what the closing line says when all went well; "" for commands without one.
        found: what the summary of a workflow says in its place, such as figures.
        models: the documents of several models, each as `cli.several` has it.
        at_failure: called with the exit code after all has been said, where a command fails.
        narrate: prints a line of narration; above what moves on a terminal, while something does.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments = list(arguments)
        self.json = "--json" in arguments  # known even where the rest can't be parsed
        self.level = 0
        self.traceback = "--traceback" in arguments
        self.mute = False
        self.done = self.found = ""
        self.at_failure: Callable[[int], object] = lambda code: None
        self.narrate: Callable[[str], object] = _narrate
        self.models: list[dict[str, Any]] = []
        self._result: object = None
        self._problem: Problem | None = None
        self._warnings: dict[str, None] = {}
        self._start = time.perf_counter()

    @property
    def command(self) -> str:
        """The command line as it was typed."""
        return shlex.join(["onnxgrad", *self.arguments])

    @property
    def name(self) -> str:
        """The name of the command; "" where none was typed."""
        return next((word for word in self.arguments if not word.startswith("-")), "")

    def say(self, text: str, level: int = 0) -> None:
        """Narrate, on stderr, if the user listens at `level`; what is trouble stands in the JSON too."""
        text = in_flags(text)
        if text.startswith(TROUBLE):
            self.warn(text.partition(": ")[2], tell=False)
        if self.level >= level and not self.mute:
            self.narrate(visible(text))

    def warn(self, text: str, tell: bool = True) -> None:
        """What a careful reader should know: it stands in the JSON and in the annotations of GitHub.

        Args:
            text: a sentence.
            tell: whether it is narrated too.
        """
        self._warnings[in_flags(text)] = None
        if tell and self.level >= 0:
            _narrate(visible(in_flags(text)), "warning:", "yellow")

    def result(self, data: object, text: str, asked: bool = True, verbatim: bool = False) -> None:
        """Print a result on stdout: `text`, or at the end `data` as JSON.

        Args:
            data: what JSON can say, and lists, tuples and mappings of it.
            text: the same for people.
            asked: whether the text is what the command is for; else it tells what was done, which -q silences.
            verbatim: whether its lines are for a program, and are never broken.

        Raises:
            OSError: stdout takes nothing.
        """
        self._result = data
        if not self.json and (asked or self.level >= 0):
            self.print(text if verbatim else fitting(text, sys.stdout))

    def print(self, text: str, newline: bool = True) -> None:
        """Print lines on stdout.

        Raises:
            OSError: stdout takes nothing.
        """
        if not self.mute:
            click.echo(harmless(visible_lines(text)), nl=newline)

    def help(self, text: str) -> None:
        """Print on stderr how a command is to be called."""
        if not self.mute:
            _narrate(visible_lines(text))

    def trace(self, stack: str) -> None:
        """Print where something happened; files are told from the folders of Python's modules, which say whose."""
        for folder in sorted({*sys.path, os.path.expanduser("~")} - {""}, key=len, reverse=True):
            stack = stack.replace(f"{folder.rstrip(os.sep)}{os.sep}", "")
        _narrate(visible_lines(stack))

    def error(
        self,
        message: str,
        hint: str | None = None,
        details: Iterable[str] = (),
        refusals: Iterable[Refusal] = (),
    ) -> None:
        """Tell an error: what happened, then what to do about it.

        Args:
            message: what happened.
            hint: what to do about it.
            details: what there is to say of several things, each in a line of its own under the message.
            refusals: of nodes; they are listed too, if they are not among the details.
        """
        raised = sys.exc_info()[1]
        if self.traceback and raised is not None:
            self.trace(_traceback(raised))
        self.tell(asdict(self.failed(message, hint, details, refusals)))

    def tell(self, problem: Mapping[str, Any], of: str = "") -> None:
        """Print on stderr what the `error` of a document says, `of` whatever stands before it."""
        if self.mute and not self.traceback:
            return
        hints = dict.fromkeys(text for text in (problem["hint"], *(r["hint"] for r in problem["refusals"])) if text)
        _narrate(visible(f"{of}{problem['message']}"), "error:", "red")
        for text in problem["details"]:
            _narrate(f"  {visible(text)}")
        for text in hints:
            _narrate(visible(text), "hint:", "cyan")

    def failed(
        self,
        message: str,
        hint: str | None = None,
        details: Iterable[str] = (),
        refusals: Iterable[Refusal] = (),
    ) -> Problem:
        """Keep for the JSON and for GitHub why the command fails, where people are told by its result; see `error`."""
        found = [in_words(refusal) for refusal in refusals]
        listed = dict.fromkeys([*map(in_flags, details), *map(str, found)])
        self._problem = Problem(in_flags(message), hint and in_flags(hint), list(listed), found)
        return self._problem

    def finish(self, code: int) -> None:
        """Print the JSON document, where JSON was asked for and there is something to say.

        Raises:
            OSError: stdout takes nothing.
        """
        if code and self._problem is None:
            self.failed(OUTCOMES.get(code, "failed"))
        if self.json and (self._result is not None or self._problem is not None):
            whole = document(self.name, code, self._result, self._problem, list(self._warnings))
            self.print(strict_json.dumps(whole, indent=2))

    def close(self, code: int) -> None:
        """The last line: how it ended and how long it took; and what GitHub is told."""
        seconds = time.perf_counter() - self._start
        if self.done and self.level >= 0 and not self.mute:
            word = OUTCOMES.get(code, self.done)
            _narrate(f"| {seconds:.2f} s", word, COLORS.get(word, "green"))
        if on_github() and not self.mute:
            told = document(self.name, code, self._result, self._problem, list(self._warnings))
            for line in tell_github(told, self.models, self.arguments, seconds, self.found or self.done):
                _echo(line)
        if code:
            self.at_failure(code)

    def report(self, report: Report, to_stderr: bool = False) -> int:
        """Print a report, in short, and return the exit code it means."""
        from onnxgrad_cli.report import summary

        code = EXIT_CODES[report.status]
        if self.json or on_github():  # which is for nobody else, and takes a moment of a large model
            self._result = asdict(report)
        for caution in report.cautions:
            if caution.kind not in CONVENTIONS:
                self.warn(caution.text, tell=caution.subject in PRINTED)
        if report.error:
            message, *details = report.error.split("\n")
            self.error(message, report.hint or None, map(str.strip, details), report.refusals)
        elif not self.json and self.level >= 0:
            show(summary(report), sys.stderr if to_stderr else sys.stdout)
        return code


def _narrate(text: str, head: str = "", color: str = "") -> None:
    """Print a line on stderr, after a coloured head; where nobody can take it, nobody is told."""
    line = fitting(f"{head} {text}" if head else text, sys.stderr)
    _echo(harmless(_colored(head, color) + line[len(head) :]))


def _echo(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError:
        abandon(sys.stderr)


def _traceback(error: BaseException) -> str:
    """Where an error was raised, and before it what led to it."""
    lines = ["Traceback (most recent call last):"]
    for each in reversed(list(chain(error))):
        frames = visible_lines("".join(traceback.format_tb(each.__traceback__)))
        lines.append(f"{frames}{type(each).__name__}: {visible(str(each))}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, one a line, for the eye and for cut and grep."""
    cells = [[visible(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def show(renderable: RenderableType, stream: TextIO) -> None:
    """Print something of rich's on a stream; where no terminal reads it, lines are neither broken nor padded."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False).print(renderable)
        return
    lines = io.StringIO()
    Console(file=lines, highlight=False, width=10_000).print(renderable)
    text = "\n".join(visible(line.rstrip()) for line in lines.getvalue().split("\n")[:-1])
    if stream is sys.stderr:
        _narrate(text)
    else:
        click.echo(harmless(text))


def in_words(refusal: Refusal) -> Refusal:
    """A refusal in the words of the command line."""
    return replace(refusal, reason=in_flags(refusal.reason), hint=in_flags(refusal.hint))


def _colored(text: str, color: str) -> str:
    return text if not text or is_dumb() or os.environ.get("NO_COLOR") else click.style(text, fg=color, bold=True)


def speaks(command: Command) -> Command:
    """Give a command the options that all have: --config, --json, -v, -q, --traceback."""
    from onnxgrad_cli.cli.config import read

    for option in (
        click.option("--help-all", is_flag=True, is_eager=True, expose_value=False, allow_from_autoenv=False,
                     callback=_help_all, help="Show this help with all options."),
        click.option("--traceback", is_flag=True, is_eager=True, expose_value=False, callback=_set("traceback"),
                     help="Show where an error was raised."),
        click.option("-q", "--quiet", is_flag=True, is_eager=True, expose_value=False, callback=_quiet,
                     help="Print nothing but errors and what was asked for."),
        click.option("-v", "--verbose", count=True, is_eager=True, expose_value=False, callback=_verbose,
                     help="Narrate each pass; -vv checks the graph after each."),
        click.option("--json", is_flag=True, is_eager=True, expose_value=False, callback=_set("json"),
                     help="Print the result, or the error, as JSON."),
        click.option("--config", type=FilePath(dir_okay=False), is_eager=True, expose_value=False,
                     callback=read, metavar="FILE.toml", help="Read options from a TOML file."),
    ):  # fmt: skip
        command = option(command)
    return command


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        setattr(ctx.obj, name, value)

    return callback


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    from onnxgrad_cli.cli.help import help_of

    if value:
        ctx.obj.print(help_of(ctx, whole=True))
        ctx.exit()


def _quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.obj.level = -1


def _verbose(ctx: click.Context, param: click.Parameter, value: int) -> None:
    ctx.obj.level += value


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Rows as the lines of a Markdown table."""
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return (
        [f"| {line} |" for line in (" | ".join(head), " | ".join("---" for _ in head), *lines)] if lines else ["None."]
    )
