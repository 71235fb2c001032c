"""`onnxgrad expand`: replace training information and Gradient nodes by standard operators."""

from __future__ import annotations

import dataclasses

import click

from onnxgrad_cli.cli.parsing.click_option import option
from onnxgrad_cli.cli.parsing.shared_options import FORCE, MODEL, output_option
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common.escape import escaped

MAX_BINDINGS = 12
"""Maximum number of bindings (initializer and the output that replaces it) in the text output. --json lists all."""


@click.command()
@MODEL
@output_option("Output file of the inference model; - is stdout.  [default: MODEL.expanded.onnx]")
@option(
    "--keep-outputs",
    is_flag=True,
    help="Keep all outputs of the inference graph in the files FILE.stepN.onnx, one for each training step.",
    section="Output",
)
@FORCE
@speaks
@click.pass_obj
def expand(console: Console, model: str, out: str | None, keep_outputs: bool, force: bool) -> int:
    """Write MODEL (- is stdin) with standard operators, and its training information as separate models.

    Gradient nodes and the optimizers of ai.onnx.preview.training are replaced by nodes that compute the same. For a
    model with training information, two more models are written: FILE.step0.onnx, one training step, and
    FILE.init0.onnx, which draws the initial values. If MODEL has several TrainingInfoProto messages, the files of
    the second are FILE.step1.onnx and FILE.init1.onnx, and so on.
    """
    to_stdout = console.writes_to_stdout(out, model)
    console.done = "expanded"
    from onnxgrad_cli.jobs.expand import Piece, run_expand

    def lines(piece: Piece) -> list[str]:
        said = [f"{piece.path}: the {piece.kind}"]
        if piece.index is None:
            return said
        said += [f"  feed {', '.join(piece.inputs)}"] if piece.inputs else []
        said += [f"  {name} becomes {value}" for name, value in list(piece.bindings.items())[:MAX_BINDINGS]]
        more = len(piece.bindings) - MAX_BINDINGS
        return [*said, f"  ... and {more} more"] if more > 0 else said

    with working(console) as tell:
        pieces = run_expand(model, out, keep_outputs=keep_outputs, force=force, tell=tell)
    if not to_stdout:
        data = [dataclasses.asdict(piece) for piece in pieces]
        console.result(data, "\n".join(escaped(line) for piece in pieces for line in lines(piece)), asked=False)
    return 0
