"""Build a training model from a model file in four steps: plan, transform, prove (check the gradients), write.

`docs/architecture.md` follows a build through these steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import WeightsForm
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.cost.flops import operations
from onnxgrad_cli.errors import (
    CheckFailed,
    InternalError,
    OnnxgradError,
    UnsupportedError,
    conflict,
    missing_value,
    suggest,
    unknown_name,
)
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.limits import check_ends, within_budget
from onnxgrad_cli.execution.observation import PROVABLE, given_samples, is_quick, too_large
from onnxgrad_cli.execution.session import take_out, trim
from onnxgrad_cli.execution.sizes_to_try import sizes_to_try
from onnxgrad_cli.files import (
    STREAM,
    AtomicWriteGroup,
    ModelSource,
    check_external_data,
    check_structure,
    load_model,
    make_folder,
    own_model,
    save_bytes,
    save_model,
    stage_model,
)
from onnxgrad_cli.files.start_values import KEPT, read_values, stage_values, with_values
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import has_gradients
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.jobs.output_plan import OutputPlan, target_of
from onnxgrad_cli.jobs.proof_data import ProofData, fit
from onnxgrad_cli.metadata import check_is_original, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.pipeline import VERIFY, Pass, PassRecord, pipeline_for
from onnxgrad_cli.passes.prepare.fixed_shapes import fixed_sizes
from onnxgrad_cli.report import File, Report, make_report, render
from onnxgrad_cli.report.build_report import export_cautions, folded_normalizations
from onnxgrad_cli.report.model import Next
from onnxgrad_cli.report.next_steps import in_javascript
from onnxgrad_cli.verification.checks.size_promises import settle_sizes, wrong_shape
from onnxgrad_cli.verification.verdict import PROVED, Proof, ProofStep

if TYPE_CHECKING:
    from onnxgrad_cli.verification.written_file import Ran

WRITTEN = "opens as it was written"
"""The name of the last step of a proof: the written file opens and computes the same results."""


@attribute_failures
@job
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
    """Build a training model from a model file, and write it and a report.

    Args:
        model: the inference model; '-' is stdin.
        out: the training model; '-' is stdout. By default `<model>.train.onnx`, or stdout if the model comes from
            stdin.
        options: what to build.
        weights: 'stored' makes weights and state inputs with initializers, so that feeding them is optional. 'inputs'
            makes them inputs without stored values, as JavaScript requires, and writes the values to files beside the
            model (see `start_values`).
        verify: check the gradients numerically. By default they are checked if that takes only a few seconds.
        test_data: data on which the gradients are checked: an .npz with arrays by input name, or training data, of
            which the first samples are used. The values of other inputs are drawn at random.
        tokenizer: the tokenizer for text in these data: a tokenizer.json, or the folder that holds it.
        reports: files for the report, whose suffixes give the format; by default `<out>.report.md`.
        no_report: write no report.
        picture: an HTML page with the picture of the training model, to which reports in HTML link.
        dump_passes: a folder for a copy of the model after each pass. External data are not copied.
        stop_after: the name of a pass. The model after this pass is written, and its gradients are not checked.
        force: replace files that onnxgrad did not write.
        check: check after each pass that the graph is valid.
        command: the command line, for the report.
        tell: receives progress messages.

    Returns:
        The report. Its status is 'built' or 'stopped' if a model was written. If it is 'refused' or 'check_failed',
        only the report was written.

    Raises:
        UsageError: an option does not fit the model, or an existing file would be replaced.
        OnnxgradError: the model can't be read, or a file can't be written.
    """
    options = options or Options()
    target = target_of(model, out, stop_after or "train")
    checks.one_of("weights", weights, WeightsForm)
    if weights == "inputs":
        _check_weights_are_inputs(options, stop_after, target)
    outputs = OutputPlan.of(
        target, values_beside=weights == "inputs", reports=reports, no_report=no_report, picture=picture,
        dump=dump_passes, force=force,
    )  # fmt: skip
    plan = plan_build(
        model, outputs, options, verify=verify, test_data=test_data, tokenizer=tokenizer, stop_after=stop_after,
        check=check, command=command, tell=tell,
    )  # fmt: skip
    build = transform(plan)
    prove(build)
    return write(build)


# -- plan -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuildPlan:
    """The plan of a build: its inputs, which have been read, and its output files, which may be written.

    Attributes:
        source: the inference model as the caller passed it.
        model: the inference model. The passes change it.
        path: the file of the inference model; None for stdin and for a model in memory.
        weights: the files of the external data of the inference model.
        folded: sentences about normalizations that the exporter folded into other layers.
        outputs: the files to write.
        options: what to build.
        data: data on which the gradients are checked.
        verify, stop_after, check, command, tell: see `run_build`.
    """

    source: ModelSource
    model: ModelProto
    path: Path | None
    weights: tuple[Path, ...]
    folded: list[str]
    outputs: OutputPlan
    options: Options
    data: ProofData
    verify: bool | None
    stop_after: str | None
    check: bool
    command: str
    tell: Tell

    @property
    def proves(self) -> bool:
        """True if this build checks the gradients, or does so if that is quick."""
        return self.verify is not False and self.stop_after is None and self.options.yield_ != "keep"

    @property
    def packs(self) -> bool:
        """True if the training model is written as training information (TrainingInfoProto) of the inference model."""
        return self.options.training_info and self.stop_after is None

    @contextmanager
    def limits(self) -> Iterator[None]:
        """In the block, limit the time for running models, unless `verify` is True, and feed the user's arrays."""
        with within_budget(limited=not self.verify), given_samples(self.data.whole):
            yield


def plan_build(
    model: ModelSource,
    outputs: OutputPlan,
    options: Options,
    *,
    verify: bool | None = None,
    test_data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    stop_after: str | None = None,
    check: bool = False,
    command: str = "",
    tell: Tell = silent,
) -> BuildPlan:
    """Read all inputs of a build, and check that all its output files may be written.

    See `run_build` for the arguments.

    Raises:
        UsageError: an option does not fit the model, or an existing file would be replaced.
        OnnxgradError: the model or the data can't be read, or a file can't be written.
    """
    _check_options(options)
    data, vocabulary = checks.path_or_none("test_data", test_data), checks.path_or_none("tokenizer", tokenizer)
    protect_inputs(data, vocabulary, *(spec.name for spec in options.losses))
    proto, path = own_model(model)
    # A named output allows gradients of gradients, for which the model is a training model already.
    if options.output is None and not any(spec.output for spec in options.losses):
        check_is_original(proto)
    outputs.check(proto, path)
    names = [step.name for step in pipeline_for(options)]
    if stop_after is not None and stop_after not in names:
        raise unknown_name(f"`stop_after`: there is no pass '{stop_after}'", suggest(stop_after, names, "passes"))
    given = ProofData.of(data, vocabulary)
    if outputs.dump is not None:
        make_folder(outputs.dump, "`dump_passes`")
    folder = path.parent if path else Path()
    weights = tuple(folder / name for name in check_external_data(proto, path))
    return BuildPlan(
        model, proto, path, weights, folded_normalizations(proto), outputs, options, given, verify, stop_after, check,
        command, tell,
    )  # fmt: skip


def _check_options(options: Options) -> None:
    """Check the options of training information and of schedules, which few builds have."""
    if options.training_info:
        from onnxgrad_cli.standard.training_info import check_request

        check_request(options)
    elif options.init != Options.init or (options.seed is not None and not options.lora):
        raise conflict(
            "`init` and `seed` require `training_info`, because they set its initialization", "add that option"
        )
    for spec in options.losses:
        if spec.schedule:
            from onnxgrad_cli.training.schedules import weight_schedule

            weight_schedule(spec, steps=1, epoch=1)


def _check_weights_are_inputs(options: Options, stop_after: str | None, target: Path | None) -> None:
    """Raise an error for options that can't be combined with `weights='inputs'`."""
    checks.conflicts("`weights='inputs'`", {
        "`training_info`": options.training_info,
        "`as_gradient_op`": options.as_gradient_op,
        "`stop_after`": stop_after is not None,
    })  # fmt: skip
    if target is None:
        raise missing_value(
            "`weights='inputs'` writes files beside the model, but the model is written to stdout",
            "name a file with `out`",
        )


# -- transform --------------------------------------------------------------------------------------------------------


@dataclass
class Build:
    """The state of a build between its steps, and the data for its report.

    Attributes:
        plan: the plan.
        built: the training model, after the passes that have run so far.
        original: a copy of the inference model; None if neither the result nor the check of the gradients needs one.
        tests: True if the model may be run to check that its declared shapes are right.
        believed: True if the build relies on declared sizes that were not checked by a run.
        result: the model to write; None before the passes have run.
        proof: the result of checking the gradients; None if they were not checked.
        ran: the run of the training model in the check. The results of the written file are compared with its results.
        files: the files read and written, for the report.
        error: the error that prevented a training model, if any.
    """

    plan: BuildPlan
    built: TrainingModel
    original: ModelProto | None
    tests: bool
    believed: bool
    result: ModelProto | None = None
    proof: Proof | None = None
    ran: list[Ran] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    error: OnnxgradError | None = None

    @contextmanager
    def failures(self, *kinds: type[OnnxgradError]) -> Iterator[None]:
        """Store an error of one of these types in `error`, for the report, instead of raising it."""
        try:
            yield
        except kinds as error:
            # `attribute_failures` decides later if the model or onnxgrad is at fault
            if isinstance(error, InternalError):
                raise
            self.error = error

    def training_model(self, written: ModelProto) -> ModelProto:
        """Return the training model. A model with ONNX training information contains it as the first training step."""
        if not self.plan.packs:
            return written
        from onnxgrad_cli.standard.training_info import step_model

        return step_model(written, 0)

    def report(self) -> Report:
        """Return the report on this build."""
        plan = self.plan
        files = [*self.files, *(File.of(file, "weights", digest=False) for file in plan.weights)]
        return make_report(
            built=self.built, error=self.error, proof=self.proof, files=files, command=plan.command,
            options=plan.options, model=plan.source, sizes=plan.options.dims,
            cautions=export_cautions(plan.folded, self.built.training.trained) if self.built else (),
        )  # fmt: skip


REFUSALS = (UnsupportedError, CheckFailed)
"""Types of errors that `Build.error` stores. They end the build, but not the job, which still writes a report."""


def transform(
    plan: BuildPlan, keeps_original: bool = False, frozen_are_inputs: bool = False,
    kept: tuple[type[OnnxgradError], ...] = REFUSALS,
) -> Build:  # fmt: skip
    """Run the passes of a build. If a pass refuses the model, store its error in `Build.error`.

    Args:
        plan: the plan of the build.
        keeps_original: keep a copy of the inference model, even if the check of the gradients doesn't need one.
        frozen_are_inputs: see `TrainingModel`.
        kept: the types of errors to store in `Build.error` instead of raising them.
    """
    tests = plan.proves and (bool(plan.verify) or is_quick(plan.model))
    graph = Graph(plan.model, plan.path)
    promises = settle_sizes(graph, plan.options, tests)
    compares = plan.proves and plan.options.mode == "keep"  # in mode 'train' the training model computes other outputs
    wanted = keeps_original or plan.packs or (compares and (plan.verify or not too_large(plan.model, PROVABLE)))
    built = TrainingModel(graph, plan.options, frozen_are_inputs=frozen_are_inputs)
    built.training.cautions += promises.cautions()
    build = Build(plan, built, copied(plan.model) if wanted else None, tests, bool(promises.kept))
    if plan.path:
        build.files.append(File.of(plan.path, "source model"))
    with build.failures(*kept), plan.limits():
        for number, (step, record) in enumerate(built.steps(plan.stop_after), 1):
            _after_pass(plan, graph, number, step, record)
        _check_shapes(build)
        build.result = built.model
        if plan.packs:
            from onnxgrad_cli.standard.training_info import pack

            assert build.original is not None
            build.result = pack(build.original, built)
    return build


def _after_pass(plan: BuildPlan, graph: Graph, number: int, step: Pass, record: PassRecord) -> None:
    """Report a pass that has run. If requested, check the graph, and write a copy of the model at this point."""
    change = record.nodes_after - record.nodes_before
    plan.tell(f"{step.name:9}{record.seconds:7.3f} s {record.nodes_after:7,} nodes ({change:+,})", 1)
    if plan.check:
        check_structure(graph.commit(), f"the graph after the pass '{step.name}'")
    if plan.outputs.dump is not None:
        file = plan.outputs.dump / f"{number}-{step.name}.onnx"
        save_model(graph.commit(), file, plan.path, plan.outputs.force, copy_data=False)
        plan.tell(f"wrote {file}", 1)


def _check_shapes(build: Build) -> None:
    """If the build relies on declared or observed shapes, check that the model has these shapes in other runs."""
    plan, graph = build.plan, build.built.graph
    believed = build.believed or graph.assumed or graph.observed
    if believed and build.tests and build.original is not None and plan.stop_after is None:
        wrong = wrong_shape(build.original, plan.path, graph, fixed_sizes(plan.options))
        if wrong:
            raise CheckFailed(f"the model contradicts its declared shapes: {wrong}", "export it again")


# -- prove ------------------------------------------------------------------------------------------------------------


def prove(build: Build) -> None:
    """Check the gradients of the training model, if `BuildPlan.proves` is True.

    Store the error of a failed check in `Build.error`.
    """
    if not build.plan.proves or build.error is not None:
        return
    from onnxgrad_cli.verification import proof  # imported here because builds without a proof don't need it

    with build.failures(*REFUSALS), build.plan.limits():
        plan, graph = build.plan, build.built.graph
        assert build.result is not None
        trained = build.training_model(build.result)
        if plan.verify:  # a requested proof is not limited, so the model itself is checked first
            check_ends(graph)
        plan.tell("verifying the gradients", 1)
        roles = describe(trained)
        data, sizes = fit(plan.data, trained, roles, plan.tell)
        original = build.original if plan.options.mode == "keep" else None
        start = time.perf_counter()
        shapes = {value.name: shape_of(value.type) or () for value in graph.proto.graph.input}
        drawn = next(sizes_to_try(shapes, graph.proto), {})
        build.proof = proof.prove(
            trained, roles, plan.path, original, data, sizes, force=bool(plan.verify),
            operations=operations(graph, {**drawn, **sizes}), note=lambda check: plan.tell(f"checking: {check}", 1),
            keep=build.ran.append,
        )  # fmt: skip
        if not is_quick(trained):
            trim()
        nodes = len(graph.nodes)
        build.built.records.append(PassRecord(VERIFY, time.perf_counter() - start, nodes, nodes))
        if build.proof.failed:
            raise _failed(build.proof)
        if plan.verify and build.proof.verdict != PROVED:
            raise CheckFailed(
                f"the requested proof of the training model was not possible: {build.proof.why}",
                "the model was not written; to write it without a proof, leave `verify=True` out",
            )


def _failed(proof: Proof) -> CheckFailed:
    """Return the error that lists the failed steps of a proof."""
    return CheckFailed(
        "the training model does not pass its checks:",
        "the model was not written; `verify=False` writes it without checks",
        [f"{step.name}: {step.detail}" for step in proof.steps if step.status == "failed"],
    )


# -- write ------------------------------------------------------------------------------------------------------------


def write(build: Build) -> Report:
    """Write the model, its other files and its reports atomically, if the file passes `check_written`.

    If the build failed, only the reports are written.

    Returns:
        The report. It lists the files written, or gives the reason why no model was written.
    """
    outputs, target, model = build.plan.outputs, build.plan.outputs.model, build.result
    if build.error is not None or model is None:
        return write_reports(build)
    if target is None:
        save_model(model, STREAM)
        return write_reports(build)
    with build.failures(CheckFailed), AtomicWriteGroup(target, bound=outputs.values_beside) as switch:
        beside: list[Path] = []
        if outputs.values_beside:
            model, values = _without_values(model, build.plan.path)
            beside = stage_values(switch, model, values, target)
        written = stage_model(switch, model, target, build.plan.path)
        proved: Callable[[ModelProto], ModelProto] | None = build.training_model if build.plan.packs else None
        if beside:
            roles, held = map(switch.where, beside)
            proved = partial(_with_values_beside, roles, held)
        check_written(build, switch.where(target), model, proved)
        for file in (*written, *beside):
            list_file(build, switch, file, "training model" if file == target else "weights")
        if outputs.picture is not None:
            from onnxgrad_cli.view import draw  # imported here because most builds have no picture
            from onnxgrad_cli.view.html_drawing import html

            switch.stage(outputs.picture, methodcaller("write", html(draw(model, build.plan.path)).encode()))
            list_file(build, switch, outputs.picture, "picture")
        report = build.report()
        if beside:
            report = replace(report, next=[*commands(report), in_javascript(report, target, beside[0])])
        stage_reports(build, switch, report)
        switch.commit()
        return with_reports(build, report)
    return write_reports(build)


def _without_values(model: ModelProto, path: Path | None) -> tuple[ModelProto, Arrays]:
    """Return a training model with the values of its weights and state removed, and these values."""
    roles = describe(model)
    bare, values = take_out(model, [name for name, role in roles.inputs.items() if role in KEPT], path)
    return bare, values | roles.begun(values)


def _with_values_beside(roles: Path, values: Path, written: ModelProto) -> ModelProto:
    """Return a copy of a written model that stores the values from the files beside it, as the checked model does."""
    return with_values(written, read_values(values, roles).values)


def check_written(
    build: Build, file: Path, model: ModelProto, proved: Callable[[ModelProto], ModelProto] | None = None
) -> None:
    """Check that onnxruntime opens a written file, and that the model in it computes the same as the checked model.

    Args:
        build: the build.
        file: the file.
        model: the model that was written to it.
        proved: converts the model in the file to the form in which it was checked; None if the forms are the same.

    Raises:
        CheckFailed: onnxruntime does not open the file, or the results differ.
    """
    if build.proof is None or has_gradients(model):
        return
    from onnxgrad_cli.verification.written_file import difference

    build.plan.tell("checking: the file that was written", 1)
    start = time.perf_counter()
    with within_budget(limited=not build.plan.verify):
        fault = difference(file, model, build.ran[0], proved) if build.ran else _why_not_opened(build, file, model)
    build.proof.add(ProofStep(WRITTEN, "failed" if fault else "passed", fault, time.perf_counter() - start))
    if fault:
        raise _failed(build.proof)


def _why_not_opened(build: Build, file: Path, model: ModelProto) -> str:
    """If onnxruntime opens the original model but not a file, return the reason; otherwise return ""."""
    from onnxgrad_cli.verification.written_file import refused

    why, path, original = refused(model, None, file), build.plan.path, build.original
    if why and original is None and path is not None:
        original = load_model(path)[0]
    return why if original is not None and not refused(original, path) else ""


def list_file(build: Build, switch: AtomicWriteGroup, file: Path, role: str) -> None:
    """Add a file to the list of files in a build's report. The file may still have a temporary name on the disk."""
    build.files.append(replace(File.of(switch.where(file), role), path=str(file)))


def stage_reports(build: Build, switch: AtomicWriteGroup, report: Report) -> None:
    """Add the files of a report to a group of files that is replaced atomically."""
    picture = build.plan.outputs.picture
    for file in build.plan.outputs.reports:
        page = "" if picture is None else quote(Path(relpath(picture, file.parent)).as_posix())
        switch.stage(file, methodcaller("write", render(report, file.suffix[1:], page).encode()))


def write_reports(build: Build) -> Report:
    """Write the report files without a model, and return the report."""
    report = build.report()
    for file in build.plan.outputs.reports:
        save_bytes(render(report, file.suffix[1:]).encode(), file)
    return with_reports(build, report)


def with_reports(build: Build, report: Report) -> Report:
    """Return a report that also lists its own files. They must exist."""
    return replace(report, files=[*report.files, *(File.of(file, "report") for file in build.plan.outputs.reports)])


def commands(report: Report) -> list[Next]:
    """Return the next steps of a report that are shell commands."""
    return [step for step in report.next if step.language == "sh"]
