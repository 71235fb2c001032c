"""`onnxgrad inspect`: the producer of a model, its trainable weights and export problems."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.batch import run_several, takes_several
from onnxgrad_cli.cli.parsing.shared_options import options, what_to_build
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working

NOT_HERE = {"as_gradient_op", "embed_state", "identifiers", "init", "keep_outputs", "seed", "training_info", "yield_"}
"""Options without an effect on `inspect`: they decide how a training model is written, and `inspect` writes none."""


@click.command()
@takes_several()
@what_to_build(without=NOT_HERE)
@speaks
@click.pass_obj
def inspect(console: Console, /, models: tuple[str, ...], jobs: int, **values: Any) -> int:
    """Diagnose each MODEL: producer, trainable weights, operators without a gradient, export problems.

    No file is written. The output lists weights with made-up names, folded normalizations, and equal weights that may
    have been a single weight before the export. It also suggests a better export call.
    """
    if len(models) > 1:
        return run_several(console, models, jobs)
    from onnxgrad_cli.jobs.inspect import inspect as run

    with working(console) as tell:
        report = run(models[0], options(values), command=console.command, tell=tell)
    return console.report(report)
