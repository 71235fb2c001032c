"""`onnxgrad passes`: the pipeline."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table


@click.command(short_help="List the passes of a build.")
@speaks
@click.pass_obj
def passes(console: Console) -> int:
    """List the passes in order, as --dump-passes and --stop-after know them."""
    from onnxgrad_cli.passes import EVERY, SUMMARIES

    needs = {step.name: list(step.needs) for step in EVERY}
    rows = [{"name": name, "summary": text, "needs": needs.get(name, [])} for name, text in SUMMARIES.items()]
    console.result(rows, table(("pass", "what it does"), list(SUMMARIES.items())))
    return 0
