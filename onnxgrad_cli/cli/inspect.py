"""`onnxgrad inspect`: what `build` would do."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.options import MODEL, options, what_to_build
from onnxgrad_cli.cli.voice import Voice, speaks


@click.command(short_help="Say what could be trained, and what could not.")
@MODEL
@what_to_build
@speaks
@click.pass_obj
def inspect(voice: Voice, /, model: str, **values: Any) -> int:
    """Say what would be trained in MODEL, and what can't be differentiated and why; write nothing."""
    from onnxgrad_cli.jobs.build import inspect as run

    return voice.report(run(model, options(values), command=voice.command, tell=voice.say))
