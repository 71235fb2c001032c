"""`onnxgrad schedules`: how a learning rate may change."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.listing import described, rows_below, rows_of, settings_lines


@click.command(short_help="List the schedules of learning rates.")
@speaks
@click.pass_obj
def schedules(console: Console) -> int:
    """List the schedules of learning rates, and what each takes: train --schedule NAME:KEY=VALUE,KEY=VALUE."""
    from onnxgrad_cli.training.schedules import SCHEDULES, WARM_UP

    found = list(SCHEDULES)
    data = [described(each, {"validation": each.watches}, WARM_UP) for each in found]
    rows = [row for each in found for row in rows_of(each)]
    rows += [("each of them", "The options of all."), *rows_below(settings_lines(WARM_UP))]
    console.result(data, table(("schedule", "what the rate does"), rows))
    return 0
