"""What a model file is, what was done to read it, what would be trained of it, and how to export a better one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from onnx import ModelProto

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.visible import decoded
from onnxgrad_cli.common.wording import in_flags
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, own_model
from onnxgrad_cli.ir.domains import full_name, is_standard, plain_domain
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import is_for_inference
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.provenance import provenance
from onnxgrad_cli.ir.types import UNNAMED, in_words
from onnxgrad_cli.jobs.build import inspected
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.constants import GENERATED
from onnxgrad_cli.passes.parameters.tie import twins
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from onnxgrad_cli.report import Report
from onnxgrad_cli.report.diagnosis import Diagnosis, Group, Origin
from onnxgrad_cli.report.words import several

MODES = ("BatchNormalization", "Dropout")
"""Operators that do another thing in training."""


@judged
def doctor(model: ModelSource, options: Options | None = None, *, command: str = "", tell: Tell = silent) -> Diagnosis:
    """Say what a model file is and how well it can be trained, and write nothing.

    Args:
        model: the model; '-' is stdin.
        options: what would be built.
        command: the command line.
        tell: takes what is narrated.

    Raises:
        OnnxgradError: the file holds no model.
    """
    proto, path = own_model(model)
    origin, modes, folded = _origin(proto), list(_modes(proto)), _folded(proto)
    built = TrainingModel(Graph(proto, path), options or Options())
    report = inspected(built, command=command, model=model, tell=tell, told=OnnxgradError)
    trained = [weight.name for weight in report.weights]
    unnamed = [name for name in trained if GENERATED.match(name)]
    return Diagnosis(
        status=report.status,
        verdict=report.verdict,
        origin=origin,
        repaired=list(_repaired(origin, built, report)),
        trained=trained,
        trained_numbers=sum(weight.count for weight in report.weights),
        not_trained=list(_groups(report)),
        warnings=[in_flags(caution.text) for caution in report.cautions if caution.kind == UNTRAINED],
        doubts=[
            in_flags(c.text) for c in report.cautions if c.kind == "note" and c.subject in built.graph.initializers
        ],
        unnamed=unnamed,
        equal=_equal(built.graph, trained),
        normalization=[*modes, *folded],
        refusals=report.refusals,
        error="" if report.refusals else report.error,
        hint="" if report.refusals else report.hint,
        proof=[in_flags(text) for text in _proof(origin, report)],
        advice=[in_flags(text) for text in _advice(origin, unnamed, bool(folded), bool(modes))],
    )


# -- the file ---------------------------------------------------------------------------------------------------------


def _origin(model: ModelProto) -> Origin:
    graph = model.graph
    fed = [value for value in graph.input if value.name not in {t.name for t in graph.initializer}]
    sizes = {dim.dim_param: None for value in fed for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    return Origin(
        exporter=_exporter(model),
        producer=f"{decoded(model.producer_name)} {decoded(model.producer_version)}".strip() or "unnamed",
        ir_version=model.ir_version,
        domains={plain_domain(entry.domain): entry.version for entry in model.opset_import},
        operators=dict(Counter(_name(node) for node in with_bodies(graph.node)).most_common()),
        functions=[full_name(function.name, function.domain) for function in model.functions],
        inputs={value.name: in_words(value.type) for value in fed},
        outputs={value.name: in_words(value.type) for value in graph.output},
        sizes=[size for size in sizes if not UNNAMED.fullmatch(size)],
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
"""What a file calls its producer -> in words."""


def _exporter(model: ModelProto) -> str:
    said = provenance(model)
    if said.by_pytorch:
        return NEWER if said.learned or said.fixed else OLDER
    name = decoded(model.producer_name)
    return PROGRAMS.get(name, name or "an unnamed program")


def _repaired(origin: Origin, built: TrainingModel, report: Report) -> Iterator[str]:
    """What was read otherwise than it is written."""
    if origin.functions:
        yield f"{several(len(origin.functions), 'function')} of the model's own: written out in nodes"
    left = {_name(node) for node in built.graph.nodes}
    for name, count in origin.operators.items():
        if "::" in name and name not in left and name not in origin.functions:
            yield f"{name}, {several(count, 'node')}: written in standard operators"
    for caution in report.cautions:
        if caution.kind == "opset change" or (
            caution.kind == "note" and caution.subject not in built.graph.initializers
        ):
            yield in_flags(caution.text)


# -- the weights ------------------------------------------------------------------------------------------------------


def _groups(report: Report) -> Iterator[Group]:
    """What is not trained, by reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for tensor in report.not_trained:
        reasons[tensor.reason].append(tensor.name)
        counts[tensor.reason] += tensor.count
    yield from (Group(reason, names, counts[reason]) for reason, names in reasons.items())


def _equal(graph: Graph, names: list[str]) -> list[list[str]]:
    """The weights of equal values, transposed perhaps, but for those that have one value throughout, as new ones."""
    alike: dict[str, list[str]] = defaultdict(list)
    for twin in twins(graph, [name for name in names if name in graph.initializers]):
        alike[twin.of].append(twin.name)
    return [[first, *others] for first, others in alike.items()]


# -- the modes --------------------------------------------------------------------------------------------------------


def _modes(model: ModelProto) -> Iterator[str]:
    """How many nodes there are that do another thing in training, and as what they stand there."""
    for op_type in MODES:
        nodes = [node for node in with_bodies(model.graph.node) if node.op_type == op_type]
        training = sum(not is_for_inference(node) for node in nodes)
        if nodes:
            yield f"{len(nodes)} of {op_type}, {training} of them in training mode"


def _folded(model: ModelProto) -> list[str]:
    """Signs that normalizations went into the convolutions or matrices before them when the model was exported.

    The newer exporter lists the running mean of each normalization, but stores none of a folded one.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    statistics = sum(name.endswith("running_mean") for name in provenance(model).fixed - stored)
    made_up = sum(
        node.op_type in ("Conv", "ConvTranspose") and node.input[1].startswith("onnx::") for node in model.graph.node
    )
    count = statistics or made_up
    convolutions = sum(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)
    where = several(count, "convolution" if convolutions >= count else "layer")
    return [f"BatchNormalization was folded into {where}: it can't be trained any more"] if count else []


# -- what to do -------------------------------------------------------------------------------------------------------


def _proof(origin: Origin, report: Report) -> Iterator[str]:
    """What makes a proof on random data hard, and what would help."""
    if report.error:
        yield "first, what stands in the way must be differentiable"
    integers = [name for name, kind in origin.inputs.items() if kind.startswith(("int", "uint", "bool"))]
    if integers:
        yield f"{', '.join(integers)}: not floats; where not any value will do, give some with `test_data='FILE.npz'`"
    if len(origin.sizes) > 1:
        yield f"{', '.join(origin.sizes)}: where these sizes depend on each other, fix them with `dims`"
    if any(caution.kind == "random operator" for caution in report.cautions):
        yield "random operators: two runs differ"


def _varying(origin: Origin) -> str:
    """The call of PyTorch's exporter that lets the first axis of each input vary."""
    axes = {name: {} if kind.endswith("[]") else {0: "batch"} for name, kind in origin.inputs.items()}
    if origin.exporter == OLDER:
        return f"with torch.onnx.export(model, ..., dynamo=False, input_names={list(axes)}, dynamic_axes={axes})"
    return f"with torch.onnx.export(model, ..., dynamic_shapes={list(axes.values())})"


def _advice(origin: Origin, unnamed: list[str], folded: bool, modes: bool) -> Iterator[str]:
    """Settings of the exporter that would have served better."""
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
            "torch.onnx.export(model.train(), ..., dynamo=True, optimize=False) keeps these too, and writes down which "
            "tensors are parameters"
        )
    if not origin.sizes:
        how = _varying(origin) if older or newer else "with symbolic sizes"
        yield f"no size may vary: `train` frees the batch where it can; {how} that is not needed"
    if any(name.startswith("com.microsoft") for name in origin.operators):
        yield "operators of onnxruntime's own: the model as it was before they were put in is simpler to train"
    if any("QuantizeLinear" in name or name.startswith("QLinear") for name in origin.operators):
        yield "quantized: train the float model, or fine-tune with `quantization='ste'`"
