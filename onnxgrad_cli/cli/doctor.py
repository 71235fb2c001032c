"""`onnxgrad doctor`: what a file is, and how well it can be trained."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from onnxgrad_cli.cli.console import EXIT_CODES, Console, speaks
from onnxgrad_cli.cli.options import options, what_to_build
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.several import run_several, takes_several


@click.command(short_help="Say what a file is, what would be trained, and what would serve better.")
@takes_several()
@what_to_build
@speaks
@click.pass_obj
def doctor(console: Console, /, models: tuple[str, ...], jobs: int, **values: Any) -> int:
    """Say what each MODEL is, what would be trained of it, what not, and which export would serve better.

    Who wrote it, what was read otherwise than it is written, whether names and normalizations survived the export,
    which weights may have been one, what a proof needs. `onnxgrad inspect` is the short answer.
    """
    if len(models) > 1:
        return run_several(console, models, jobs)
    from onnxgrad_cli.jobs.doctor import doctor as run
    from onnxgrad_cli.report.diagnosis import in_words

    with working(console) as tell:
        found = run(models[0], options(values), command=console.command, tell=tell)
    console.result(asdict(found), in_words(found))
    if EXIT_CODES[found.status]:
        console.failed(found.error or found.verdict, found.hint or None, refusals=found.refusals)
    return EXIT_CODES[found.status]
