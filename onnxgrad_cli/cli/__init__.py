"""The command line: one module a command, each of which parses, calls one library function and renders.

Nothing here imports onnx, numpy or onnxruntime at its top: help and completion must start at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

import click

from onnxgrad_cli.cli.attack import attack
from onnxgrad_cli.cli.build import build
from onnxgrad_cli.cli.check import check
from onnxgrad_cli.cli.completion import VARIABLE, completion
from onnxgrad_cli.cli.console import Console
from onnxgrad_cli.cli.derive import derive
from onnxgrad_cli.cli.doctor import doctor
from onnxgrad_cli.cli.evaluate import evaluate
from onnxgrad_cli.cli.expand import expand
from onnxgrad_cli.cli.explain import explain
from onnxgrad_cli.cli.export import export
from onnxgrad_cli.cli.failures import failure
from onnxgrad_cli.cli.help import VisibleContext
from onnxgrad_cli.cli.inspect import inspect
from onnxgrad_cli.cli.losses import losses
from onnxgrad_cli.cli.metrics import metrics
from onnxgrad_cli.cli.ops import ops
from onnxgrad_cli.cli.optimizers import optimizers
from onnxgrad_cli.cli.pack import pack
from onnxgrad_cli.cli.passes import passes
from onnxgrad_cli.cli.predict import predict
from onnxgrad_cli.cli.schedules import schedules
from onnxgrad_cli.cli.swallowed import refuse_swallowed
from onnxgrad_cli.cli.train import train
from onnxgrad_cli.cli.tune import tune
from onnxgrad_cli.cli.verify_op import verify_op
from onnxgrad_cli.cli.view import view
from onnxgrad_cli.common.streams import abandon, is_of_a_stream

EXIT_CODES = """\b
Exit codes: 0 done, 1 failed, 2 usage, 3 not differentiable or unsupported,
4 a check failed, 130 interrupted."""


class InOrder(click.Group):
    """A group that lists its commands in the order in which they are met."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands as they were added."""
        return list(self.commands)


@click.group(
    cls=InOrder,
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


for _command in (
    build,
    inspect,
    doctor,
    check,
    train,
    evaluate,
    predict,
    export,
    pack,
    tune,
    expand,
    derive,
    explain,
    attack,
    ops,
    verify_op,
    losses,
    optimizers,
    metrics,
    schedules,
    passes,
    view,
    completion,
):
    cli.add_command(_command)

for _command in (cli, *cli.commands.values()):
    _command.context_class = VisibleContext


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error is told on stderr, none is raised."""
    console = Console(arguments)
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
        with warnings.catch_warnings():
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
