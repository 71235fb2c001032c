"""`onnxgrad build`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import MODEL, options, what_to_build

STREAM = "-"


@click.command(short_help="Make a training model.")
@MODEL
@click.option("-o", "--out", metavar="FILE", help="The training model; - is stdout.  [default: MODEL.train.onnx]")
@what_to_build
@click.option("--verify/--no-verify", default=None, help="Prove the gradients.  [default: where it takes seconds]")
@click.option(
    "--test-data",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.npz",
    help="Prove them on these inputs.  [default: random ones]",
)
@click.option(
    "--report",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.{md,html,json,txt}",
    help="Where the report goes.  [default: OUT.report.md]",
)
@click.option("--no-report", is_flag=True, help="Write no report.")
@click.option(
    "--dump-passes",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the model after each pass.",
)
@click.option("--stop-after", metavar="PASS", help="End after a pass, and write the model as it is then.")
@click.option(
    "--artifacts",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint to a folder instead.",
)
@click.option("--prefix", default="", metavar="TEXT", help="What the names of artifacts begin with.")
@click.option("--nominal-checkpoint", is_flag=True, help="Let their checkpoint have names, shapes and types only.")
@click.option("--force", is_flag=True, help="Replace files that onnxgrad did not write.")
@speaks
@click.pass_obj
def build(console: Console, /, model: str, out: str | None, **values: Any) -> int:
    """Make a training model of MODEL (- is stdin): its graph, a loss, and one gradient per weight."""
    to_stdout = out == STREAM or (out is None and model == STREAM and values["artifacts"] is None)
    if to_stdout and console.json:
        raise click.UsageError("the model and --json can't both go to stdout: name a file with -o")
    console.done = "stopped" if values["stop_after"] else "built"
    from onnxgrad_cli.jobs.build import run_build

    report = run_build(
        model,
        out,
        options(values),
        command=console.command,
        tell=console.say,
        check=console.level > 1,
        reports=values.pop("report"),
        **values,
    )
    return console.report(report, to_stderr=to_stdout)
