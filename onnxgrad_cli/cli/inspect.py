"""`onnxgrad inspect`: what `build` would do."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import options, what_to_build
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.several import run_several, takes_several


@click.command(short_help="Say what could be trained, and what could not.")
@takes_several()
@what_to_build
@speaks
@click.pass_obj
def inspect(console: Console, /, models: tuple[str, ...], jobs: int, **values: Any) -> int:
    """Say what would be trained in each MODEL, and what can't be differentiated and why; write nothing."""
    if len(models) > 1:
        return run_several(console, models, jobs)
    from onnxgrad_cli.jobs.build import inspect as run

    with working(console) as tell:
        report = run(models[0], options(values), command=console.command, tell=tell)
    return console.report(report)
