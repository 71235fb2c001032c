"""`onnxgrad pack`: write a folder with a web page that trains a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.parsing.click_option import ANY_PATH, FOLDER, TEXT, option
from onnxgrad_cli.cli.parsing.shared_options import FORCE, declared_options
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.options.train import Course


@click.command()
@click.argument("train", type=TEXT, metavar="TRAIN")
@option("-o", "--out", type=ANY_PATH, required=True, metavar="DIR", help="Output folder.", common=True)
@option(
    "--data",
    type=ANY_PATH,
    required=True,
    metavar="DATA",
    help="Training data, in any format of `onnxgrad train`.",
    common=True,
)
@option("--val", type=ANY_PATH, metavar="DATA", help="Validation data.", common=True)
@declared_options(Course, only=("prefix", "val_prefix"))
@option(
    "--runtime",
    type=FOLDER,
    metavar="DIR",
    help="Folder to copy the runtime from, such as node_modules/onnxruntime-web/dist.",
)
@option("--webgpu", is_flag=True, help="Also copy the runtime for the GPU.")
@option("--ort", is_flag=True, help="Also write model.ort, which the page opens faster; not with --webgpu.")
@FORCE
@speaks
@click.pass_obj
def pack(console: Console, /, train: str, out: Path, **how: Any) -> int:
    """Write a page to DIR that trains TRAIN, a training model with an optimizer, in the browser.

    With --runtime, DIR contains all files that the page needs. Any server of static files can serve it, such as
    `python -m http.server`.
    """
    console.done = "packed"
    from onnxgrad_cli.jobs.pack import run_pack

    with working(console) as tell:
        files = [str(file) for file in run_pack(train, out, tell=tell, **how)]
    console.result({"files": files}, "\n".join(map(escaped, files)), asked=False)
    return 0
