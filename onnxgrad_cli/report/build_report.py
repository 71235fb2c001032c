"""Make the report of a build from the results of the build."""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.escape import escaped
from onnxgrad_cli.common.flags import as_cli_flags, flag_of
from onnxgrad_cli.common.packages import tool_version
from onnxgrad_cli.cost.training_cost import cost
from onnxgrad_cli.errors import Caution, CheckFailed, OnnxgradError, UnsupportedError
from onnxgrad_cli.files import ModelSource
from onnxgrad_cli.ir.domains import full_name
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.modes import RANDOM, is_random
from onnxgrad_cli.ir.provenance import provenance
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import Role
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.declare import declared
from onnxgrad_cli.options.train import NOT_OF_TRAINING
from onnxgrad_cli.passes.parameters.constants import GENERATED
from onnxgrad_cli.passes.pipeline import SUMMARIES, pipeline_for
from onnxgrad_cli.passes.tensor_roles import roles
from onnxgrad_cli.record import Training, parts
from onnxgrad_cli.report.formatting import several
from onnxgrad_cli.report.model import KINDS, Asked, File, Operator, PassRow, Report, Tuned, Untrained, Value, Weight
from onnxgrad_cli.report.next_steps import next_steps
from onnxgrad_cli.targets.standard import standard_domain
from onnxgrad_cli.verification.verdict import PROVED, Proof


def make_report(
    *,
    built: TrainingModel | None = None,
    error: Exception | None = None,
    proof: Proof | None = None,
    files: Sequence[File] = (),
    command: Sequence[str] | str = "",
    options: Options | None = None,
    model: ModelSource = "",
    sizes: Mapping[str, int] | None = None,
    cautions: Iterable[Caution] = (),
) -> Report:
    """Return the report of a build that succeeded or failed.

    Args:
        built: the training model. After an error, the model as it was when the error occurred, or None.
        error: the error that ended the build, or None.
        proof: the result of `verify`, or None if it did not run.
        files: the files that were read and written.
        command: the command line, as words or as one string.
        options, model: the options and the source of the model; taken from `built` by default.
        sizes: symbol -> size, for the cost; symbols without a size count as 1.
        cautions: more cautions, added to the ones that the passes gave.
    """
    options = options or (built.options if built else Options())
    named = model if isinstance(model, (str, Path)) else ""
    source = str(named or (built and built.graph.path) or "")
    status, verdict = _verdict(built, error, proof)
    report = Report(
        status=status,
        verdict=verdict,
        asked=Asked(
            command=command if isinstance(command, str) else shlex.join(command),
            model=source,
            opset=built.graph.opset() if built else None,
            losses=list(_losses(options, built.training.judged if built else [])),
            optimizer=_optimizer(options),
            options=dict(_changed(options)),
        ),
        **_of_error(error),
        proof=proof,
        files=list(files),
        versions=_versions(),
        **(_built(built, sizes or {}, cautions) if built else {}),
    )
    return dataclasses.replace(report, next=list(next_steps(report, list(_of_training(options)))))


def _built(built: TrainingModel, sizes: Mapping[str, int], more: Iterable[Caution]) -> dict[str, Any]:
    """Return the fields of the report that are computed from the graph, as keyword arguments of `Report`."""
    graph, training = built.graph, built.training
    declared, variants = roles(graph, built.options, training), training.kernel_variants
    sets = {name: data for data, arrays in declared.sets.items() for name in arrays.values()}
    return {
        "weights": _weights(graph, training),
        "adapters": list(training.adapters),
        "not_trained": _untrained(graph, training),
        "inputs": [_value(graph, name, Role(role, sets.get(name, ""))) for name, role in declared.inputs.items()],
        "outputs": [_value(graph, name, role) for name, role in declared.outputs.items()] if training.loss else [],
        "passes": _passes(built),
        "operators": _operators(graph, training),
        "cautions": sorted([*_cautions(graph, training), *more], key=lambda caution: _ORDER[caution.kind]),
        "cost": cost(graph, training, sizes),
        "recomputed": training.recomputed,
        "targeted": training.targeted,
        "tuned": Tuned(len(variants.choices), variants.measured) if variants.requested else None,
    }


# -- the verdict ------------------------------------------------------------------------------------------------


def _verdict(built: TrainingModel | None, error: Exception | None, proof: Proof | None) -> tuple[str, str]:
    """Return the status of a build (see `Report`), and a sentence that describes it."""
    if isinstance(error, UnsupportedError):
        nodes = f": {several(len(error.refusals), 'node')} can't be differentiated" if error.refusals else ""
        return "refused", f"Refused{nodes}. No training model was written."
    if isinstance(error, CheckFailed) or (proof and proof.status == "failed"):
        failed = [step.name for step in proof.steps if step.status == "failed"] if proof else []
        end = "no training model was written." if error else "do not train with this model."
        return "check_failed", f"A check failed ({', '.join(failed) or 'see below'}): {end}"
    if error is not None:
        return "failed", "Failed. No training model was written."
    last = built.records[-1].name if built and built.records else ""
    if built and last and pipeline_for(built.options)[-1].name not in {r.name for r in built.records}:
        return "stopped", f"Stopped after the pass '{last}', as requested. This is not a training model yet."
    if proof and proof.verdict == PROVED:
        return "built", "Built and proved: every check passed."
    return "built", f"Built, not proved: {proof.why if proof else 'no proof was requested'}."


def _of_error(error: Exception | None) -> dict[str, Any]:
    """Return the fields of the report that describe an error, as keyword arguments of `Report`."""
    if error is None:
        return {}
    if not isinstance(error, OnnxgradError):
        return {"error": as_cli_flags(escaped(f"{type(error).__name__}: {error}")), "code": "internal"}
    refusals = error.refusals if isinstance(error, UnsupportedError) else ()
    details = () if refusals else error.details  # the details repeat the refusals
    message = "\n".join(map(escaped, [error.message, *(f"  {detail}" for detail in details)]))
    return {
        "error": as_cli_flags(message),
        "hint": as_cli_flags(error.hint or ""),
        "code": error.code,
        "argument": flag_of(error.argument) if error.argument else "",
        "refusals": [
            dataclasses.replace(each, reason=as_cli_flags(each.reason), hint=as_cli_flags(each.hint))
            for each in refusals
        ],
    }


# -- the request --------------------------------------------------------------------------------------------------


def _losses(options: Options, judged: Sequence[str]) -> Iterator[str]:
    """Yield each loss as a text, with its label input or, if that input doesn't exist yet, the label of the options."""
    for spec, label in zip_longest(options.losses, judged):
        asked = "" if spec.loss and spec.loss.label == "none" else spec.label or options.label
        asked = f"{spec.data}.{asked}" if spec.data and asked else asked
        yield _loss(spec, options, asked if label is None else label)


def _loss(spec: LossSpec, options: Options, label: str) -> str:
    text = spec.name if spec.weight == 1.0 else f"{spec.weight:g} times {spec.name}"
    text = f"{spec.weight:g} (following {spec.schedule}) times {spec.name}" if spec.schedule else text
    output = spec.output or options.output
    text += f" of '{output}'" if output else ""
    text = f"{text} against '{label}'" if label else text
    return f"{text} on the data set '{spec.data}'" if spec.data else text


def _optimizer(options: Options) -> str:
    """Return the optimizer as a text, with its settings and the settings of each parameter group."""
    settings = _words(options.optimizer_options)
    groups = [f"{group.pattern}: {_words(group.options)}" for group in options.group]
    return "; ".join([options.optimizer + f" ({settings})" * bool(settings), *groups])


_SETTINGS = {"loss_options": "loss options", "optimizer_options": "optimizer options"}


def _changed(options: Options) -> Iterator[tuple[str, str]]:
    default = Options()
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != getattr(default, field.name):
            yield _SETTINGS.get(field.name) or declared(Options)[field.name].flags[-1], _words(value)


def _of_training(options: Options) -> Iterator[str]:
    """Yield the command-line arguments with which `onnxgrad train` builds the same training model."""
    default = Options()
    for name, field in declared(Options).items():
        value, flag = getattr(options, name), field.flags[-1]
        if name in NOT_OF_TRAINING or name == "tuned" or value == getattr(default, name):  # tuned is read from a file
            continue
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                owner, colon, setting = key.rpartition(":")
                key = f"{owner}{colon}{setting.replace('_', '-')}" if name in _SETTINGS else key
                yield from (flag, f"{key}{':' if name == 'shapes' else '='}{_typed(each)}")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                yield from (flag, each.typed if isinstance(each, LossSpec) else str(each))


def _typed(value: Any) -> str:
    """Return the value of a setting as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _words(value: Any) -> str:
    if isinstance(value, LossSpec):
        return value.typed
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_words(item)}" for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_words, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# -- the model ----------------------------------------------------------------------------------------------------


@functools.cache
def _dtype(dtype: int) -> str:
    return str(TensorProto.DataType.Name(dtype)).lower() if dtype else "unknown"


def _type(graph: Graph, name: str) -> tuple[str, Shape | None]:
    """Return the element type and the shape of a value."""
    value_type = graph.types.get(name)
    return _dtype(dtype_of(value_type)), shape_of(value_type)


def _weights(graph: Graph, training: Training) -> list[Weight]:
    shapes = {name: tuple(graph.initializers[name].dims) for name in training.trained}
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(counts.values()) or 1
    types = {name: _dtype(graph.initializers[name].data_type) for name in shapes}
    return [
        Weight(name, types[name], shape, counts[name], counts[name] / total, training.gradients.get(name, ""))
        for name, shape in shapes.items()
    ]


def _untrained(graph: Graph, training: Training) -> list[Untrained]:
    found = []
    for name, reason in training.not_trained.items():
        dtype, shape = _type(graph, name)
        count = math.prod(dim for dim in shape or () if isinstance(dim, int))
        heuristic = training.heuristics.get(name, "")
        found.append(Untrained(name, dtype, shape, count, as_cli_flags(reason), heuristic))
    return found


def _value(graph: Graph, name: str, role: Role) -> Value:
    return Value(name, role.role, role.of, *_type(graph, name))


def _passes(built: TrainingModel) -> list[PassRow]:
    return [PassRow(r.name, SUMMARIES[r.name], r.seconds, r.nodes_before, r.nodes_after) for r in built.records]


def _operators(graph: Graph, training: Training) -> list[Operator]:
    """Return a row of the report for each operator. Operators with the most nodes come first."""
    nodes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    kinds = Counter((n.domain, n.op_type, part) for n, part in zip(graph.nodes, parts(graph, training), strict=True))
    for (domain, op_type, part), count in kinds.items():
        nodes[standard_domain(domain), op_type][part] += count
    uses: Counter[str] = Counter()
    sources: dict[str, list[str]] = defaultdict(list)
    for (full, source), count in training.rules.items():
        uses[full] += count
        sources[full].append(source)

    def derivative(domain: str, op_type: str, full: str) -> str:
        if uses[full]:
            return "rule"
        rule = registry.lookup(op_type, domain, graph.opset(domain) or 1)
        return "none" if rule is None else "zero" if rule.is_zero else "not needed"

    rows = []
    for (domain, op_type), where in nodes.items():
        name, full = f"{domain}::{op_type}" if domain else op_type, full_name(op_type, domain)
        counts = where["model"], where["loss"], where["backward"], uses[full]
        own = derivative(domain, op_type, full) if where["model"] + where["loss"] else ""
        rows.append(Operator(name, *counts, sorted(sources[full]), own, where["optimizer"]))
    return sorted(rows, key=lambda row: (-(row.model + row.loss), -row.backward, -row.optimizer, row.op))


# -- cautions -------------------------------------------------------------------------------------------------------

_ORDER = {kind: i for i, kind in enumerate(KINDS)}


def _cautions(graph: Graph, training: Training) -> Iterator[Caution]:
    """Yield the cautions of the passes, and cautions about the finished graph."""
    for caution in dict.fromkeys(training.cautions):
        yield dataclasses.replace(caution, subject=as_cli_flags(caution.subject), text=as_cli_flags(caution.text))
    for op_type, convention in sorted(training.kinks.items()):
        yield Caution("kink", op_type, f"{op_type}: {convention}")
    drawn = Counter(node.op_type for node in graph.nodes if node.op_type in RANDOM and is_random(graph, node))
    for op_type, count in sorted(drawn.items()):
        yield Caution("random operator", op_type, f"{op_type}: {several(count, 'node')}")
    variants = training.kernel_variants
    if variants.requested and not variants.measured:
        text = f"--tuned: none of its {several(len(variants.requested), 'choice')} is for a gradient of this model"
        yield Caution("note", "--tuned", f"{text}; measure this model with `onnxgrad tune`")
    yield from _narrow(graph)


def _narrow(graph: Graph) -> Iterator[Caution]:
    """Yield a caution for each 16-bit float type in the graph."""
    if _NARROW.keys().isdisjoint(map(dtype_of, graph.distinct_types())):
        return
    counts = Counter(dtype_of(graph.types.get(name)) for node in graph.nodes for name in node.output if name)
    for dtype, limits in _NARROW.items():
        if counts[dtype]:
            name = _dtype(dtype)
            yield Caution("low-precision type", name, f"{several(counts[dtype], 'value')} of type {name}: {limits}")


_NARROW = {
    int(TensorProto.FLOAT16): "about 3 digits; gradients below 6e-8 become zero and those above 65,504 become infinite",
    int(TensorProto.BFLOAT16): "2 to 3 digits; sums of many gradients lose small terms",
}


# -- versions -------------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    found = {"onnxgrad": tool_version()}
    for package in ("onnx", "onnxruntime", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "Python": platform.python_version()}


def folded_normalizations(model: ModelProto) -> list[str]:
    """Return a sentence in a list if the exporter folded BatchNormalization into other layers, otherwise an empty list.

    A folded normalization is recognized by its traces. PyTorch's newer exporter lists the names of all running means in
    the metadata, but doesn't store the running mean of a folded normalization. Its older exporter gives the weight of a
    folded convolution a name of its own, such as 'onnx::Conv_12'.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    statistics = sum(name.endswith("running_mean") for name in provenance(model).fixed - stored)
    convolutions = [node for node in model.graph.node if node.op_type in ("Conv", "ConvTranspose")]
    count = statistics or sum(node.input[1].startswith("onnx::") for node in convolutions)
    where = several(count, "convolution" if len(convolutions) >= count else "layer")
    return [f"BatchNormalization was folded into {where}: its parameters can't be trained"] if count else []


def invented_names(weights: Sequence[str]) -> list[str]:
    """Return the weights whose names were made up by the exporter."""
    return [name for name in weights if GENERATED.match(name)]


def export_cautions(folded: Iterable[str], weights: Sequence[str]) -> Iterator[Caution]:
    """Yield cautions about folded normalizations and about weights whose names the exporter made up.

    Args:
        folded: the sentences that `folded_normalizations` returned for the model before the passes.
        weights: the names of the trained weights.
    """
    for text in folded:
        yield Caution("note", "", text)
    if unnamed := invented_names(weights):
        count = f"{len(unnamed):,} of {several(len(weights), 'weight')}"
        text = f"the exporter invented the names of {count}, such as '{unnamed[0]}'"
        yield Caution("note", unnamed[0], as_cli_flags(f"{text}, so `train` can't select them by layer"))
