"""The main job: from an inference model in a file to a training model and its report in others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import WeightsForm
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import InternalError, OnnxgradError, UnsupportedError, UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.execution.session import take_out
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.files.start_values import KEPT, check_places
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.jobs.build_attempt import BuildAttempt, BuildRequest, check_is_no_mistake
from onnxgrad_cli.jobs.pass_dump import PassDump
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.report import Report, make_report
from onnxgrad_cli.report.model import Next
from onnxgrad_cli.standard.training_info import check_request, pack, step_model
from onnxgrad_cli.verification.sizes import settle_sizes


@judged
def run_build(
    model: ModelSource,
    out: str | Path | None = None,
    options: Options | None = None,
    *,
    weights: WeightsForm = "stored",
    verify: bool | None = None,
    test_data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    reports: Sequence[str | Path] = (),
    no_report: bool = False,
    picture: str | Path | None = None,
    dump_passes: str | Path | None = None,
    stop_after: str | None = None,
    force: bool = False,
    check: bool = False,
    command: str = "",
    tell: Tell = silent,
) -> Report:
    """Turn the model in a file into a training model in another, and write the report beside it.

    Args:
        model: the inference model; '-' is stdin.
        out: the training model; '-' is stdout; by default `<model>.train.onnx`, and stdout for stdin.
        options: what to build.
        weights: where the values of weights and state are: 'stored' in the model, as initializers that can be fed, or
            beside it: with 'inputs' they are inputs like any other, which JavaScript can feed; see `start_values`.
        verify: prove the gradients; by default where that takes a few seconds.
        test_data: an .npz with arrays to prove them on, by input name, or data to train on, of which the first samples
            are taken; what is missing is drawn at random.
        tokenizer: what makes tokens of text in these data: a tokenizer.json, or the folder that it is in.
        reports: files for the report, whose suffixes say the format; by default `<out>.report.md`.
        no_report: write no report.
        picture: a page of HTML with the picture of the training model, to which reports in HTML link.
        dump_passes: a folder for the model as it is after each pass; its external data are not copied.
        stop_after: the pass to end after; the model as it is then is written, unproven.
        force: replace files that onnxgrad did not write.
        check: check the graph after each pass.
        command: the command line, for the report.
        tell: takes what is narrated.

    Returns:
        The report. Its status is 'built' or 'stopped'; or else 'refused' or 'check failed', and then no model
        was written, but the report was.

    Raises:
        UsageError: an option does not fit the model, or a file would be replaced that must not be.
        OnnxgradError: the model can't be read, or a file can't be written.
    """
    options = options or Options()
    check_request(options)
    request = BuildRequest(
        model, options, verify, checks.path_or_none("test_data", test_data),
        checks.path_or_none("tokenizer", tokenizer), checks.path_or_none("dump_passes", dump_passes), stop_after,
        force, check, command, tell,
    )  # fmt: skip
    packs = options.training_info and stop_after is None
    target = target_of(model, out, stop_after or "train")
    checks.one_of("weights", weights, WeightsForm)
    apart = weights == "inputs"
    if apart:
        _check_apart(options, stop_after, target, force)
    attempt = BuildAttempt(
        request,
        target,
        checks.paths("reports", reports),
        no_report,
        packs,
        checks.path_or_none("picture", picture),
    )
    result = attempt.run(partial(_packed if packs else _plain, attempt), attempt.dump)
    if result is None:
        return attempt.write_reports(attempt.report())
    if apart:
        return attempt.save(*_apart(result, attempt.path))
    return attempt.save(result, _step if packs else None)


def _check_apart(options: Options, stop_after: str | None, target: Path | None, force: bool) -> None:
    """Refuse what does not go with weights that are inputs."""
    others = {
        "training_info": options.training_info,
        "as_gradient_op": options.as_gradient_op,
        "stop_after": stop_after is not None,
    }
    for option, given in others.items():
        if given:
            raise UsageError(f"`weights='inputs'` does not go with `{option}`", "leave one of them out")
    if target is None:
        raise UsageError("`weights='inputs'` writes files beside the model, and there is none", "name one with `out`")
    check_places(target, force)


def _apart(model: ModelProto, path: Path | None) -> tuple[ModelProto, None, Arrays]:
    """The training model without the values of its weights and state, and these values."""
    roles = describe(model)
    held = [name for name, role in roles.inputs.items() if role in KEPT]
    bare, values = take_out(model, held, path)
    return bare, None, values | roles.begun(values)


def _plain(attempt: BuildAttempt) -> tuple[ModelProto, ModelProto]:
    """The training model, to be written and to be proved."""
    model = attempt.built.model
    return model, model


def _packed(attempt: BuildAttempt) -> tuple[ModelProto, ModelProto]:
    """The original with the training model as its TrainingInfo, to be written, and the step in it, to be proved."""
    assert attempt.original is not None
    packed = pack(attempt.original, attempt.built)
    return packed, _step(packed)


def _step(packed: ModelProto) -> ModelProto:
    """The step in a model that was packed."""
    return step_model(packed, 0)


@judged
def inspect(model: ModelSource, options: Options | None = None, *, command: str = "", tell: Tell = silent) -> Report:
    """Say what `run_build` would do with a model, and write nothing.

    Returns:
        The report. Its status is 'differentiable' or 'refused'.

    Raises:
        UsageError: an option does not fit the model.
        OnnxgradError: the model can't be read.
    """
    proto, path = own_model(model)
    check_is_no_mistake(proto, options or Options())
    return inspected(TrainingModel(Graph(proto, path), options or Options()), command=command, model=model, tell=tell)


def inspected(
    built: TrainingModel,
    *,
    command: str = "",
    model: ModelSource = "",
    tell: Tell = silent,
    told: type[OnnxgradError] = UnsupportedError,
) -> Report:
    """Run the passes on what is to be built, and report what came of it; see `inspect`.

    Errors of the kind `told` are in the report; others are raised.
    """
    options = built.options
    check_request(options)
    built.training.cautions += settle_sizes(built.graph, options).cautions()
    error: OnnxgradError | None = None
    try:
        built.run(after=PassDump(None, built.graph.path, tell=tell))
    except InternalError:  # it is judged whose fault that is
        raise
    except told as found:
        error = found
    report = make_report(built=built, error=error, command=command, options=options, model=model, sizes=options.dims)
    if error:
        return report
    count = len(built.training.gradients)
    return replace(
        report,
        status="differentiable",
        verdict=f"Differentiable: {count} gradient{'' if count == 1 else 's'} can be had.",
        next=[Next("Build it", "sh", command.replace("onnxgrad inspect", "onnxgrad build", 1))] if command else [],
    )
