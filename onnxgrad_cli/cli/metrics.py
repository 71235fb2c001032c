"""`onnxgrad metrics`: what can be measured on validation data."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.listing import described, rows_of


@click.command(short_help="List the metrics.")
@speaks
@click.pass_obj
def metrics(console: Console) -> int:
    """List the metrics, and what each takes: --metric NAME:OUTPUT:KEY=VALUE,KEY=VALUE."""
    from onnxgrad_cli.training.metrics import DEFAULTS, METRICS, parse_metric

    found = list(METRICS)
    names = {loss: [parse_metric(text).kind for text in texts] for loss, texts in DEFAULTS.items()}
    better = {each.name: "more" if each.higher else "less" for each in found}
    default_of = {each.name: [loss for loss, kinds in names.items() if each.name in kinds] for each in found}
    data = [described(each, {"better": better[each.name], "default of": default_of[each.name]}) for each in found]
    rows = [row for each in found for row in rows_of(each, better[each.name])]
    unasked = "\n".join(f"of {loss}, unless others are named: {', '.join(texts)}" for loss, texts in DEFAULTS.items())
    console.result(data, f"{table(('metric', 'better', 'what it is'), rows)}\n\n{unasked}")
    console.say(
        "any other metric can be given as a file: --metric FILE.onnx (inputs prediction and label, one scalar output)"
    )
    return 0
