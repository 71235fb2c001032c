"""Inspect a model: its file, the repairs made when reading it, the weights to train, and how to export it better."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.escape import decoded
from onnxgrad_cli.common.flags import as_cli_flags, job
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.observation import fed_types
from onnxgrad_cli.files import ModelSource
from onnxgrad_cli.ir.domains import full_name, is_standard, plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import is_for_inference
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.provenance import provenance
from onnxgrad_cli.ir.types import UNNAMED, in_words, shape_of
from onnxgrad_cli.jobs.build import REFUSALS, plan_build, transform
from onnxgrad_cli.jobs.output_plan import OutputPlan
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.sharing import twins
from onnxgrad_cli.report import Report, make_report
from onnxgrad_cli.report.build_report import invented_names
from onnxgrad_cli.report.formatting import several
from onnxgrad_cli.report.model import Diagnosis, Next, Origin

MODES = ("BatchNormalization", "Dropout")
"""Operators that compute something else in training than in inference."""


@attribute_failures
@job
def inspect(model: ModelSource, options: Options | None = None, *, command: str = "", tell: Tell = silent) -> Report:
    """Report on a model, the weights that `run_build` would train, and export problems. Nothing is written.

    Args:
        model: the model; '-' is stdin.
        options: the options with which the training model would be built.
        command: the command line.
        tell: receives progress messages.

    Returns:
        The report, with a diagnosis. Its status is 'differentiable', 'refused', 'check_failed' or 'usage'.

    Raises:
        UsageError: the options contradict each other, or the model is a training model already.
        OnnxgradError: the model can't be read, or is not valid.
    """
    options = options or Options()
    plan = plan_build(model, OutputPlan(None), options, command=command, tell=tell)
    origin, modes, folded = _origin(plan.model), list(_modes(plan.model)), plan.folded
    build = transform(plan, kept=(*REFUSALS, UsageError))
    built, error = build.built, build.error
    report = make_report(built=built, error=error, command=command, options=options, model=model, sizes=options.dims)
    weights = [weight.name for weight in report.weights]
    unnamed = invented_names(weights)
    diagnosis = Diagnosis(
        origin=origin,
        repaired=list(_repaired(origin, built, report)),
        doubts=[
            as_cli_flags(c.text) for c in report.cautions if c.kind == "note" and c.subject in built.graph.initializers
        ],
        unnamed=unnamed,
        equal=_equal(built.graph, weights),
        normalization=[*modes, *folded],
        proof=[as_cli_flags(text) for text in _proof(origin, report)],
        advice=[as_cli_flags(text) for text in _advice(origin, unnamed, bool(folded), bool(modes))],
    )
    if error:
        verdict = report.verdict.removesuffix(" No training model was written.")
        verdict = verdict.replace(": no training model was written.", ".")
        status = "usage" if isinstance(error, UsageError) else report.status
        return replace(report, status=status, verdict=verdict, diagnosis=diagnosis, next=[])
    return replace(
        report,
        status="differentiable",
        verdict=_verdict(len(weights), len(built.training.gradients)),
        diagnosis=diagnosis,
        next=[Next("Build it", "sh", command.replace("onnxgrad inspect", "onnxgrad build", 1))] if command else [],
    )


def _verdict(weights: int, gradients: int) -> str:
    """Return a sentence that counts the weights and inputs that get a gradient."""
    inputs = f" and {several(gradients - weights, 'input')}" if gradients > weights else ""
    return f"Differentiable: {several(weights, 'weight')}{inputs} will get a gradient."


# -- the file ---------------------------------------------------------------------------------------------------------


def _origin(model: ModelProto) -> Origin:
    graph = model.graph
    fed = fed_types(model)
    dims = [dim for kind in fed.values() for dim in shape_of(kind) or () if isinstance(dim, str)]
    sizes = ["?" if UNNAMED.fullmatch(dim) else dim for dim in dims]
    return Origin(
        exporter=_exporter(model),
        producer=f"{decoded(model.producer_name)} {decoded(model.producer_version)}".strip(),
        ir_version=model.ir_version,
        domains={plain_domain(entry.domain): entry.version for entry in model.opset_import},
        operators=dict(Counter(_name(node) for node in with_bodies(graph.node)).most_common()),
        functions=[full_name(function.name, function.domain) for function in model.functions],
        inputs={name: in_words(kind) for name, kind in fed.items()},
        outputs={value.name: in_words(value.type) for value in graph.output},
        sizes=list(dict.fromkeys(sizes)),
    )


def _name(node: Node) -> str:
    return node.op_type if is_standard(node.domain) else full_name(node.op_type, node.domain)


NEWER, OLDER = "PyTorch's newer exporter", "PyTorch's older exporter"
PROGRAMS = {
    "tf2onnx": "tf2onnx, from TensorFlow",
    "onnxruntime-genai": "onnxruntime's builder of generative models",
    "onnx.quantize": "onnxruntime's quantizer",
    "onnxruntime.quant": "onnxruntime's quantizer",
    "skl2onnx": "skl2onnx, from scikit-learn",
    "OnnxMLTools": "onnxmltools",
    "onnx-ad": "onnx-ad",
}
"""Name of the producer in a model -> its name in the report."""


def _exporter(model: ModelProto) -> str:
    said = provenance(model)
    if said.by_pytorch:
        return NEWER if said.learned or said.fixed else OLDER
    name = decoded(model.producer_name)
    return PROGRAMS.get(name, name or "an unnamed program")


def _repaired(origin: Origin, built: TrainingModel, report: Report) -> Iterator[str]:
    """Yield a description of each part of the model that was converted or repaired when it was read."""
    if origin.functions:
        yield f"{several(len(origin.functions), 'function')} of the model: replaced by their nodes"
    left = {_name(node) for node in built.graph.nodes}
    for name, count in origin.operators.items():
        if "::" in name and name not in left and name not in origin.functions:
            yield f"{name}, {several(count, 'node')}: replaced by standard operators"
    for caution in report.cautions:
        if caution.kind == "opset change" or (
            caution.kind == "note" and caution.subject not in built.graph.initializers
        ):
            yield as_cli_flags(caution.text)


# -- the weights ------------------------------------------------------------------------------------------------------


def _equal(graph: Graph, names: list[str]) -> list[list[str]]:
    """Return groups of weights that are equal or transposed copies, which may be one weight in the source code.

    Weights whose elements are all equal are left out.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for twin in twins(graph, [name for name in names if name in graph.initializers]):
        alike[twin.of].append(twin.name)
    return [[first, *others] for first, others in alike.items()]


# -- the modes --------------------------------------------------------------------------------------------------------


def _modes(model: ModelProto) -> Iterator[str]:
    """Yield, for each of `MODES`, the number of its nodes, and how many of them are in training mode."""
    for op_type in MODES:
        nodes = [node for node in with_bodies(model.graph.node) if node.op_type == op_type]
        training = sum(not is_for_inference(node) for node in nodes)
        if nodes:
            yield f"{len(nodes)} of {op_type}, {training} of them in training mode"


# -- what to do -------------------------------------------------------------------------------------------------------


def _proof(origin: Origin, report: Report) -> Iterator[str]:
    """Yield properties of a model that make it hard to check gradients on random data, each with a remedy."""
    integers = [name for name, kind in origin.inputs.items() if kind.startswith(("int", "uint", "bool"))]
    if integers:
        names = ", ".join(integers)
        yield f"{names}: not floats; if random values are invalid, give values with `test_data='FILE.npz'`"
    if len(origin.sizes) > 1:
        yield f"{', '.join(origin.sizes)}: if these sizes depend on each other, fix them with `dims`"
    if any(caution.kind == "random operator" for caution in report.cautions):
        yield "random operators: two runs give different results"


def _varying(origin: Origin) -> str:
    """Return the call of PyTorch's exporter that makes the size of each input's first axis symbolic."""
    axes = {name: {} if kind.endswith("[]") else {0: "batch"} for name, kind in origin.inputs.items()}
    if origin.exporter == OLDER:
        return f"with torch.onnx.export(model, ..., dynamo=False, input_names={list(axes)}, dynamic_axes={axes})"
    return f"with torch.onnx.export(model, ..., dynamic_shapes={list(axes.values())})"


def _advice(origin: Origin, unnamed: list[str], folded: bool, modes: bool) -> Iterator[str]:
    """Yield settings of the exporter that would have given a better model for training."""
    older, newer = origin.exporter == OLDER, origin.exporter == NEWER
    if newer and (folded or unnamed):
        yield (
            "torch.onnx.export(model.train(), ..., optimize=False) keeps normalizations, Dropout and the names of "
            "weights; train normalizations with `mode='train'`"
        )
    elif folded or (older and unnamed):
        yield (
            "torch.onnx.export(model.train(), ..., dynamo=False, training=torch.onnx.TrainingMode.PRESERVE, "
            "do_constant_folding=False) keeps normalizations, Dropout and the names of weights"
        )
    if older:
        yield (
            "torch.onnx.export(model.train(), ..., dynamo=True, optimize=False) keeps these too, and records which "
            "tensors are parameters"
        )
    if not origin.sizes:
        how = _varying(origin) if older or newer else "with symbolic sizes"
        yield f"all sizes are fixed: `onnxgrad train` makes the batch dynamic if it can; better export {how}"
    if any(name.startswith("com.microsoft") for name in origin.operators):
        yield "operators that only onnxruntime has: the model before they were inserted is easier to train"
    if any("QuantizeLinear" in name or name.startswith("QLinear") for name in origin.operators):
        yield "quantized: train the float model, or fine-tune with `quantization='ste'`"
