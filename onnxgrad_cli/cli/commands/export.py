"""`onnxgrad export`: write trained weights or adapters back into an inference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.parsing.click_option import ANY_PATH, FILE, TEXT, option
from onnxgrad_cli.cli.parsing.shared_options import FORCE, output_option, proof_data
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common.escape import escaped


@click.command()
@click.argument("weights", type=ANY_PATH, metavar="WEIGHTS")
@option("--model", type=TEXT, required=True, metavar="MODEL", help="The inference model that was trained.")
@output_option("Output file; - is stdout.  [default: MODEL.exported.onnx]")
@option(
    "--roles",
    type=FILE,
    metavar="FILE.json",
    help="JSON file that lists the tensors in a .bin file.  [default: the .json file of the same name]",
)
@option(
    "--adaptable",
    is_flag=True,
    help="Write MODEL with its own weights, and with LoRA matrices that have no effect until a runtime loads an "
    "adapter in their place.",
)
@option(
    "--merge",
    is_flag=True,
    help="Also merge adapters into matrices that are stored as integers. These are rounded again, and the change of "
    "the outputs is measured and printed.",
)
@proof_data(
    "--test-data",
    "With --merge: inputs on which the change of the outputs is measured: an .npz, or training data.  [default: random "
    "inputs]",
)
@option(
    "--adapter",
    type=TEXT,
    metavar="FILE.safetensors|FILE.onnx_adapter|FOLDER",
    help="Write only the adapters, in the format of onnxgrad, of onnxruntime, or of PEFT (a folder).",
)
@option(
    "--use-ema", is_flag=True, help="Write the moving averages of the weights that --ema kept, instead of the weights."
)
@option(
    "--keep-mode",
    is_flag=True,
    help="Write BatchNormalization and Dropout in the mode stored in MODEL, instead of inference mode.",
    section="Output",
)
@FORCE
@speaks
@click.pass_obj
def export(console: Console, /, weights: Path, model: str, out: str | None, **how: Any) -> int:
    """Write MODEL with the trained WEIGHTS.

    WEIGHTS are a checkpoint, the folder of a run of `onnxgrad train`, or adapters in any format. A safetensors file
    with only weights, or an ONNX file (a trained model, a model of derivatives or a training model) is allowed too. If
    another program trained a model that `onnxgrad build --weights inputs` wrote, WEIGHTS are the .bin file of that
    program. Weights are matched by name, type and shape.
    """
    adapter_alone = how["adapter"] is not None and not how["adaptable"] and not how["merge"]
    console.writes_to_stdout(out, "" if adapter_alone else model)
    console.done = "exported"
    from onnxgrad_cli.jobs.export import run_export

    with working(console) as tell:
        found = run_export(weights, model, out, tell=tell, **how)
    files = [str(file) for file in found]
    if files:
        console.result({"files": files}, "\n".join(map(escaped, files)), asked=False)
    return 0
