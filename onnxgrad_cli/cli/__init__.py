"""The command line: one module a command, each of which parses, calls one library function and renders.

Nothing here imports onnx, numpy or onnxruntime at its top: help and completion must start at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from onnxgrad_cli.cli.build import build
from onnxgrad_cli.cli.check import check
from onnxgrad_cli.cli.console import Console
from onnxgrad_cli.cli.derive import derive
from onnxgrad_cli.cli.doctor import doctor
from onnxgrad_cli.cli.expand import expand
from onnxgrad_cli.cli.export import export
from onnxgrad_cli.cli.inspect import inspect
from onnxgrad_cli.cli.losses import losses
from onnxgrad_cli.cli.ops import ops
from onnxgrad_cli.cli.optimizers import optimizers
from onnxgrad_cli.cli.passes import passes
from onnxgrad_cli.cli.train import train
from onnxgrad_cli.cli.tune import tune
from onnxgrad_cli.cli.verify_op import verify_op
from onnxgrad_cli.cli.view import view
from onnxgrad_cli.errors import OnnxgradError

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

    click.echo(f"onnxgrad {__version__}")
    ctx.exit()


for _command in (
    build,
    inspect,
    doctor,
    check,
    train,
    export,
    tune,
    expand,
    derive,
    ops,
    verify_op,
    losses,
    optimizers,
    passes,
    view,
):
    cli.add_command(_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error is told on stderr, none is raised."""
    console = Console(arguments)
    try:
        code = cli.main(list(arguments), prog_name="onnxgrad", standalone_mode=False, obj=console) or 0
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "onnxgrad"
        console.error(error.format_message(), f"see '{path} --help'", code=error.exit_code)
        code = error.exit_code
    except OnnxgradError as error:
        console.error(error.message, error.hint, getattr(error, "refusals", ()), error.exit_code)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        console.error("interrupted", code=130)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nobody to tell
        return 1
    except Exception as error:
        text = str(error).strip()
        console.error(
            f"internal: {type(error).__name__}{': ' + text if text else ''}",
            "this is a fault of onnxgrad: run it again with --traceback and report what it prints",
            code=1,
        )
        code = 1
    console.close(code)
    return int(code)
