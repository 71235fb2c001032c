"""`onnxgrad predict`: what a model says of each sample."""

from __future__ import annotations

from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.evaluate import DATA, setting_of, setting_options
from onnxgrad_cli.cli.options import MODEL, SIZES, complete_files
from onnxgrad_cli.cli.paths import TEXT
from onnxgrad_cli.cli.progress import working


@click.command(short_help="Run a model on data.")
@MODEL
@click.option("--data", required=True, type=TEXT, shell_complete=complete_files, metavar="DATA", help=DATA)
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE.{npz,csv,jsonl,parquet}",
    help="The outputs: arrays, or a row for each sample.  [default: MODEL.predictions.npz]",
)
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Write this output.  [default: all]")
@click.option(
    "--label",
    default="label",
    show_default=True,
    metavar="NAME",
    help="What --data call the labels, which are left out.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there, or an .npz that onnxgrad did not write.")
@SIZES[0]
@SIZES[1]
@setting_options
@speaks
@click.pass_obj
def predict(
    console: Console,
    /,
    model: str,
    data: str,
    out: str | None,
    outputs: tuple[str, ...],
    label: str,
    force: bool,
    **values: Any,
) -> int:
    """Run MODEL on data, and write what it says of each sample; with the names of classes where it stores them."""
    from onnxgrad_cli.jobs.predict import run_predict
    from onnxgrad_cli.options import Options

    sizes = Options(dims=dict(values.pop("dim")), shapes=dict(values.pop("shape")))
    setting = setting_of(values)
    console.done = "predicted"
    with working(console) as tell:
        found = run_predict(
            model, data, out, outputs=outputs, label=label, options=sizes, setting=setting, force=force, tell=tell
        )
    files = [str(file) for file in found.files]
    arrays = {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in found.outputs.items()}
    if console.json:
        console.result({"samples": found.samples, "outputs": arrays, "files": files}, "")
    for file in files:
        console.say(f"wrote {file}: {found.samples:,} samples of {', '.join(found.outputs)}")
    return 0
