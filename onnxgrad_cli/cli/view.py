"""`onnxgrad view`: a picture of a model."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import MODEL, complete_files
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.cli.progress import working


@click.command(short_help="Draw a model.")
@MODEL
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE.{dot,svg,mmd,html}",
    help="Where the picture goes.  [default: stdout]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["dot", "svg", "mermaid", "html"]),
    help="Its format.  [default: by the suffix of FILE, or dot]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=150,
    show_default=True,
    help="Fold the model's nodes into at most so many boxes, by module; 0 folds nothing.",
)
@click.option("--depth", type=click.IntRange(min=1), help="Fold at this depth of the modules instead.")
@click.option("--force", is_flag=True, help="Replace a file that onnxgrad did not write.")
@speaks
@click.pass_obj
def view(
    console: Console, model: str, out: str | None, kind: str | None, limit: int, depth: int | None, force: bool
) -> int:
    """Draw MODEL (- is stdin): inputs, weights, forward, loss, backward, gradients and outputs, each in its colour.

    The nodes that compute the gradient of a node stand in a frame beside it. HTML is a page to look around in: modules
    fold and unfold. SVG, HTML and Mermaid need no other program; DOT is the language of Graphviz.
    """
    console.done = "drawn"
    from dataclasses import asdict

    from onnxgrad_cli.jobs.view import run_view
    from onnxgrad_cli.view.mermaid import too_large

    with working(console) as tell:
        drawing, text = run_view(model, out, kind, limit=limit, depth=depth, force=force, tell=tell)
    if console.json or out not in (None, "-"):
        console.result(asdict(drawing), drawing.caption, asked=False)
    else:
        console.print(text, newline=False)
        console.say(drawing.caption)
    if too_large(text):
        console.say("Mermaid draws no more than 500 edges and 50,000 characters where it is not set up for more: fold")
    return 0
