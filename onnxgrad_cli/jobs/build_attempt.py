"""What `run_build` and `run_artifacts` have in common: a build from a file, its proof and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np
from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.cost.operations import operations
from onnxgrad_cli.errors import CheckFailed, OnnxgradError, UnsupportedError, UsageError, suggest
from onnxgrad_cli.execution.endless import check_ends
from onnxgrad_cli.execution.limits import unasked
from onnxgrad_cli.execution.observation import PROVABLE, given_samples, is_quick, too_large
from onnxgrad_cli.execution.session import trim
from onnxgrad_cli.execution.sizes import sizes_to_try
from onnxgrad_cli.files import (
    STREAM,
    ModelSource,
    Switch,
    check_apart,
    check_external_data,
    check_target,
    followed,
    load_model,
    own_model,
    save_bytes,
    save_model,
    stage_model,
)
from onnxgrad_cli.files.start_values import read_values, stage_values, with_values
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.jobs.pass_dump import PassDump
from onnxgrad_cli.jobs.proof_data import ProofData, fit
from onnxgrad_cli.metadata import check_is_original, describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes import VERIFY, pipeline_for
from onnxgrad_cli.passes.pipeline import Pass, PassRecord
from onnxgrad_cli.passes.prepare.fixed_shapes import fixed_sizes
from onnxgrad_cli.report import FORMATS, File, Report, make_report, render
from onnxgrad_cli.report.next_steps import in_javascript
from onnxgrad_cli.standard.gradient_operator import has_gradients
from onnxgrad_cli.verification.verdict import PROVED, Proof, Step

if TYPE_CHECKING:
    from onnxgrad_cli.verification.written import Ran
from onnxgrad_cli.verification.sizes import settle_sizes, wrong_shape

AfterPass = Callable[[Pass, Graph, PassRecord], None]

WRITTEN = "opens as it was written"
"""The last step of a proof."""


class BuildRequest(NamedTuple):
    """What a job that builds is asked for; the attributes are those of `run_build`."""

    model: ModelSource
    options: Options
    verify: bool | None = None
    test_data: Path | None = None
    tokenizer: Path | None = None
    dump_passes: Path | None = None
    stop_after: str | None = None
    force: bool = False
    check: bool = False
    command: str = ""
    tell: Tell = silent

    @property
    def proves(self) -> bool:
        """Whether the gradients are to be proved."""
        return self.verify is not False and self.stop_after is None and self.options.yield_ != "keep"

    @property
    def compares(self) -> bool:
        """Whether the proof compares the training model to the original, which in mode 'train' it does not repeat."""
        return self.proves and self.options.mode == "keep"


class BuildAttempt:
    """A model on its way from its file to a training model, and what the report says of it in the end.

    Attributes:
        built: the training model, as far as the passes have come.
        original: a copy of the inference model; None where neither the job nor the proof needs one.
        path: the file of the inference model; None is stdin.
        target: the file of the training model; None is stdout.
        picture: the page with the picture of it; None where there is to be none.
        dump: what is done after each pass.
        files: the files read and written.
        proof: what the proof found; None where there was none.
        error: why there is no training model; None where there is one.

    Raises:
        UsageError: a request does not fit the options or the model, or a file would be replaced that must not be.
        OnnxgradError: the model or the test data can't be read.
    """

    def __init__(
        self,
        request: BuildRequest,
        target: Path | None,
        reports: Sequence[Path],
        no_report: bool,
        keeps_original: bool,
        picture: Path | None = None,
    ) -> None:
        keep(request.test_data, request.tokenizer, *(spec.name for spec in request.options.losses))
        proto, path = own_model(request.model)
        check_is_no_mistake(proto, request.options)
        self.request, self.path, self.target = request, path, target
        self.reports = _report_files(self.target, reports, no_report)
        self.picture = page_for(picture, self.target)
        _check_targets(
            self.target, [*self.reports, *([self.picture] if self.picture else [])], proto, path, request.force
        )
        _check_words(request, self.reports)
        self._data = ProofData.of(request.test_data, request.tokenizer)
        self.dump = PassDump(request.dump_passes, path, request.force, request.check, request.tell)
        graph = Graph(proto, path)
        self._tests = request.proves and (bool(request.verify) or is_quick(proto))
        self._promises = settle_sizes(graph, request.options, self._tests)
        wanted = keeps_original or (request.compares and (request.verify or not too_large(proto, PROVABLE)))
        self.original = copied(proto) if wanted else None
        folder = path.parent if path else Path()
        self._weights = [folder / name for name in check_external_data(proto, path)]
        self.built = TrainingModel(graph, request.options)
        self.built.training.cautions += self._promises.cautions()
        self.files = [File.of(path, "source model")] if path else []
        self.proof: Proof | None = None
        self._ran: list[Ran] = []
        self.error: OnnxgradError | None = None

    def run(self, finish: Callable[[], tuple[ModelProto, ModelProto]], after: AfterPass) -> ModelProto | None:
        """Run the passes, and prove what they have made.

        Args:
            finish: called after the passes; returns the model to write, and the training model to prove.
            after: called after each pass.

        Returns:
            The model to write; None where the model was refused or a check failed: `error` says why.
        """
        try:
            with unasked(limited=not self.request.verify), given_samples(self._data.whole):
                self.built.run(after=after, stop_after=self.request.stop_after)
                self._check_shapes()
                result, trained = finish()
                if self.request.proves:
                    self._prove(trained)
        except (UnsupportedError, CheckFailed) as error:
            self.error = error
            return None
        return result

    def _check_shapes(self) -> None:
        """See that a model whose declarations were believed has the shapes that it was built with."""
        graph, request = self.built.graph, self.request
        believed = self._promises.kept or graph.assumed or graph.observed
        if believed and self._tests and self.original is not None and request.stop_after is None:
            wrong = wrong_shape(self.original, self.path, graph, fixed_sizes(request.options))
            if wrong:
                raise CheckFailed(f"the model contradicts what it says of its shapes: {wrong}", "export it again")

    def _prove(self, trained: ModelProto) -> None:
        """Prove a training model; a proof that fails raises CheckFailed."""
        from onnxgrad_cli.verification.proof import prove  # a build without a proof does without its modules

        request = self.request
        if request.verify:  # it has no limits, but for those of the user's patience
            check_ends(self.built.graph)
        request.tell("verifying the gradients", 1)
        roles = describe(trained)
        data, sizes = fit(self._data, trained, roles, request.tell)
        original = self.original if request.compares else None
        start = time.perf_counter()
        self.proof = prove(
            trained, roles, self.path, original, data, sizes, force=bool(request.verify),
            operations=self._operations(sizes),
            note=lambda check: request.tell(f"checking: {check}", 1), keep=self._ran.append,
        )  # fmt: skip
        if not is_quick(trained):
            trim()
        nodes = len(self.built.graph.nodes)
        self.built.records.append(PassRecord(VERIFY, time.perf_counter() - start, nodes, nodes, False))
        if self.proof.failed:
            raise _failed(self.proof)
        if request.verify and self.proof.verdict != PROVED:
            raise CheckFailed(
                f"the training model is not proved, as was asked for: {self.proof.why}",
                "the model was not written; without `verify=True` it is, with that as its verdict",
            )

    def _operations(self, sizes: Mapping[str, int]) -> int:
        """Those of one run of the training model, at the first sizes that its proof tries."""
        graph = self.built.graph
        shapes = {value.name: shape_of(value.type) or () for value in graph.proto.graph.input}
        drawn = next(sizes_to_try(shapes, graph.proto), {})
        return operations(graph, {**drawn, **sizes})

    def report(self) -> Report:
        """The report on what was asked and done."""
        options = self.request.options
        weights = [File.of(file, "weights", digest=False) for file in self._weights]
        return make_report(
            built=self.built, error=self.error, proof=self.proof, files=[*self.files, *weights],
            command=self.request.command, options=options, model=self.request.model, sizes=options.dims,
        )  # fmt: skip

    def save(
        self,
        model: ModelProto,
        step: Callable[[ModelProto], ModelProto] | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> Report:
        """Write a model that has run and its reports, which take their names together, if its file is what was proved.

        Args:
            model: the model to write.
            step: what makes of it the training model that was proved; None: it is that model.
            values: those of its weights and state, to be written beside it; None: the model has them.

        Returns:
            The report, on what was written or on why it was not.
        """
        if self.target is None:
            save_model(model, STREAM)
            return self.write_reports(self.report())
        try:
            with Switch(self.target, bound=values is not None) as switch:
                beside = [] if values is None else stage_values(switch, model, values, self.target)
                step = partial(_restored, switch.where(beside[0]), switch.where(beside[1])) if beside else step
                written = stage_model(
                    switch, model, self.target, self.path, check=lambda file: self.check_written(file, model, step)
                )
                for file in [*written, *beside]:
                    self.take_file(switch, file, "training model" if file == self.target else "weights")
                if self.picture is not None:
                    drawn = _page_of(model, self.path).encode()
                    switch.stage(self.picture, methodcaller("write", drawn))
                    self.take_file(switch, self.picture, "picture")
                report = self.report()
                if beside:
                    report = replace(report, next=[report.next[0], in_javascript(report, self.target, beside[0])])
                self.stage_reports(switch, report)
                switch.commit()
                return report
        except CheckFailed as error:
            self.error = error
            return self.write_reports(self.report())

    def take_file(self, switch: Switch, file: Path, role: str) -> None:
        """Let the report list a file that was written, and may not have its name yet."""
        self.files.append(replace(File.of(switch.where(file), role), path=str(file)))

    def stage_reports(self, switch: Switch, report: Report) -> None:
        """Write a report to the files that are for it, which take their names with others."""
        for file in self.reports:
            page = "" if self.picture is None else quote(Path(relpath(self.picture, file.parent)).as_posix())
            switch.stage(file, methodcaller("write", render(report, file.suffix[1:], page).encode()))

    def check_written(
        self, file: Path, model: ModelProto, step: Callable[[ModelProto], ModelProto] | None = None
    ) -> None:
        """The last step of the proof: onnxruntime opens what was written, and computes with it what was proved.

        Raises:
            CheckFailed: it does not.
        """
        if self.proof is None or has_gradients(model):
            return
        from onnxgrad_cli.verification.written import difference

        self.request.tell("checking: the file that was written", 1)
        start = time.perf_counter()
        with unasked(limited=not self.request.verify):
            fault = difference(file, model, self._ran[0], step) if self._ran else self._unopened(file, model)
        self.proof.add(Step(WRITTEN, "failed" if fault else "passed", fault, time.perf_counter() - start))
        if fault:
            raise _failed(self.proof)

    def _unopened(self, file: Path, model: ModelProto) -> str:
        """Why onnxruntime does not open a file, though it opens the original; "" where it does."""
        from onnxgrad_cli.verification.written import refused

        why = refused(model, None, file)
        if why and self.original is None and self.path is not None:
            self.original = load_model(self.path)[0]
        return why if self.original is not None and not refused(self.original, self.path) else ""

    def write_reports(self, report: Report) -> Report:
        """Write a report to the files that are for it, and return it."""
        for file in self.reports:
            save_bytes(render(report, file.suffix[1:]).encode(), file)
        return report


def check_is_no_mistake(model: ModelProto, options: Options) -> None:
    """Refuse a training model, but where an output is named: so gradients of gradients are built.

    Raises:
        UsageError: it is a training model, and what is to be judged is not said.
    """
    if options.output is None and not any(spec.output for spec in options.losses):
        check_is_original(model)


def _restored(roles: Path, values: Path, written: ModelProto) -> ModelProto:
    """The training model that was proved, of what was written of it and of the values beside."""
    return with_values(written, read_values(values, roles).values)


# -- what is asked, and whether it may be -----------------------------------------------------------------------


def _report_files(target: Path | None, reports: Sequence[Path], no_report: bool) -> Sequence[Path]:
    """The files for the report: those asked for, else one beside the model, as `<target>.report.md`."""
    if no_report:
        return []
    if reports or target is None:
        return [followed(file) for file in reports]
    return [target.with_name(f"{target.name}.report.md")]


def page_for(picture: Path | None, target: Path | None) -> Path | None:
    """The page for a picture of the training model.

    Args:
        picture: what is asked for; None: there is to be none.
        target: the file of the model beside which it is written; None is stdout.

    Raises:
        UsageError: it is no page, or there is no file beside which it could be.
    """
    if picture is not None and picture.suffix.lower() != ".html":
        raise UsageError(f"`picture`: '{picture}' is no page of HTML", "call it .html; `onnxgrad view` has other forms")
    if picture is not None and target is None:
        raise UsageError("`picture` is written beside the model, which goes to stdout", "name a file with `out`")
    return picture and followed(picture)


def _page_of(model: ModelProto, path: Path | None) -> str:
    """The page with the picture of a model; most builds want none, and don't import what draws it."""
    from onnxgrad_cli.view import draw
    from onnxgrad_cli.view.html import html

    return html(draw(model, path))


def _check_targets(
    target: Path | None, reports: Sequence[Path], model: ModelProto, source: Path | None, force: bool
) -> None:
    """Make sure, before a build begins, that its model and reports may be written.

    Args:
        target: the file for the model; None is stdout.
        reports: the files for what is written beside it.
        model, source: the model that is built from and its file: neither that file nor its weights are overwritten.
        force: replace files that onnxgrad did not write.

    Raises:
        UsageError: a file would be replaced that must not be, or two files have one name.
    """
    targets = [*([target] if target else []), *reports]
    for file in targets:
        check_target(file, model, source, force)
    check_apart(targets)


def _check_words(request: BuildRequest, reports: Sequence[Path]) -> None:
    """Make sure that there is a pass of the name to stop after, and a format for each report."""
    names = [step.name for step in pipeline_for(request.options)]
    if request.stop_after is not None and request.stop_after not in names:
        raise UsageError(
            f"`stop_after`: there is no pass '{request.stop_after}'", suggest(request.stop_after, names, "passes")
        )
    for file in reports:
        if file.suffix[1:] not in FORMATS:
            raise UsageError(
                f"`reports`: '{file}' has no suffix that names a format",
                suggest(file.suffix[1:], FORMATS, "formats"),
            )


def _failed(proof: Proof) -> CheckFailed:
    """What a proof that failed ends with."""
    return CheckFailed(
        "the training model does not pass its checks:",
        "the model was not written; `verify=False` writes it all the same",
        [f"{step.name}: {step.detail}" for step in proof.steps if step.status == "failed"],
    )
