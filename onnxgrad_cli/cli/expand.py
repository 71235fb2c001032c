"""`onnxgrad expand`: training that a model only describes, as models that run."""

from __future__ import annotations

import dataclasses

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import MODEL, complete_files
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.common.visible import visible

STREAM = "-"
MOST = 12
"""Bindings that are listed in the text; --json has all."""


@click.command(short_help="Write training information, gradients and optimizers as plain models.")
@MODEL
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE",
    help="The inference model; - is stdout.  [default: MODEL.expanded.onnx]",
)
@click.option("--keep-outputs", is_flag=True, help="Let steps have the inference graph's outputs too.")
@click.option("--force", is_flag=True, help="Replace files that onnxgrad did not write.")
@speaks
@click.pass_obj
def expand(console: Console, model: str, out: str | None, keep_outputs: bool, force: bool) -> int:
    """Write MODEL (- is stdin) in standard operators, and each training information in it as models beside it.

    Gradient nodes and the optimizers of ai.onnx.preview.training become the graphs that compute them. A model with
    training information also becomes FILE.step0.onnx, one training step, and FILE.init0.onnx, which draws what it
    begins with; and so on for each further one.
    """
    to_stdout = out == STREAM or (out is None and model == STREAM)
    if to_stdout and console.json:
        raise click.UsageError("the model and --json can't both go to stdout: name a file with -o")
    console.done = "expanded"
    from onnxgrad_cli.jobs.expand import Piece, run_expand

    def lines(piece: Piece) -> list[str]:
        said = [f"{piece.path}: the {piece.kind}"]
        if piece.index is None:
            return said
        said += [f"  feed {', '.join(piece.inputs)}"] if piece.inputs else []
        said += [f"  {name} becomes {value}" for name, value in list(piece.bindings.items())[:MOST]]
        more = len(piece.bindings) - MOST
        return [*said, f"  ... and {more} more"] if more > 0 else said

    with working(console) as tell:
        pieces = run_expand(model, out, keep_outputs=keep_outputs, force=force, tell=tell)
    if not to_stdout:
        data = [dataclasses.asdict(piece) for piece in pieces]
        console.result(data, "\n".join(visible(line) for piece in pieces for line in lines(piece)), asked=False)
    return 0
