"""`onnxgrad inspect`: what `build` would do."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import MODEL, options, what_to_build


@click.command(short_help="Say what could be trained, and what could not.")
@MODEL
@what_to_build
@speaks
@click.pass_obj
def inspect(console: Console, /, model: str, **values: Any) -> int:
    """Say what would be trained in MODEL, and what can't be differentiated and why; write nothing."""
    from onnxgrad_cli.jobs.build import inspect as run

    return console.report(run(model, options(values), command=console.command, tell=console.say))
