"""`onnxgrad optimizers`: the optimizers."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.listing import described, rows_below, rows_of


@click.command(short_help="List the optimizers.")
@speaks
@click.pass_obj
def optimizers(console: Console) -> int:
    """List the optimizers, the state they keep for each weight, and what each takes with --optimizer-option."""
    from onnxgrad_cli.optimizers import OPTIMIZERS

    found = list(OPTIMIZERS)
    data = [described(each, {"slots": dict(each.slots)}) for each in found]
    rows = []
    for each in found:
        rows += rows_of(each)
        rows += rows_below(f"state <weight>_{slot}: {doc}" for slot, doc in each.slots.items())
    console.result(data, table(("optimizer", "what it does"), rows))
    return 0
