"""`onnxgrad losses`: the losses."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks, table
from onnxgrad_cli.cli.listing import described, rows_of


@click.command(short_help="List the losses.")
@speaks
@click.pass_obj
def losses(console: Console) -> int:
    """List the losses, the labels they want, and what each takes with --loss-option."""
    from onnxgrad_cli.losses import LOSSES
    from onnxgrad_cli.losses.registry import LABELS

    found = sorted(LOSSES, key=lambda loss: loss.name)
    data = [described(loss, {"label": loss.label}) for loss in found]
    rows = [row for loss in found for row in rows_of(loss)]
    labels = "\n".join(
        f"label {text}: {', '.join(loss.name for loss in found if loss.label == kind)}" for kind, text in LABELS.items()
    )
    console.result(data, f"{table(('loss', 'what it is'), rows)}\n\n{labels}")
    console.say(
        "any other loss can be given as a file: --loss FILE.onnx (inputs prediction and label, one scalar output)"
    )
    return 0
