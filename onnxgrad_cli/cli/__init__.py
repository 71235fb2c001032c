"""The command line: one module a command, each of which parses, calls one library function and renders.

Nothing here imports onnx, numpy or onnxruntime at its top: help and completion must start at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

import click

from onnxgrad_cli.cli.completion import VARIABLE
from onnxgrad_cli.cli.console import Console
from onnxgrad_cli.cli.failures import failure
from onnxgrad_cli.cli.help import VisibleContext
from onnxgrad_cli.cli.swallowed import refuse_swallowed
from onnxgrad_cli.common.inputs import inputs_kept
from onnxgrad_cli.common.launchers import is_first_here
from onnxgrad_cli.common.streams import abandon, is_of_a_stream

EXIT_CODES = """\b
Exit codes: 0 done, 1 failed, 2 usage, 3 not differentiable or unsupported,
4 a check failed, 130 interrupted."""


NAMES = (
    "build inspect doctor check train evaluate predict export pack tune expand derive explain attack "
    "ops verify-op losses optimizers metrics schedules passes view completion"
).split()
"""The commands, in the order in which they are met."""


class Commands(Mapping[str, click.Command]):
    """The commands by their names: the module of one is loaded when it is asked for, and those of others are not."""

    def __getitem__(self, name: str) -> click.Command:
        """The command of a name.

        Raises:
            KeyError: there is none.
        """
        if name not in NAMES:
            raise KeyError(name)
        word = name.replace("-", "_")
        command: click.Command = getattr(import_module(f"onnxgrad_cli.cli.{word}"), word)
        command.context_class = VisibleContext
        return command

    def __contains__(self, name: object) -> bool:
        """Whether there is a command of a name."""
        return name in NAMES

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(NAMES)

    def __len__(self) -> int:
        """How many there are."""
        return len(NAMES)


class InOrder(click.Group):
    """A group that lists its commands in the order in which they are met."""

    context_class = VisibleContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands as they are listed."""
        return list(self.commands)


@click.group(
    cls=InOrder,
    commands=Commands(),
    epilog=EXIT_CODES,
    context_settings={
        "auto_envvar_prefix": "ONNXGRAD",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, param, value: _version(ctx) if value else None,
    help="Show the version and exit.",
)
def cli() -> None:
    """Turn an ONNX inference model into a training model: a loss and one gradient per weight.

    The result has standard ONNX operators only and runs on the stock onnxruntime.
    """


def _version(ctx: click.Context) -> None:
    from onnxgrad_cli import __version__

    ctx.obj.print(f"onnxgrad {__version__}")
    ctx.exit()


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error is told on stderr, none is raised."""
    console = Console(arguments)
    console.mute = console.name == "train" and not is_first_here()
    try:
        code = _run(console, arguments)
        console.finish(code)
    except OSError as error:  # of stdin or stdout: a file's has become an error of ours
        abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            console.done = ""  # the reader has gone: nobody is there to be told
        else:
            console.error(f"stdin or stdout fails: {error.strerror}", "redirect it to a file")
        code = 1
    console.close(code)
    return code


def _run(console: Console, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code, having told its error."""
    try:
        with warnings.catch_warnings(), inputs_kept():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of a model's numbers: what comes of them is told
            warnings.showwarning = lambda message, category, *_: console.say(f"{category.__name__}: {message}", 1)
            return _invoke(console, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        console.help(error.format_message())
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if is_of_a_stream(error):
            raise
        found = failure(error)
        console.error(found.message, found.hint, found.details, found.refusals)
        return found.code


def _invoke(console: Console, arguments: Sequence[str]) -> int:
    """Run one command line, as click's own `main` does, which takes errors of reading files for interrupts."""
    if instruction := os.environ.get(VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "onnxgrad", VARIABLE, instruction)
    if console.name in cli.commands:
        refuse_swallowed(cli.commands[console.name], arguments[1:])
    try:
        with cli.make_context("onnxgrad", list(arguments), obj=console) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
