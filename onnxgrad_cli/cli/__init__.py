"""The command line. Each command is a module that parses options, calls one library function and prints the result.

No module here imports onnx, numpy or onnxruntime at its top, because help and completion must start fast.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise

import click

from onnxgrad_cli.cli.parsing.help import VisibleContext
from onnxgrad_cli.cli.terminal.console import Console
from onnxgrad_cli.cli.terminal.document import Problem
from onnxgrad_cli.cli.terminal.failures import failure
from onnxgrad_cli.common.inputs import input_protection
from onnxgrad_cli.common.launchers import is_first_here
from onnxgrad_cli.common.stdio import abandon, is_of_a_stream
from onnxgrad_cli.errors import INTERRUPTED, missing_value

EPILOG = """\b
Options of a command: onnxgrad COMMAND --help
Exit codes: 0 success, 1 failure, 2 wrong usage, 3 unsupported model,
            4 failed check, 130 interrupted"""


GROUPS = {
    "Build and check": {
        "build": "Build a training model",
        "check": "Check gradients against finite differences",
        "inspect": "Show what would be trained, and diagnose export problems",
        "derive": "Build a model of derivatives: gradient, Jacobian, Hessian, ...",
    },
    "Train and deploy": {
        "train": "Train a model on data",
        "evaluate": "Measure a model on data",
        "predict": "Write a model's predictions for data",
        "export": "Write trained weights or adapters back into a model",
    },
    "Explain": {"explain": "Attribute a prediction to its inputs", "attack": "Find adversarial inputs"},
    "More": {
        "view": "Draw a model",
        "pack": "Package a model that trains in a web page",
        "tune": "Benchmark gradient implementations on this machine",
        "expand": "Replace training information and Gradient nodes by plain operators",
        "list": "List losses, optimizers, metrics, schedules, passes or operators",
    },
}
"""Heading in the help -> command under this heading -> its summary."""

SUMMARIES = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}


VARIABLE = "_ONNXGRAD_COMPLETE"
"""The environment variable with which a shell requests its completion script, or completions."""


SECONDS_TO_REPORT = 5
"""Seconds that a failed process of a distributed training waits before it ends, if only another process prints.

All processes may fail with the same error, which only the first process prints. As soon as any process ends, a launcher
ends the others. Without the wait, it could end the first process before the error is printed.
"""


class Commands(Mapping[str, click.Command]):
    """A map: name -> command. The module of a command is imported when the command is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        """Return the command with a name.

        Raises:
            KeyError: there is no such command.
        """
        if name not in SUMMARIES:
            raise KeyError(name)
        word = "listing" if name == "list" else name  # a module called list would hide Python's in this package
        command: click.Command = getattr(import_module(f"onnxgrad_cli.cli.commands.{word}"), word)
        command.context_class = VisibleContext
        command.short_help = SUMMARIES[name]
        return command

    def __contains__(self, name: object) -> bool:
        """Return True if there is a command with this name."""
        return name in SUMMARIES

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(SUMMARIES)

    def __len__(self) -> int:
        """Return the number of commands."""
        return len(SUMMARIES)


class Program(click.Group):
    """The group of all commands. Its help lists the commands under headings."""

    context_class = VisibleContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, then the options."""
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:8}", summary) for name, summary in commands.items()])
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(records)


@click.group(
    cls=Program,
    commands=Commands(),
    epilog=EPILOG,
    options_metavar="",
    subcommand_metavar="COMMAND [OPTIONS]",
    context_settings={
        "auto_envvar_prefix": "ONNXGRAD",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, param, value: _version(ctx) if value else None,
    help="Show the version and exit.",
)
def cli() -> None:
    """Turn an ONNX model into a training model: the model, a loss, and one gradient per weight.

    The result consists of standard ONNX operators and runs on the stock onnxruntime.

    \b
      onnxgrad build model.onnx --loss cross-entropy --label y -o train.onnx
    """


def _version(ctx: click.Context) -> None:
    from onnxgrad_cli.common.packages import tool_version

    ctx.obj.print(f"onnxgrad {tool_version()}")
    ctx.exit()


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors are printed on stderr, not raised.

    `help COMMAND` is accepted for `COMMAND --help`.
    """
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    console = Console(arguments)
    console.mute = console.name == "train" and not is_first_here()
    try:
        code = _run(console, arguments)
        console.finish(code)
    except OSError as error:  # raised by stdin or stdout: errors about files are raised as OnnxgradError
        abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            console.done = ""  # the reader has closed the pipe, so no closing line is printed
        else:
            why = f"stdin or stdout can't be used: {error.strerror}"
            console.error(Problem("failed", why, hint="redirect it to a file"))
        code = 1
    console.close(code)
    if console.mute and code not in (0, INTERRUPTED):
        time.sleep(SECONDS_TO_REPORT)
    return code


def _run(console: Console, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. If the command fails, print its error first."""
    try:
        with warnings.catch_warnings(), input_protection():
            # numpy warns about values of a model; their consequences are reported
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.showwarning = lambda message, category, *_: console.say(f"{category.__name__}: {message}", 1)
            return _invoke(console, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        console.help(error.format_message())
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if is_of_a_stream(error):
            raise
        problem, code = failure(error)
        console.error(problem)
        return code


def _invoke(console: Console, arguments: Sequence[str]) -> int:
    """Run one command line without click's `main`, which treats an EOFError as Ctrl-C.

    An EOFError can also come from a truncated file.
    """
    if instruction := os.environ.get(VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "onnxgrad", VARIABLE, instruction)
    if console.name in cli.commands:
        _refuse_swallowed(cli.commands[console.name], arguments[1:])
    try:
        with cli.make_context("onnxgrad", list(arguments), obj=console) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code


def _refuse_swallowed(command: click.Command, arguments: Sequence[str]) -> None:
    """Raise an error if an option lacks its value. click would take the next option as the value.

    Args:
        command: the command that is run.
        arguments: the arguments after the name of the command.

    Raises:
        UsageError: a value is missing.
    """
    options = [param for param in command.params if isinstance(param, click.Option)]
    flags = {flag: option for option in options for flag in (*option.opts, *option.secondary_opts)}
    for flag, value in pairwise(arguments):
        if flag == "--":
            return
        option = flags.get(flag)
        if option is None or option.is_flag or option.count or value not in flags:
            continue
        if not isinstance(option.flag_value, str):  # otherwise the value may be left out
            metavar = option.make_metavar(click.Context(command))
            raise missing_value(
                f"{flag} requires a value, {metavar}, but '{value}' is another option",
                f"give a value; if '{value}' is the value, write {max(option.opts, key=len)}={value}",
            )
