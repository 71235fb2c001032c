"""`onnxgrad export`: a checkpoint as an inference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.common.visible import visible


@click.command(short_help="Write a checkpoint's weights into the model.")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CHECKPOINT")
@click.option("--model", required=True, metavar="MODEL", help="The inference model that was trained.")
@click.option("-o", "--out", metavar="FILE", help="Where it goes; - is stdout.  [default: MODEL.trained.onnx]")
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
@click.option(
    "--test-data",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.npz",
    help="Measure on these inputs what --merge loses.  [default: on drawn ones]",
)
@click.option(
    "--adapter",
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
def export(console: Console, /, checkpoint: Path, model: str, out: str | None, **how: Any) -> int:
    """Write MODEL with the weights of CHECKPOINT: a file in the folder of a run of `onnxgrad train`, or an adapter."""
    console.done = "exported"
    from onnxgrad_cli.jobs.export import run_export

    found = run_export(checkpoint, model, out, tell=console.say, **how)
    files = [str(file) for file in found]
    if files:
        console.result({"files": files}, "\n".join(map(visible, files)))
    return 0
