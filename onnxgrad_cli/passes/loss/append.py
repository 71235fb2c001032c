"""Append the loss: label inputs declared, each loss written on its output, reduced, weighted and summed.

The result is one scalar called `loss`. It is computed in float32 where the output is narrower.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import TensorProto, TypeProto

from onnxgrad_cli import losses
from onnxgrad_cli.common.settings import unknown_setting
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import reduced
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Caution, OnnxgradError, UsageError, suggest
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import dtype_of, in_words, is_float, shape_of, tensor_type
from onnxgrad_cli.losses.classes import causal_lm
from onnxgrad_cli.losses.spec import LossSpec, settings_of
from onnxgrad_cli.losses.values import weighted_mean
from onnxgrad_cli.options import AppendOptions, LossOptions
from onnxgrad_cli.passes.loss.chunks import write_chunks
from onnxgrad_cli.passes.loss.file import LossFile
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import LossRecord

LABEL = LossOptions.label
"""What a label is called where nothing else is asked for."""

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _run(graph: Graph, options: AppendOptions, training: LossRecord) -> bool:
    """Append every loss and penalty, and the sum of them, called `loss`."""
    op = Op(graph)
    op.role, op.training = "loss", training
    _refuse_unknown_options(options, training)
    if (options.loss_chunks or 1) > 1 and not any(spec.name == "causal-lm" for spec in options.losses):
        raise UsageError("`loss_chunks` goes with the loss causal-lm alone", "leave it out")
    terms, options = [], _with_free_label(graph, options, training)
    for spec, name in zip(options.losses, training.predictions, strict=True):
        op.scope = f"loss/{Path(spec.name).stem}"
        term = _term(op, options, training, spec, op.val(name))
        training.terms.append(term.name)
        terms.append(term if spec.weight == 1.0 else term * spec.weight)
    for kind, factor in (("ReduceL1", options.l1), ("ReduceSumSquare", options.l2)):
        op.scope = f"loss/{kind}"
        if factor:
            penalties = [penalty(op, kind, op.val(name)) * factor for name in training.trained]
            training.penalties += [each.name for each in penalties]
            terms += penalties
    op.scope = "loss"
    widest = max((term.dtype for term in terms), key=(TensorProto.FLOAT, TensorProto.DOUBLE).index)
    total = op.cast(terms[0], widest) if len(terms) == 1 else op.Sum(*(op.cast(term, widest) for term in terms))
    training.loss = _named(op, total, "loss")
    training.terms = [training.loss if name == total.name else name for name in training.terms]
    graph.nodes.extend(op.nodes)
    fed_first(graph)
    return True


def _with_free_label(graph: Graph, options: AppendOptions, training: LossRecord) -> AppendOptions:
    """The options with another name for the label where the default one is taken, as by scikit-learn's own output."""
    asked = [spec for spec in options.losses if not spec.label and _takes_label(spec)]
    if options.label != LABEL or not asked or not graph.taken(LABEL):
        return options
    name = next(name for i in itertools.count(1) if not graph.taken(name := f"{LABEL}_{i}"))
    text = f"the model has a '{LABEL}' of its own: the label input is called '{name}'"
    training.cautions.append(Caution("note", name, text))
    return replace(options, label=name)


def _takes_label(spec: LossSpec) -> bool:
    return spec.loss is None or spec.loss.label != "none"


def _refuse_unknown_options(options: LossOptions, training: LossRecord) -> None:
    owners: dict[str, list[LossSpec]] = {"": list(options.losses)}
    for spec, prediction in zip(options.losses, training.predictions, strict=True):
        for owner in {spec.output or prediction, prediction, spec.label or options.label}:
            owners.setdefault(owner, []).append(spec)
    for text in options.loss_options:
        owner, _, name = text.rpartition(":")
        if owner not in owners:
            hint = suggest(owner, [owner for owner in owners if owner], "outputs and labels")
            raise UsageError(f"`loss_options`: no loss has an output or a label '{owner}'", hint)
        known = [option.name for spec in owners[owner] if spec.loss for option in spec.loss.options]
        if name not in known:
            names = ", ".join(spec.name for spec in owners[owner])
            raise unknown_setting(names, name, known)


def _term(op: Op, options: AppendOptions, training: LossRecord, spec: LossSpec, prediction: Val) -> Val:
    """One loss on one output, reduced to a scalar; its label becomes an input of the model."""
    loss = LossFile(spec.name, op.graph, options.infer_by_run) if spec.loss is None else spec.loss
    given = settings_of(options.loss_options, spec.output, prediction.name, spec.label or options.label)
    label_type = loss.label_type(prediction, given)
    label = None if label_type is None else _label(op, training, spec.label or options.label, label_type)
    training.judged.append("" if label is None else label.name)
    if isinstance(loss, LossFile):
        training.scalars.add(len(training.judged) - 1)
        if options.sample_weight:
            raise UsageError(
                f"`sample_weight` does not go with '{spec.name}'", "a loss from a file gives one number for the batch"
            )
        return _wide(op, loss(op, prediction, label))
    _caution(op, given, training, loss, prediction)
    parts = None
    if label is not None and loss.function is causal_lm:
        parts = _by_chunks(op, options, given, training, prediction, label)
        _note_chunks(options, training, prediction.name)
    if parts is not None:
        total, divisor = parts
        if options.reduction == "sum":
            return total
        training.divisors[len(training.judged) - 1] = divisor.name
        return weighted_mean(op, total, divisor)
    values = [_wide(op, prediction)] if label is None else [_wide(op, prediction), _wide(op, label)]
    found, weights = _called(op, spec, loss, values, loss.settings(given))
    if found.known_shape is not None and all(size == 1 for size in found.known_shape):
        training.scalars.add(len(training.judged) - 1)
    if options.sample_weight:
        found = found * _sample_weight(op, training, options.sample_weight, loss, prediction, found)
    if options.reduction == "sum":
        return reduced(op, "ReduceSum", found)
    if weights is None:
        return reduced(op, "ReduceMean", found)
    divisor = reduced(op, "ReduceSum", weights)
    training.divisors[len(training.judged) - 1] = divisor.name
    return weighted_mean(op, reduced(op, "ReduceSum", found), divisor)


def _by_chunks(
    op: Op, options: AppendOptions, given: Mapping[str, object], training: LossRecord, prediction: Val, label: Val
) -> tuple[Val, Val] | None:
    """The sum of causal-lm's losses and its divisor, by chunks of tokens; None where they are computed as one.

    What is kept or described as a whole can't be taken apart.
    """
    whole = options.keep_outputs or options.as_gradient_op or options.training_info or options.yield_ == "keep"
    if whole or options.sample_weight:
        return None
    ignored = losses.LOSSES.lookup("causal-lm").ignored(given)
    assert ignored is not None
    return write_chunks(op, training, prediction, label, ignored, options.loss_chunks)


def _note_chunks(options: AppendOptions, training: LossRecord, output: str) -> None:
    """Say that a loss is computed by chunks, or that it is not though that was asked for."""
    if training.chunks is not None:
        text = f"the loss is computed by {len(training.chunks.values)} chunks of tokens; '{output}' is never whole"
        training.cautions.append(Caution("note", output, text))
    elif (options.loss_chunks or 1) > 1:
        text = (
            f"`loss_chunks={options.loss_chunks}`: the loss stays whole, for outputs are kept, samples have weights, a "
            f"whole matrix of the head is trained, or '{output}' is not made token by token of narrower values"
        )
        training.cautions.append(Caution("note", output, text))


def _called(
    op: Op, spec: LossSpec, loss: losses.Loss, values: Sequence[Val], settings: Mapping[str, Any]
) -> tuple[Val, Val | None]:
    """The losses that a function gives, and their weights; what goes wrong in a user's own is told as its fault."""
    try:
        result = loss.function(op, *values, **settings)
    except OnnxgradError:
        raise
    except Exception as error:
        if spec.function is None:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"`losses`: the function '{loss.name}' fails: {reason}", "correct it") from error
    parts = result if isinstance(result, tuple) else (result, None)
    if len(parts) != 2 or not isinstance(parts[0], Val) or not isinstance(parts[1], (Val, type(None))):
        raise UsageError(
            f"`losses`: the function '{loss.name}' gives {type(result).__name__}, no value of the graph",
            "return the losses, written with op; or a tuple of the losses and their weights",
        )
    if not is_float(parts[0].type):
        raise UsageError(f"`losses`: the function '{loss.name}' gives {in_words(parts[0].type)}", "give floats")
    return parts[0], parts[1]


def _wide(op: Op, x: Val) -> Val:
    return op.cast(x, TensorProto.FLOAT) if x.dtype in NARROW else x


def _label(op: Op, training: LossRecord, name: str, label_type: TypeProto) -> Val:
    graph = op.graph
    if name in training.labels:
        old = graph.types[name]
        if (dtype_of(old), shape_of(old)) != (dtype_of(label_type), shape_of(label_type)):
            raise UsageError(
                f"two losses want a label '{name}' of different types: {in_words(old)} and {in_words(label_type)}",
                "name each label: `losses=NAME:OUTPUT:LABEL`",
            )
        return op.val(name)
    _refuse_taken(graph, name, "`label`")
    graph.add_input(name, label_type)
    training.labels.append(name)
    return op.val(name)


def _refuse_taken(graph: Graph, name: str, option: str) -> None:
    if not name or graph.taken(name):
        reason = f"the model already has a value or a node called '{name}'" if name else "a name is missing"
        raise UsageError(f"{option}: {reason}", f"choose another name with {option}")


def _caution(op: Op, given: Mapping[str, object], training: LossRecord, loss: losses.Loss, prediction: Val) -> None:
    producer = next((node for node in op.graph.nodes if prediction.name in node.output), None)
    if producer is not None and producer.op_type in loss.rather:
        text = (
            f"output '{prediction.name}' comes from a {producer.op_type}, which {loss.name} does not expect: "
            f"{loss.rather[producer.op_type]} does"
        )
        training.cautions.append(Caution("note", prediction.name, text))
    axis = loss.class_axis(given)
    if axis is not None and isinstance(prediction.shape[axis], str) and isinstance(prediction.shape[-1], int):
        text = (
            f"{loss.name} takes axis {axis} for the classes, whose number is not fixed; class-axis=-1 is the last axis"
        )
        training.cautions.append(Caution("note", prediction.name, text))


def _sample_weight(op: Op, training: LossRecord, name: str, loss: losses.Loss, prediction: Val, found: Val) -> Val:
    """One weight per sample, in a shape that broadcasts to the losses. The mean still divides by what it did."""
    if not found.known_shape or not prediction.known_shape:
        raise UsageError(
            f"`sample_weight` does not go with {loss.name} of '{prediction.name}', which is one number for the batch",
            "leave it out, or choose an output with a batch axis",
        )
    if training.sample_weight is None:
        _refuse_taken(op.graph, name, "`sample_weight`")
        op.graph.add_input(name, tensor_type(found.dtype, [prediction.shape[0]]))
        training.sample_weight = name
    return op.unsqueeze(op.cast(op.val(name), found), range(1, found.rank))


def penalty(op: Op, kind: str, weight: Val) -> Val:
    """The sum of a weight's magnitudes ('ReduceL1') or squares ('ReduceSumSquare'), a scalar."""
    return reduced(op, kind, _wide(op, weight))


def _named(op: Op, total: Val, stem: str) -> str:
    """Give the total its name: the node that makes it writes that, or else a node of its own does."""
    name = op.graph.fresh(stem)
    if not any(total.name in node.output for node in op.nodes):
        total = op.Identity(total)
    for node in op.nodes:
        for field in (node.input, node.output):
            field[:] = [name if old == total.name else old for old in field]
    assert total.type is not None
    op.graph.types[name] = total.type
    return name


def fed_first(graph: Graph) -> None:
    """Order the inputs: what must be fed, then what has a value (models of old declare their weights as inputs)."""
    inputs = list(graph.proto.graph.input)
    ordered = sorted(inputs, key=lambda value: value.name in graph.initializers)
    if [v.name for v in ordered] != [v.name for v in inputs]:
        del graph.proto.graph.input[:]
        graph.proto.graph.input.extend(ordered)


LOSS = Pass("loss", "the loss appended to the model", _run, ("prepare",))
