"""`onnxgrad pack`: a folder with a page that trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.common.visible import visible

FILE = FilePath(path_type=Path)


@click.command(short_help="Make a folder that trains in a browser.")
@click.argument("train", type=TEXT, metavar="TRAIN")
@click.option("-o", "--out", type=FILE, required=True, metavar="DIR", help="The folder.")
@click.option("--data", type=FILE, required=True, metavar="DATA", help="Samples to train on, as `onnxgrad train` has.")
@click.option("--prefix", default="", metavar="TEXT", help="What names in DATA have before those of inputs.")
@click.option("--val", type=FILE, metavar="DATA", help="Samples to evaluate on.")
@click.option("--val-prefix", default="", metavar="TEXT", help="What the names there begin with.")
@click.option(
    "--runtime",
    type=FilePath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Copy the runtime from here: node_modules/onnxruntime-web/dist.",
)
@click.option("--webgpu", is_flag=True, help="Copy the runtime that computes on the GPU, too.")
@click.option("--ort", is_flag=True, help="Write model.ort, too, which the page opens in less time; not for --webgpu.")
@click.option("--force", is_flag=True, help="Replace files that onnxgrad did not write.")
@speaks
@click.pass_obj
def pack(console: Console, /, train: str, out: Path, **how: Any) -> int:
    """Write to DIR a page that trains TRAIN, a training model with an optimizer, in the browser.

    DIR then has all that it needs: any server of static files serves it, such as `python -m http.server`.
    """
    console.done = "packed"
    from onnxgrad_cli.jobs.pack import run_pack

    with working(console) as tell:
        files = [str(file) for file in run_pack(train, out, tell=tell, **how)]
    console.result({"files": files}, "\n".join(map(visible, files)), asked=False)
    return 0
