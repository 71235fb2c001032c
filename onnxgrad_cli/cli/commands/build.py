"""`onnxgrad build`: build a training model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from onnxgrad_cli.cli.batch import run_several, takes_several, targets_in, the_only
from onnxgrad_cli.cli.parsing.click_option import FILE, FOLDER, FilePath, option
from onnxgrad_cli.cli.parsing.code_options import UNTRUSTED_SOURCES
from onnxgrad_cli.cli.parsing.shared_options import (
    FORCE,
    options,
    output_option,
    proof_data,
    verify_option,
    what_to_build,
)
from onnxgrad_cli.cli.terminal.console import Console, speaks
from onnxgrad_cli.cli.terminal.progress import working
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import WeightsForm
from onnxgrad_cli.errors import conflict

if TYPE_CHECKING:
    from onnxgrad_cli.options import Options
    from onnxgrad_cli.report import Report


OF_ONE = ("artifacts", "reports", "picture", "dump_passes")
"""Options that name an output file or folder, so that they can only be used with a single model."""


@click.command()
@takes_several()
@output_option("Output file of the training model; - is stdout.  [default: MODEL.train.onnx]")
@option(
    "-O",
    "--out-dir",
    type=FilePath(file_okay=False, readable=False),
    metavar="DIR",
    help="Write MODEL.train.onnx of each model to this folder.",
    common=True,
)
@what_to_build()
@option(
    "--weights",
    type=click.Choice(get_args(WeightsForm)),
    default="stored",
    help="Store weights and state inside the model, or make them model inputs whose values are in a separate file, for "
    "JavaScript.",
    section="Output",
)
@verify_option("Check the gradients numerically; if the check fails, no model is written.")
@proof_data(
    "--test-data",
    "Inputs on which the gradients are checked: the arrays of an .npz, or the first samples of data that `onnxgrad "
    "train` reads. With several models, give one for all of them, or one for each.  [default: random inputs]",
    multiple=True,
)
@option(
    "--report",
    "reports",
    multiple=True,
    type=FILE,
    metavar="FILE.{md,html,json}",
    help="Output file of the report, in the format of its suffix.  [default: OUT.report.md]",
    section="Output",
)
@option(
    "--picture",
    type=FILE,
    metavar="FILE.html",
    help="Draw the training model on an HTML page. An HTML report links to it.",
    section="Output",
)
@option("--no-report", is_flag=True, help="Write no report.", section="Output")
@option(
    "--dump-passes",
    type=FOLDER,
    metavar="DIR",
    help="Write the model after each pass to this folder.",
    section="Output",
)
@option(
    "--stop-after",
    metavar="PASS",
    help="Stop after a pass and write the intermediate model; see `onnxgrad list passes`.",
    section="Output",
)
@option(
    "--artifacts",
    type=FOLDER,
    metavar="DIR",
    help="Write the artifacts of onnxruntime-training to this folder, instead of a training model: "
    "training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.",
    section="Output",
)
@option("--prefix", default="", metavar="TEXT", help="With --artifacts: prefix of the names of the files.")
@option(
    "--nominal-checkpoint",
    is_flag=True,
    help="With --artifacts: write only the names, shapes and types of tensors to the checkpoint, not their values.",
    section="Output",
)
@FORCE
@speaks
@click.pass_obj
def build(
    console: Console, /, models: tuple[str, ...], out: str | None, out_dir: str | None, jobs: int, **values: Any
) -> int:
    """Build a training model from each MODEL (- is stdin): its graph, a loss, and one gradient per weight."""
    source = click.get_current_context().get_parameter_source
    if out is not None and source("out") not in UNTRUSTED_SOURCES and source("out_dir") in UNTRUSTED_SOURCES:
        out_dir = None  # an option that was typed takes precedence over a configuration
    if out_dir or len(models) > 1:
        for name, value in {"out": out, **{each: values[each] for each in OF_ONE}}.items():
            checks.conflicts(f"`{name}`", {"`out_dir` or several models": bool(value)}, "give one model, and -o")
        console.done = "built"
        targets = targets_in(out_dir, models, values["stop_after"] or "train")
        return run_several(console, models, jobs, targets, {"test_data": values["test_data"]})
    (model,) = models
    to_stdout = console.writes_to_stdout(out, model if values["artifacts"] is None else "")
    console.done = "stopped" if values["stop_after"] else "built"
    values["test_data"] = the_only("test_data", values["test_data"])
    asked = options(values)
    how = {"command": console.command, "check": console.level > 1, **values}
    with working(console) as tell:
        report = _run(model, out, asked, tell=tell, **how)
    return console.report(report, to_stderr=to_stdout)


def _run(
    model: str, out: str | None, asked: Options, *, artifacts: Path | None, prefix: str, nominal_checkpoint: bool,
    stop_after: str | None, weights: WeightsForm, picture: Path | None, **how: Any,
) -> Report:  # fmt: skip
    """Build a training model, or the artifacts if a folder for them is given."""
    if artifacts is None:
        if prefix or nominal_checkpoint:
            raise conflict("`prefix` and `nominal_checkpoint` require `artifacts`", "add --artifacts DIR")
        from onnxgrad_cli.jobs.build import run_build

        return run_build(model, out, asked, stop_after=stop_after, weights=weights, picture=picture, **how)
    checks.conflicts("`artifacts`", {
        "`out`": out is not None,
        "`stop_after`": stop_after is not None,
        "`picture`": picture is not None,
        "`weights`": weights != "stored",
    })  # fmt: skip
    from onnxgrad_cli.jobs.artifact_folder import run_artifacts

    return run_artifacts(model, artifacts, asked, prefix=prefix, nominal_checkpoint=nominal_checkpoint, **how)
