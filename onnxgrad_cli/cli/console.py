"""How every command speaks: results on stdout, as text or JSON; narration and errors on stderr, all told alike."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.wording import in_flags

if TYPE_CHECKING:
    from rich.console import RenderableType

    from onnxgrad_cli.errors import Refusal
    from onnxgrad_cli.report import Report

Command = TypeVar("Command", bound=Callable[..., Any])


EXIT_CODES = {"built": 0, "stopped": 0, "differentiable": 0, "failed": 1, "refused": 3, "check failed": 4}


OUTCOMES = {1: "failed", 2: "failed", 3: "refused", 4: "failed", 130: "interrupted"}


COLORS = {"failed": "red", "refused": "red", "interrupted": "yellow"}


class Console:
    """What a command says, and how loudly.

    Attributes:
        json: whether results are JSON.
        level: -1 quiet, 0 normal, 1 -v, 2 -vv.
        traceback: whether errors show where they were raised.
        done: what the closing line says when all went well; "" for commands without one.
        at_failure: called with the exit code after all has been said, where a command fails.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.arguments = list(arguments)
        self.json = "--json" in arguments  # known even where the rest can't be parsed
        self.level = 0
        self.traceback = "--traceback" in arguments
        self.done = ""
        self.at_failure: Callable[[int], object] = lambda code: None
        self._start = time.perf_counter()

    @property
    def command(self) -> str:
        """The command line as it was typed."""
        return shlex.join(["onnxgrad", *self.arguments])

    def say(self, text: str, level: int = 0) -> None:
        """Narrate, on stderr, if the user listens at `level`."""
        if self.level >= level:
            click.echo(in_flags(text), err=True)

    def result(self, data: object, text: str) -> None:
        """Print a result on stdout: `data` as JSON, or else `text`."""
        click.echo(strict_json.dumps(data, indent=2, ensure_ascii=False) if self.json else text)

    def error(
        self,
        message: str,
        hint: str | None = None,
        refusals: Iterable[Refusal] = (),
        code: int = 1,
        as_json: bool | None = None,
    ) -> None:
        """Tell an error: what happened, then what to do about it."""
        if self.traceback and sys.exc_info()[0] is not None:
            traceback.print_exc()
        message, hint = in_flags(message), hint and in_flags(hint)
        refusals = [in_words(refusal) for refusal in refusals]
        hints = dict.fromkeys(text for text in (hint, *(r.hint for r in refusals)) if text)
        listed = [str(refusal) for refusal in refusals]
        shown = "\n".join([message, *(f"  {line}" for line in listed if line not in message)])
        click.echo(f"{_colored('error:', 'red')} {shown}", err=True)
        for text in hints:
            click.echo(f"{_colored('hint:', 'cyan')} {text}", err=True)
        if self.json if as_json is None else as_json:
            nodes = [vars(refusal) for refusal in refusals]
            what = {"message": message, "hint": hint, "refusals": nodes, "exit_code": code}
            click.echo(json.dumps({"error": what}, indent=2, ensure_ascii=False))

    def close(self, code: int) -> None:
        """The last line: how it ended, how long it took, what was run."""
        if self.done and self.level >= 0:
            word = OUTCOMES.get(code, self.done)
            seconds = time.perf_counter() - self._start
            self.say(f"{_colored(word, COLORS.get(word, 'green'))} | {seconds:.2f} s | {self.command}")
        if code:
            self.at_failure(code)

    def report(self, report: Report, to_stderr: bool = False) -> int:
        """Print a report, in short, and return the exit code it means."""
        from onnxgrad_cli.report import render, summary

        code = EXIT_CODES[report.status]
        if self.json:
            click.echo(render(report, "json"), nl=False)
        if report.error:
            self.error(report.error, report.hint, report.refusals, code, as_json=False)
        elif not self.json and self.level >= 0:
            show(summary(report), sys.stderr if to_stderr else sys.stdout)
        return code


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, one a line, for the eye and for cut and grep."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)


def show(renderable: RenderableType, stream: TextIO) -> None:
    """Print something of rich's on a stream; where no terminal reads it, lines are neither broken nor padded."""
    from rich.console import Console

    if stream.isatty():
        Console(file=stream, highlight=False).print(renderable)
        return
    lines = io.StringIO()
    Console(file=lines, highlight=False, width=10_000).print(renderable)
    click.echo("\n".join(map(str.rstrip, lines.getvalue().splitlines())), file=stream)


def in_words(refusal: Refusal) -> Refusal:
    """A refusal in the words of the command line."""
    return replace(refusal, reason=in_flags(refusal.reason), hint=in_flags(refusal.hint))


def _colored(text: str, color: str) -> str:
    return text if "NO_COLOR" in os.environ else click.style(text, fg=color, bold=True)


def speaks(command: Command) -> Command:
    """Give a command the options that all have: --config, --json, -v, -q, --traceback."""
    from onnxgrad_cli.cli.config import read

    for option in (
        click.option("--traceback", is_flag=True, is_eager=True, expose_value=False, callback=_set("traceback"),
                     help="Show where an error was raised."),
        click.option("-q", "--quiet", is_flag=True, is_eager=True, expose_value=False, callback=_quiet,
                     help="Print nothing but errors and what was asked for."),
        click.option("-v", "--verbose", count=True, is_eager=True, expose_value=False, callback=_verbose,
                     help="Narrate each pass; -vv checks the graph after each."),
        click.option("--json", is_flag=True, is_eager=True, expose_value=False, callback=_set("json"),
                     help="Print the result as JSON."),
        click.option("--config", type=click.Path(dir_okay=False), is_eager=True, expose_value=False,
                     callback=read, metavar="FILE.toml", help="Read options from a TOML file."),
    ):  # fmt: skip
        command = option(command)
    return command


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        setattr(ctx.obj, name, value)

    return callback


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
