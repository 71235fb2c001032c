"""Write the training artifacts of an inference model and a report, for `onnxgrad build --artifacts`.

Artifacts are a training model, an evaluation model, an optimizer model and a checkpoint, as in onnxruntime-training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.escape import python_literal
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.compat.artifacts import CHECKPOINT, EVALUATION, OPTIMIZER, TRAINING, make_artifacts, stage_artifacts
from onnxgrad_cli.errors import CheckFailed
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import AtomicWriteGroup, ModelSource, make_folder
from onnxgrad_cli.jobs.build import (
    Build,
    check_written,
    commands,
    list_file,
    plan_build,
    prove,
    stage_reports,
    transform,
    with_reports,
    write_reports,
)
from onnxgrad_cli.jobs.output_plan import OutputPlan
from onnxgrad_cli.options import Options
from onnxgrad_cli.report import Report
from onnxgrad_cli.report.model import Next

FED = ("model input", "label", "sample weight", "loss weight")
"""The roles of the inputs that a user feeds in each step, other than the learning rate."""


@attribute_failures
@job
def run_artifacts(
    model: ModelSource,
    folder: str | Path,
    options: Options | None = None,
    *,
    prefix: str = "",
    nominal_checkpoint: bool = False,
    verify: bool | None = None,
    test_data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    reports: Sequence[str | Path] = (),
    no_report: bool = False,
    dump_passes: str | Path | None = None,
    force: bool = False,
    check: bool = False,
    command: str = "",
    tell: Tell = silent,
) -> Report:
    """Build the training artifacts from a model file, and write them and a report to a folder.

    The arguments that are not described here are those of `run_build`.

    Args:
        model: the inference model; '-' is stdin.
        folder: the folder for the training, evaluation and optimizer models and the checkpoint. It is created if
            missing.
        options: what to build.
        prefix: the prefix of the artifacts' names.
        nominal_checkpoint: write a checkpoint that has the names, shapes and types of the tensors, but not their
            values.
        reports: files for the report; by default `<training model>.report.md`.
        no_report: write no report.

    Returns:
        The report. Its status is 'built' if artifacts were written. If it is 'refused' or 'check_failed', only the
        report was written.

    Raises:
        UsageError: an option does not fit the model or artifacts, or an existing file would be replaced.
        OnnxgradError: the model can't be read, or a file can't be written.
    """
    options = options or Options()
    checks.conflicts("`artifacts`", {
        "`training_info`": options.training_info,
        "`as_gradient_op`": options.as_gradient_op,
        "`yield_`": options.yield_ != "ones",
    })  # fmt: skip
    folder = checks.path("folder", folder)
    make_folder(folder, "`artifacts`")
    names = (TRAINING, EVALUATION, CHECKPOINT, *((OPTIMIZER,) if options.optimizer else ()))
    target, *others = (folder / f"{prefix}{name}" for name in names)
    outputs = OutputPlan.of(target, others, reports=reports, no_report=no_report, dump=dump_passes, force=force)
    plan = plan_build(
        model, outputs, options, verify=verify, test_data=test_data, tokenizer=tokenizer, check=check,
        command=command, tell=tell,
    )  # fmt: skip
    build = transform(plan, keeps_original=True, frozen_are_inputs=True)
    prove(build)
    return _write(build, target, prefix, nominal_checkpoint)


def _write(build: Build, target: Path, prefix: str, nominal: bool) -> Report:
    """Write the artifacts and the reports atomically. If the build failed, write only the reports."""
    built, original, folder = build.built, build.original, target.parent
    if build.error is not None:
        return write_reports(build)
    assert original is not None
    outputs = [value.name for value in original.graph.output] if built.options.keep_outputs else []
    made = make_artifacts(built, original, outputs)
    with build.failures(CheckFailed), AtomicWriteGroup(target, bound=True) as switch:
        written = stage_artifacts(switch, made, built, original, folder, prefix, nominal)
        check_written(build, switch.where(target), made.training)
        for file in written:
            list_file(build, switch, file, _kind(file, prefix))
        report = build.report()
        if built.options.optimizer:
            fed = [value.name for value in report.inputs if value.role in FED]
            report = replace(report, next=[*commands(report), _next_step(folder, prefix, fed)])
        stage_reports(build, switch, report)
        switch.commit()
        return with_reports(build, report)
    return write_reports(build)


def _next_step(folder: Path, prefix: str, inputs: Iterable[str]) -> Next:
    """Return the next step for the report: Python code that trains with the artifacts."""
    feeds = ", ".join(f"{python_literal(name)}: ..." for name in inputs)
    where = ", ".join(map(python_literal, [folder.as_posix(), *filter(None, [prefix])]))
    saved = python_literal((folder / f"{prefix}{CHECKPOINT}").as_posix())
    lines = (
        "from onnxgrad_cli.compat.artifacts import open_artifacts, save_checkpoint",
        "",
        f"trainer = open_artifacts({where})",
        f"loss = trainer.step({{{feeds}}}, learning_rate=1e-3)  # arrays, the samples along the first axis",
        f"save_checkpoint({saved}, trainer)",
    )
    return Next("Train with the artifacts", "python", "\n".join(lines))


def _kind(file: Path, prefix: str) -> str:
    """Return the kind of an artifact, in words."""
    kinds = {TRAINING: "training model", EVALUATION: "evaluation model", OPTIMIZER: "optimizer model"}
    return {**kinds, CHECKPOINT: "checkpoint"}.get(file.name.removeprefix(prefix), "weights")
