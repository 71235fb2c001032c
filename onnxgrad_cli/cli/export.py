"""`onnxgrad export`: a checkpoint as an inference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import complete_files, proof_data
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.common.visible import visible


@click.command(short_help="Write trained weights into the model.")
@click.argument("weights", type=FilePath(path_type=Path), metavar="WEIGHTS")
@click.option("--model", type=TEXT, required=True, metavar="MODEL", help="The inference model that was trained.")
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE",
    help="Where it goes; - is stdout.  [default: MODEL.trained.onnx]",
)
@click.option(
    "--roles",
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="FILE.json",
    help="What the bytes of a .bin are.  [default: the .json of its name, beside it]",
)
@click.option(
    "--adaptable",
    is_flag=True,
    help="Write MODEL as it is, with empty factors that a runtime overrides by the adapter that it is given.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Add adapters into matrices of integers too, which rounds them anew; what outputs lose is told.",
)
@proof_data(
    "--test-data",
    "Measure on these inputs what --merge loses: an .npz, or samples to train on.  [default: on drawn ones]",
)
@click.option(
    "--adapter",
    type=TEXT,
    metavar="FILE.safetensors|FILE.onnx_adapter|FOLDER",
    help="Write the adapters alone: in onnxgrad's form, in that of onnxruntime, or as a folder of PEFT.",
)
@click.option("--use-ema", is_flag=True, help="Write the averages that --ema has kept, not the last weights.")
@click.option(
    "--keep-mode",
    is_flag=True,
    help="Leave BatchNormalization and Dropout as the model has them; else what is written is for inference.",
)
@click.option("--force", is_flag=True, help="Replace a file that onnxgrad did not write.")
@speaks
@click.pass_obj
def export(console: Console, /, weights: Path, model: str, out: str | None, **how: Any) -> int:
    """Write MODEL with the trained WEIGHTS.

    They are a checkpoint in the folder of a run of `onnxgrad train`; adapters in any form; the bytes (.bin) of a
    training elsewhere, of a model of `onnxgrad build --weights inputs`; a safetensors file of weights alone; or an
    ONNX file: a trained model, a model of derivatives or a training model. Weights are matched by name, type and shape.
    """
    if out == "-" and console.json:
        raise click.UsageError("the model and --json can't both go to stdout: name a file with -o")
    console.done = "exported"
    from onnxgrad_cli.jobs.export import run_export

    with working(console) as tell:
        found = run_export(weights, model, out, tell=tell, **how)
    files = [str(file) for file in found]
    if files:
        console.result({"files": files}, "\n".join(map(visible, files)), asked=False)
    return 0
