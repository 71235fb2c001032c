"""`onnxgrad schedules`: how a learning rate may change."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.options import settings_data, settings_lines


@click.command(short_help="List the schedules of learning rates.")
@speaks
@click.pass_obj
def schedules(console: Console) -> int:
    """List the schedules of learning rates, and what each takes: train --schedule NAME:KEY=VALUE,KEY=VALUE."""
    from onnxgrad_cli.training.schedules import SCHEDULES, WARM_UP

    found = list(SCHEDULES)
    data = [
        {
            "name": each.name,
            "summary": each.summary,
            "doc": each.doc,
            "validation": each.watches,
            "options": settings_data([*each.options, *WARM_UP]),
        }
        for each in found
    ]
    rows = []
    for each in found:
        rows.append((each.name, each.summary))
        rows.extend(("", f"  {line}") for line in settings_lines(each.options))
    rows.append(("each of them", "The options of all."))
    rows.extend(("", f"  {line}") for line in settings_lines(WARM_UP))
    console.result(data, table(("schedule", "what the rate does"), rows))
    return 0
