"""The main job: from an inference model in a file to a training model and its report in others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import CheckFailed, OnnxgradError, UnsupportedError, UsageError, suggest
from onnxgrad_cli.files import (
    STREAM,
    check_external_data,
    check_structure,
    check_target,
    load_model,
    save_bytes,
    save_model,
)
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.skeleton import copied
from onnxgrad_cli.ir.types import nbytes
from onnxgrad_cli.jobs import make_folder, target_of
from onnxgrad_cli.jobs.check import fit, read_data
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes import VERIFY, pipeline_for
from onnxgrad_cli.passes.pipeline import Pass, PassRecord
from onnxgrad_cli.report import FORMATS, File, Report, make_report, render
from onnxgrad_cli.report.model import Next
from onnxgrad_cli.standard.training_info import check_request, pack, step_model
from onnxgrad_cli.verification.proof import LARGE, Proof, prove

FED = ("model input", "label", "sample weight")
"""The roles of what a step is fed besides the learning rate."""


def run_build(
    model: str | Path,
    out: str | Path | None = None,
    options: Options | None = None,
    *,
    verify: bool | None = None,
    test_data: Path | None = None,
    reports: Sequence[Path] = (),
    no_report: bool = False,
    dump_passes: Path | None = None,
    stop_after: str | None = None,
    artifacts: Path | None = None,
    prefix: str = "",
    nominal_checkpoint: bool = False,
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
        verify: prove the gradients; by default where that takes a few seconds.
        test_data: an .npz with arrays to prove them on, by input name; what is missing is drawn at random.
        reports: files for the report, whose suffixes say the format; by default `<out>.report.md`.
        no_report: write no report.
        dump_passes: a folder for the model as it is after each pass; its external data are not copied.
        stop_after: the pass to end after; the model as it is then is written, unproven.
        artifacts: the folder to which training, evaluation and optimizer model and the checkpoint are written, in
            place of `out`.
        prefix: what their names begin with.
        nominal_checkpoint: let the checkpoint have names, shapes and types only.
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
    if artifacts is not None:
        # not above: onnxruntime comes with them, which takes a tenth of the time of a small build
        from onnxgrad_cli.compat.artifacts import TRAINING, make_artifacts, save_artifacts
        from onnxgrad_cli.compat.generate_artifacts import kind, next_step, opens_frozen

        _check_artifacts(options, out, stop_after)
        make_folder(artifacts, "--artifacts")
        out = artifacts / f"{prefix}{TRAINING}"
    elif prefix or nominal_checkpoint:
        raise UsageError("--prefix and --nominal-checkpoint are about artifacts", "add --artifacts DIR")
    proto, path = load_model(model)
    target = target_of(path, out, stop_after or "train")
    if no_report:
        reports = []
    elif not reports and target is not None:
        reports = [target.with_name(f"{target.name}.report.md")]
    _check_targets(target, reports, proto, path, force)
    _check_names(stop_after, [step.name for step in pipeline_for(options)], reports)
    data = read_data(test_data) if test_data else {}
    dump = _Dump(dump_passes, path, force, check, tell)
    wants_proof = verify is not False and stop_after is None and options.yield_ != "keep"
    comparable = wants_proof and options.mode == "keep"  # else the training model is to compute something else
    packs = options.training_info and stop_after is None
    kept = packs or artifacts is not None
    original = copied(proto) if kept or (comparable and (verify or _is_small(proto))) else None
    folder = path.parent if path else Path()
    sources = [folder / name for name in check_external_data(proto, path)]

    built = TrainingModel(Graph(proto, path), options)
    error: OnnxgradError | None = None
    proof: Proof | None = None
    files = [File.of(path, "source model")] if path else []
    try:
        built.run(after=opens_frozen(built, dump) if artifacts is not None else dump, stop_after=stop_after)
        result = trained = built.model
        if packs and original is not None:
            result = pack(original, built)
            trained = step_model(result, 0)
        if wants_proof:
            tell("verifying the gradients", 1)
            roles = describe(trained)
            data, sizes = fit(data, trained, roles, tell, test_data)
            start = time.perf_counter()
            proof = prove(trained, roles, path, original if comparable else None, data, sizes, force=bool(verify))
            nodes = len(built.graph.nodes)
            built.records.append(PassRecord(VERIFY, time.perf_counter() - start, nodes, nodes, False))
            if proof.failed:
                raise CheckFailed(_why(proof), "the model was not written; --no-verify writes it all the same")
    except (UnsupportedError, CheckFailed) as found:
        error = found
    else:
        if artifacts is not None and original is not None:
            outputs = [value.name for value in original.graph.output] if options.keep_outputs else []
            made = make_artifacts(built, original, outputs)
            written = save_artifacts(made, artifacts, prefix, nominal=nominal_checkpoint, source=path, force=force)
            files += [File.of(file, kind(file, prefix)) for file in written]
        else:
            written = save_model(result, STREAM if target is None else target, path, force)
            files += [File.of(file, "weights" if i else "training model") for i, file in enumerate(written)]
    files += [File.of(file, "weights", digest=False) for file in sources]
    report = make_report(
        built=built, error=error, proof=proof, files=files, command=command, options=options, model=model,
        sizes=options.dims,
    )  # fmt: skip
    if artifacts is not None and options.optimizer and report.status == "built":
        fed = [value.name for value in report.inputs if value.role in FED]
        report = replace(report, next=[report.next[0], next_step(artifacts, prefix, fed)])
    for file in reports:
        save_bytes(render(report, file.suffix[1:]).encode(), file)
    return report


def inspect(model: str | Path, options: Options | None = None, *, command: str = "", tell: Tell = silent) -> Report:
    """Say what `run_build` would do with a model, and write nothing.

    Returns:
        The report. Its status is 'differentiable' or 'refused'.

    Raises:
        UsageError: an option does not fit the model.
        OnnxgradError: the model can't be read.
    """
    options = options or Options()
    check_request(options)
    proto, path = load_model(model)
    built = TrainingModel(Graph(proto, path), options)
    error: OnnxgradError | None = None
    try:
        built.run(after=_Dump(None, path, tell=tell))
    except UnsupportedError as found:
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


# -- what is written, and whether it may be -----------------------------------------------------------------


def _check_targets(
    target: Path | None, reports: Sequence[Path], model: ModelProto, path: Path | None, force: bool
) -> None:
    targets = [*([target] if target else []), *reports]
    for file in targets:
        check_target(file, model, path, force)
    twice = {file for file in targets if targets.count(file) > 1}
    if twice:
        raise UsageError(f"'{twice.pop()}' is to be written twice", "give each file its own name")


def _check_artifacts(options: Options, out: str | Path | None, stop_after: str | None) -> None:
    others = {
        "--out": out is not None,
        "--stop-after": stop_after is not None,
        "--training-info": options.training_info,
        "--as-gradient-op": options.as_gradient_op,
        "--yield": options.yield_ != "ones",
    }
    for option, given in others.items():
        if given:
            raise UsageError(f"--artifacts does not go with {option}", "leave one of them out")


def _check_names(stop_after: str | None, names: Sequence[str], reports: Sequence[Path]) -> None:
    if stop_after is not None and stop_after not in names:
        raise UsageError(f"--stop-after: there is no pass '{stop_after}'", suggest(stop_after, names, "passes"))
    for file in reports:
        if file.suffix[1:] not in FORMATS:
            raise UsageError(
                f"--report: '{file}' has no suffix that names a format",
                suggest(file.suffix[1:], FORMATS, "formats"),
            )


class _Dump:
    """Called after each pass: tells of it, checks the graph, writes it."""

    def __init__(
        self, folder: Path | None, source: Path | None, force: bool = False, check: bool = False, tell: Tell = silent
    ) -> None:
        self.folder, self.source, self.force, self.check, self.tell = folder, source, force, check, tell
        self._count = 0
        if folder:
            make_folder(folder, "--dump-passes")

    def __call__(self, step: Pass, graph: Graph, record: PassRecord) -> None:
        self._count += 1
        change = record.nodes_after - record.nodes_before
        self.tell(f"{step.name:9}{record.seconds:7.3f} s {record.nodes_after:7,} nodes ({change:+,})", 1)
        if self.check:
            check_structure(graph.commit(), f"the graph after the pass '{step.name}'")
        if self.folder:
            file = self.folder / f"{self._count}-{step.name}.onnx"
            save_model(graph.commit(), file, self.source, self.force, copy_data=False)
            self.tell(f"wrote {file}", 1)


# -- the proof ----------------------------------------------------------------------------------------------------


def _is_small(model: ModelProto) -> bool:
    return sum(nbytes(tensor) for tensor in model.graph.initializer) <= LARGE


def _why(proof: Proof) -> str:
    failed = [f"  {step.name}: {step.detail}" for step in proof.steps if step.status == "failed"]
    return "\n".join(["the training model does not pass its checks:", *failed])
