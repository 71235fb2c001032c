"""`onnxgrad optimizers`: the optimizers."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import settings_data, settings_lines


@click.command(short_help="List the optimizers.")
@speaks
@click.pass_obj
def optimizers(console: Console) -> int:
    """List the optimizers, the state they keep for each weight, and what each takes with --optimizer-option."""
    from onnxgrad_cli.optimizers import OPTIMIZERS

    found = list(OPTIMIZERS)
    data = [
        {
            "name": each.name,
            "summary": each.summary,
            "doc": each.doc,
            "slots": dict(each.slots),
            "options": settings_data(each.options),
        }
        for each in found
    ]
    rows = []
    for each in found:
        rows.append((each.name, each.summary))
        rows.extend(("", f"  {line}") for line in settings_lines(each.options))
        rows.extend(("", f"  state <weight>_{slot}: {doc}") for slot, doc in each.slots.items())
    console.result(data, table(("optimizer", "what it does"), rows))
    return 0
