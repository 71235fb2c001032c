"""The job behind `onnxgrad build --artifacts`: from an inference model in a file to the quartet and its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.visible import python_literal
from onnxgrad_cli.compat.artifacts import (
    CHECKPOINT,
    EVALUATION,
    OPTIMIZER,
    TRAINING,
    Artifacts,
    check_places,
    make_artifacts,
    stage_artifacts,
)
from onnxgrad_cli.compat.generate_artifacts import opens_frozen
from onnxgrad_cli.errors import CheckFailed, UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, Switch, make_folder
from onnxgrad_cli.jobs.build_attempt import BuildAttempt, BuildRequest
from onnxgrad_cli.options import Options
from onnxgrad_cli.report import Report
from onnxgrad_cli.report.model import Next
from onnxgrad_cli.standard.training_info import check_request

FED = ("model input", "label", "sample weight")
"""The roles of what a step is fed besides the learning rate."""


@judged
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
    """Turn the model in a file into the quartet of artifacts in a folder, and write the report beside them.

    Args:
        model: the inference model; '-' is stdin.
        folder: where training, evaluation and optimizer model and the checkpoint go; it is made where it is missing.
        options: what to build.
        prefix: what the names of the artifacts begin with.
        nominal_checkpoint: let the checkpoint have names, shapes and types only.
        verify, test_data, tokenizer, dump_passes, force, check, command, tell: see `run_build`.
        reports: files for the report; by default `<training model>.report.md`.
        no_report: write no report.

    Returns:
        The report. Its status is 'built'; or else 'refused' or 'check failed', and then no artifact was written, but
        the report was.

    Raises:
        UsageError: an option does not fit the model or artifacts, or a file would be replaced that must not be.
        OnnxgradError: the model can't be read, or a file can't be written.
    """
    options = options or Options()
    check_request(options)
    _check_options(options)
    folder = checks.path("folder", folder)
    make_folder(folder, "`artifacts`")
    request = BuildRequest(
        model, options, verify, checks.path_or_none("test_data", test_data),
        checks.path_or_none("tokenizer", tokenizer), checks.path_or_none("dump_passes", dump_passes), None, force,
        check, command, tell,
    )  # fmt: skip
    target = folder / f"{prefix}{TRAINING}"
    attempt = BuildAttempt(request, target, checks.paths("reports", reports), no_report, keeps_original=True)
    built, original = attempt.built, attempt.original
    assert original is not None

    def finish() -> tuple[ModelProto, ModelProto]:
        return built.model, built.model

    if attempt.run(finish, opens_frozen(built, attempt.dump)) is not None:
        outputs = [value.name for value in original.graph.output] if options.keep_outputs else []
        made = make_artifacts(built, original, outputs)
        check_places(made, folder, prefix, attempt.path, force)
        try:
            return _save(attempt, made, target, prefix, nominal_checkpoint)
        except CheckFailed as error:
            attempt.error = error
    return attempt.write_reports(attempt.report())


def _save(attempt: BuildAttempt, made: Artifacts, target: Path, prefix: str, nominal: bool) -> Report:
    """Write the quartet and the reports, which take their names together; see `BuildAttempt.save`."""
    assert attempt.original is not None
    folder = target.parent
    with Switch(target, bound=True) as switch:
        written = stage_artifacts(switch, made, attempt.built, attempt.original, folder, prefix, nominal)
        attempt.check_written(switch.where(target), made.training)
        for file in written:
            attempt.take_file(switch, file, _kind(file, prefix))
        report = attempt.report()
        if attempt.request.options.optimizer:
            fed = [value.name for value in report.inputs if value.role in FED]
            report = replace(report, next=[report.next[0], _next_step(folder, prefix, fed)])
        attempt.stage_reports(switch, report)
        switch.commit()
        return report


def _check_options(options: Options) -> None:
    """Refuse the options that ask for a model of another form than the artifacts have."""
    others = {
        "training_info": options.training_info,
        "as_gradient_op": options.as_gradient_op,
        "yield_": options.yield_ != "ones",
    }
    for option, given in others.items():
        if given:
            raise UsageError(f"`artifacts` does not go with `{option}`", "leave one of them out")


def _next_step(folder: Path, prefix: str, inputs: Iterable[str]) -> Next:
    """How to train with a quartet, for the report."""
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
    """What an artifact is, in words."""
    kinds = {TRAINING: "training model", EVALUATION: "evaluation model", OPTIMIZER: "optimizer model"}
    return {**kinds, CHECKPOINT: "checkpoint"}.get(file.name.removeprefix(prefix), "weights")
