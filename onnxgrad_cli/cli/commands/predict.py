"""`onnxgrad predict`: write a model's outputs for each sample."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.commands.evaluate import DATA, setting_of, setting_options
from onnxgrad_cli.cli.parsing.click_option import option
from onnxgrad_cli.cli.parsing.shared_options import MODEL, data_option, declared_options, output_option, values_of
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.options import Options


@click.command()
@MODEL
@data_option(DATA)
@output_option(
    "Output file: arrays, or a row for each sample.  [default: MODEL.predictions.npz]",
    metavar="FILE.{npz,csv,jsonl,parquet}",
)
@option("--output", "outputs", multiple=True, metavar="NAME", help="Write this output.  [default: all]", common=True)
@option("--label", default="label", metavar="NAME", help="Name of the labels in --data; they are ignored.", common=True)
@option(
    "--force",
    is_flag=True,
    help="Replace an existing file. An .npz that onnxgrad wrote is replaced even without this option.",
    common=True,
)
@declared_options(Options, only=("dims", "shapes"))
@setting_options
@speaks
@click.pass_obj
def predict(console: Console, /, model: str, data: str, out: str | None, label: str, **values: Any) -> int:
    """Run MODEL on data, and write its outputs for each sample, with class names if the model stores them."""
    from onnxgrad_cli.jobs.predict import run_predict

    sizes = Options(**values_of(Options, values))
    setting = setting_of(values)
    console.done = "predicted"
    with working(console) as tell:
        found = run_predict(model, data, out, label=label, options=sizes, setting=setting, tell=tell, **values)
    files = [str(file) for file in found.files]
    arrays = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in found.outputs.items()}
    if console.json:
        console.result({"samples": found.samples, "outputs": arrays, "files": files}, "")
    for file in files:
        console.say(f"wrote {file}: {found.samples:,} samples of {', '.join(found.outputs)}")
    return 0
