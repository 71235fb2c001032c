"""Print the output of commands: results on stdout, as text or JSON, and messages and errors on stderr.

All text that a command prints passes through this module, which escapes control characters (see `common.escape`).
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO

import click

from onnxgrad_cli.cli.parsing import config
from onnxgrad_cli.cli.parsing.click_option import FilePath, option, together
from onnxgrad_cli.cli.parsing.help import help_of
from onnxgrad_cli.cli.terminal.document import Problem, document, hints_of
from onnxgrad_cli.cli.terminal.failures import chain
from onnxgrad_cli.cli.terminal.github import harmless, on_github, tell_github
from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.escape import escaped, escaped_lines
from onnxgrad_cli.common.flags import as_cli_flags, flag_of
from onnxgrad_cli.common.stdio import abandon

if TYPE_CHECKING:
    from rich.console import RenderableType

    from onnxgrad_cli.errors import Refusal
    from onnxgrad_cli.report import Report


EXIT_CODES = {"built": 0, "stopped": 0, "differentiable": 0, "failed": 1, "usage": 2, "refused": 3, "check_failed": 4}


OUTCOMES = {1: "failed", 2: "failed", 3: "refused", 4: "failed", 130: "interrupted"}
"""Exit code -> the word for it in the last line that a command prints."""


COLORS = {"failed": "red", "refused": "red", "interrupted": "yellow"}


TROUBLE = ("caution: ", "note: ", "warning: ")
"""Prefixes of messages. A message with one of them is also listed as a warning, in JSON and on GitHub."""


PRINTED = ("--tie",)
"""Subjects of cautions that are also printed on stderr, because training may differ from that of the source code."""

_GAP = re.compile(r"(?<=\S)  +(?=\S)")
"""A regular expression for the blanks between two columns of a line."""


class Console:
    """The output of one command, at the requested verbosity.

    With --json, the output is a single JSON document, which is printed at the end (see `cli.terminal.document`).

    Attributes:
        json: True if the result is printed as JSON.
        level: the verbosity: -1 for -q, 0 by default, 1 for -v, 2 for -vv.
        traceback: True if a stack trace is printed with an error.
        mute: True if nothing is printed, because another process of the same run prints. With `traceback`, errors are
            printed nevertheless.
        done: the word for success in the last line; "" for commands that print no such line.
        found: the result to show in the summary of a GitHub workflow instead of `done`, such as numbers.
        models: if the command runs for several models: the document of each; see `cli.batch`.
        at_failure: called with the exit code if a command has failed, after its last output.
        narrate: prints a message; while there is a progress bar, above the bar.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments = list(arguments)
        self.json = "--json" in arguments  # set here so that errors of parsing are printed as JSON too
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
        """The command line as the user typed it."""
        return shlex.join(["onnxgrad", *self.arguments])

    @property
    def name(self) -> str:
        """The name of the command, or "" if the user typed none."""
        return next((word for word in self.arguments if not word.startswith("-")), "")

    def say(self, text: str, level: int = 0) -> None:
        """Print a message on stderr if the verbosity is at least `level`.

        If it is a warning, also add it to the JSON.
        """
        text = as_cli_flags(text)
        if text.startswith(TROUBLE):
            self.warn(text.partition(": ")[2], tell=False)
        if self.level >= level and not self.mute:
            self.narrate(escaped(text))

    def warn(self, text: str, tell: bool = True) -> None:
        """Record a warning, for the JSON output and for annotations on GitHub.

        Args:
            text: a sentence.
            tell: True if the warning is also printed on stderr.
        """
        self._warnings[as_cli_flags(text)] = None
        if tell and self.level >= 0:
            _narrate(escaped(as_cli_flags(text)), "warning:", "yellow")

    def result(self, data: object, text: str, asked: bool = True) -> None:
        """Print a result on stdout: print `text` now, or with --json print `data` at the end.

        Args:
            data: the result as JSON values, or lists, tuples and mappings of them.
            text: the result for people.
            asked: True if the text is the purpose of the command. If False, it only reports the work done, and -q
                suppresses it.

        Raises:
            OSError: stdout can't be written.
        """
        self._result = data
        if not self.json and (asked or self.level >= 0):
            self.print(fitting(text, sys.stdout))

    def writes_to_stdout(self, out: str | None, model: str = "") -> bool:
        """Return True if a command writes its model to stdout: `out` is '-', or `out` is None and `model` is '-'.

        Raises:
            click.UsageError: with --json, the JSON would be written to stdout, too.
        """
        to_stdout = out == "-" or (out is None and model == "-")
        if to_stdout and self.json:
            raise click.UsageError("the model and --json can't both go to stdout: name a file with -o")
        return to_stdout

    def print(self, text: str, newline: bool = True) -> None:
        """Print lines on stdout.

        Raises:
            OSError: stdout can't be written.
        """
        if not self.mute:
            click.echo(harmless(escaped_lines(text)), nl=newline)

    def help(self, text: str) -> None:
        """Print the usage of a command on stderr."""
        if not self.mute:
            _narrate(escaped_lines(text))

    def trace(self, stack: str) -> None:
        """Print a stack trace, with paths relative to the home directory and to the folders of Python's modules."""
        for folder in sorted({*sys.path, os.path.expanduser("~")} - {""}, key=len, reverse=True):
            stack = stack.replace(f"{folder.rstrip(os.sep)}{os.sep}", "")
        _narrate(escaped_lines(stack))

    def error(self, problem: Problem) -> None:
        """Print an error on stderr, with flags in place of arguments, and record the error; see `failed`."""
        raised = sys.exc_info()[1]
        if self.traceback and raised is not None:
            self.trace(_traceback(raised))
        self.tell(asdict(self.failed(problem)))

    def tell(self, problem: Mapping[str, Any], of: str = "") -> None:
        """Print the entry `error` of a JSON document on stderr, with the text `of` in front of its message."""
        if self.mute and not self.traceback:
            return
        _narrate(escaped(f"{of}{problem['message']}"), "error:", "red")
        for text in problem["details"]:
            _narrate(f"  {escaped(text)}")
        for text in hints_of(problem):
            _narrate(escaped(text), "hint:", "cyan")

    def failed(self, problem: Problem) -> Problem:
        """Record a problem for the JSON output and for GitHub's annotations.

        Return a copy that names command-line flags instead of Python arguments, and lists refused nodes in its details.
        """
        refusals = [in_words(refusal) for refusal in problem.refusals]
        self._problem = Problem(
            problem.code,
            as_cli_flags(problem.message),
            problem.argument and flag_of(problem.argument),
            problem.hint and as_cli_flags(problem.hint),
            list(dict.fromkeys([*map(as_cli_flags, problem.details), *map(str, refusals)])),
            refusals,
        )
        return self._problem

    def finish(self, code: int) -> None:
        """Print the JSON document, if --json is given and there is a result or an error.

        Raises:
            OSError: stdout can't be written.
        """
        if code and self._problem is None:
            self.failed(Problem("failed", OUTCOMES.get(code, "failed")))
        if self.json and (self._result is not None or self._problem is not None):
            whole = document(self.name, code, self._result, self._problem, list(self._warnings))
            self.print(strict_json.dumps(whole, indent=2))

    def close(self, code: int) -> None:
        """Print the last line, with the outcome and the duration, and the annotations for GitHub."""
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
        """Print the summary of a report, and return the exit code for its status."""
        from onnxgrad_cli.report import summary
        from onnxgrad_cli.report.model import CONVENTIONS

        code = EXIT_CODES[report.status]
        if self.json or on_github():  # only these two read it, and it takes a moment for a large model
            self._result = asdict(report)
        for caution in report.cautions:
            if caution.kind not in CONVENTIONS:
                self.warn(caution.text, tell=caution.subject in PRINTED and report.diagnosis is None)
        if not self.json and self.level >= 0 and (report.diagnosis or not report.error):
            show(summary(report), sys.stderr if to_stderr else sys.stdout)
        if report.error:
            message, *details = report.error.split("\n")
            lines = list(map(str.strip, details))
            self.error(
                Problem(
                    report.code or "failed", message, report.argument or None, report.hint or None, lines,
                    report.refusals,
                )
            )  # fmt: skip
        return code


def _narrate(text: str, head: str = "", color: str = "") -> None:
    """Print a line on stderr, with a coloured prefix. If stderr is closed, do nothing."""
    line = fitting(f"{head} {text}" if head else text, sys.stderr)
    _echo(harmless(_colored(head, color) + line[len(head) :]))


def _echo(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError:
        abandon(sys.stderr)


def _traceback(error: BaseException) -> str:
    """Return the stack trace of an error. The errors that caused it come first."""
    lines = ["Traceback (most recent call last):"]
    for each in reversed(list(chain(error))):
        frames = escaped_lines("".join(traceback.format_tb(each.__traceback__)))
        lines.append(f"{frames}{type(each).__name__}: {escaped(str(each))}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns and one line per row, which also suits tools such as cut and grep."""
    cells = [[escaped(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def show(renderable: RenderableType, stream: TextIO) -> None:
    """Print a rich renderable on a stream. If the stream is not a terminal, lines are neither wrapped nor padded."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False).print(renderable)
        return
    lines = io.StringIO()
    Console(file=lines, highlight=False, width=10_000).print(renderable)
    text = "\n".join(escaped(line.rstrip()) for line in lines.getvalue().split("\n")[:-1])
    if stream is sys.stderr:
        _narrate(text)
    else:
        click.echo(harmless(text))


def in_words(refusal: Refusal) -> Refusal:
    """Return a refusal in whose texts arguments are replaced by command-line flags."""
    return replace(refusal, reason=as_cli_flags(refusal.reason), hint=as_cli_flags(refusal.hint))


def _colored(text: str, color: str) -> str:
    return text if not text or is_dumb() or os.environ.get("NO_COLOR") else click.style(text, fg=color, bold=True)


def _set(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    setattr(ctx.obj, str(param.name), value)


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.obj.print(help_of(ctx, whole=True))
        ctx.exit()


def _set_level(ctx: click.Context, param: click.Parameter, value: int) -> None:
    if value:
        ctx.obj.level = -1 if param.name == "quiet" else ctx.obj.level + value


speaks = together(
    option("--config", type=FilePath(dir_okay=False), is_eager=True, expose_value=False,
           callback=config.read, metavar="FILE.toml", help="Read options from a TOML file.", common=True),
    option("--json", is_flag=True, is_eager=True, expose_value=False, callback=_set,
           help="Print the result, or the error, as JSON.", common=True),
    option("-v", "--verbose", count=True, is_eager=True, expose_value=False, callback=_set_level,
           help="Print each step, and warnings of other libraries; -vv of `build` checks the graph after "
           "each pass.", section="Logging"),
    option("-q", "--quiet", is_flag=True, is_eager=True, expose_value=False, callback=_set_level,
           help="Print only errors and the result.", section="Logging"),
    option("--traceback", is_flag=True, is_eager=True, expose_value=False, callback=_set,
           help="Show where an error was raised.", section="Logging"),
    option("--help-all", is_flag=True, is_eager=True, expose_value=False, allow_from_autoenv=False,
           callback=_help_all, help="Show this help with all options.", common=True),
)  # fmt: skip
"""A decorator that adds the options common to all commands: --config, --json, -v, -q, --traceback."""


def is_dumb() -> bool:
    """Return True if the terminal does not support escape sequences."""
    return os.environ.get("TERM") == "dumb"


def fitting(text: str, stream: TextIO) -> str:
    """Wrap lines between words at the width of the terminal.

    If the stream is not a terminal, return the text unchanged.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    """Wrap a line that may have columns. Continuation lines are indented to the start of the last column."""
    if len(line) <= width:
        return line
    columns = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= width // 2]
    begin = columns[-1] if columns else 0
    indent = begin or len(line) - len(line.lstrip()) + 2
    close = line[:begin] + _GAP.sub("  ", line[begin:])
    return textwrap.fill(close, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
