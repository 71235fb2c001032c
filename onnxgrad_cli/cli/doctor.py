"""`onnxgrad doctor`: what a file is, and how well it can be trained."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from onnxgrad_cli.cli.console import EXIT_CODES, Console, speaks
from onnxgrad_cli.cli.options import MODEL, options, what_to_build


@click.command(short_help="Say what a file is, what would be trained, and what would serve better.")
@MODEL
@what_to_build
@speaks
@click.pass_obj
def doctor(console: Console, /, model: str, **values: Any) -> int:
    """Say what MODEL is, what would be trained of it and what not, and which export would serve better; write nothing.

    Who wrote it, what was read otherwise than it is written, whether names and normalizations survived the export,
    which weights may have been one, what a proof needs. `onnxgrad inspect` is the short answer.
    """
    from onnxgrad_cli.jobs.doctor import doctor as run
    from onnxgrad_cli.report.diagnosis import in_words

    found = run(model, options(values), command=console.command, tell=console.say)
    console.result(asdict(found), in_words(found))
    return EXIT_CODES[found.status]
