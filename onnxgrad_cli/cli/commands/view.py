"""`onnxgrad view`: draw a model."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.parsing.click_option import option
from onnxgrad_cli.cli.parsing.shared_options import FORCE, MODEL, output_option
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working


@click.command()
@MODEL
@output_option("Output file.  [default: stdout]", metavar="FILE.{html,dot}")
@option(
    "--format",
    "form",
    type=click.Choice(["html", "dot"]),
    help="Format of the picture.  [default: by the suffix of FILE, or dot]",
)
@option(
    "--limit",
    type=click.IntRange(min=0),
    default=150,
    metavar="N",
    help="Fold the model's nodes into at most N boxes, by module; 0 folds nothing.",
)
@option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="Fold the nodes of each module at nesting depth N into one box, instead of using --limit.",
)
@FORCE
@speaks
@click.pass_obj
def view(
    console: Console, model: str, out: str | None, form: str | None, limit: int, depth: int | None, force: bool
) -> int:
    """Draw MODEL (- is stdin): inputs, weights, forward, loss, backward, gradients and outputs, each in its colour.

    The nodes that compute the gradient of a node are in a frame beside it. HTML is a page whose modules fold and
    unfold; it only needs a browser. DOT is the language of Graphviz, which converts it to SVG, PNG or PDF.
    """
    console.done = "drawn"
    from dataclasses import asdict

    from onnxgrad_cli.jobs.view import run_view

    with working(console) as tell:
        drawing, text = run_view(model, out, form, limit=limit, depth=depth, force=force, tell=tell)
    if console.json or out not in (None, "-"):
        console.result(asdict(drawing), drawing.caption, asked=False)
    else:
        console.print(text, newline=False)
        console.say(drawing.caption)
    return 0
