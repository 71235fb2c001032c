"""`onnxgrad build`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.code import STRANGERS
from onnxgrad_cli.cli.console import Console, speaks
from onnxgrad_cli.cli.options import complete_files, options, proof_data, what_to_build
from onnxgrad_cli.cli.paths import TEXT, FilePath
from onnxgrad_cli.cli.progress import working
from onnxgrad_cli.cli.several import STREAM, run_several, takes_several, targets_in, the_only
from onnxgrad_cli.common.choices import WeightsForm
from onnxgrad_cli.errors import UsageError

if TYPE_CHECKING:
    from onnxgrad_cli.options import Options
    from onnxgrad_cli.report import Report


OF_ONE = ("artifacts", "report", "picture", "dump_passes")
"""Options that name a place for what comes of one model."""


@click.command(short_help="Make training models.")
@takes_several()
@click.option(
    "-o",
    "--out",
    type=TEXT,
    shell_complete=complete_files,
    metavar="FILE",
    help="The training model; - is stdout.  [default: MODEL.train.onnx]",
)
@click.option(
    "-O",
    "--out-dir",
    type=FilePath(file_okay=False, readable=False),
    metavar="DIR",
    help="Write MODEL.train.onnx of each model to this folder.",
)
@what_to_build
@click.option(
    "--weights",
    type=click.Choice(get_args(WeightsForm)),
    default="stored",
    show_default=True,
    help="Store weights and state in the model; or let them be inputs, for JavaScript, with their values beside it.",
)
@click.option("--verify/--no-verify", default=None, help="Prove the gradients.  [default: where it takes seconds]")
@proof_data(
    "--test-data",
    "Prove them on these inputs: the arrays of an .npz, or the first samples of data that `onnxgrad train` reads; "
    "of several models, of all, or one for each.  [default: random ones]",
    multiple=True,
)
@click.option(
    "--report",
    multiple=True,
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="FILE.{md,html,json,txt}",
    help="Where the report goes.  [default: OUT.report.md]",
)
@click.option(
    "--picture",
    type=FilePath(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Draw the training model on a page, to which a report in HTML links.",
)
@click.option("--no-report", is_flag=True, help="Write no report.")
@click.option(
    "--dump-passes",
    type=FilePath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the model after each pass.",
)
@click.option("--stop-after", metavar="PASS", help="End after a pass, and write the model as it is then.")
@click.option(
    "--artifacts",
    type=FilePath(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint to a folder instead.",
)
@click.option("--prefix", default="", metavar="TEXT", help="What the names of artifacts begin with.")
@click.option("--nominal-checkpoint", is_flag=True, help="Let their checkpoint have names, shapes and types only.")
@click.option("--force", is_flag=True, help="Replace files that onnxgrad did not write.")
@speaks
@click.pass_obj
def build(
    console: Console, /, models: tuple[str, ...], out: str | None, out_dir: str | None, jobs: int, **values: Any
) -> int:
    """Make a training model of each MODEL (- is stdin): its graph, a loss, and one gradient per weight."""
    source = click.get_current_context().get_parameter_source
    if out is not None and source("out") not in STRANGERS and source("out_dir") in STRANGERS:
        out_dir = None  # what is typed comes before what a configuration says
    if out_dir or len(models) > 1:
        for option, given in {"out": out, **{name: values[name] for name in OF_ONE}}.items():
            if given:
                flag = option.replace("_", "-")
                raise UsageError(f"--{flag} does not go with --out-dir or several models", "give one model, and -o")
        console.done = "built"
        targets = targets_in(out_dir, models, values["stop_after"] or "train")
        return run_several(console, models, jobs, targets, {"test_data": values["test_data"]})
    (model,) = models
    to_stdout = out == STREAM or (out is None and model == STREAM and values["artifacts"] is None)
    if to_stdout and console.json:
        raise click.UsageError("the model and --json can't both go to stdout: name a file with -o")
    console.done = "stopped" if values["stop_after"] else "built"
    values["test_data"] = the_only("test_data", values["test_data"])
    asked = options(values)
    how = {"reports": values.pop("report"), "command": console.command, "check": console.level > 1, **values}
    with working(console) as tell:
        report = _run(model, out, asked, tell=tell, **how)
    return console.report(report, to_stderr=to_stdout)


def _run(
    model: str, out: str | None, asked: Options, *, artifacts: Path | None, prefix: str, nominal_checkpoint: bool,
    stop_after: str | None, weights: WeightsForm, picture: Path | None, **how: Any,
) -> Report:  # fmt: skip
    """Build a training model, or the artifacts where a folder for them is named."""
    if artifacts is None:
        if prefix or nominal_checkpoint:
            raise UsageError("--prefix and --nominal-checkpoint are about artifacts", "add --artifacts DIR")
        from onnxgrad_cli.jobs.build import run_build

        return run_build(model, out, asked, stop_after=stop_after, weights=weights, picture=picture, **how)
    others = {
        "--out": out,
        "--stop-after": stop_after,
        "--picture": picture,
        "--weights": None if weights == "stored" else weights,
    }
    for option, given in others.items():
        if given is not None:
            raise UsageError(f"--artifacts does not go with {option}", "leave one of them out")
    from onnxgrad_cli.jobs.artifacts import run_artifacts

    return run_artifacts(model, artifacts, asked, prefix=prefix, nominal_checkpoint=nominal_checkpoint, **how)
