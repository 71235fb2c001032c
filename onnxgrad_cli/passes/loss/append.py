"""Append the loss: add label inputs, write each loss on its output, reduce, weight and sum them.

The result is one scalar called `loss`. It is computed in float32 if the output has a narrower type.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import TensorProto, TypeProto

from onnxgrad_cli import losses
from onnxgrad_cli.common.checks import conflicts
from onnxgrad_cli.common.settings import unknown_setting
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import reduced
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import (
    Caution,
    InternalError,
    OnnxgradError,
    UsageError,
    conflict,
    suggest,
    unknown_name,
    wrong_shape,
    wrong_type,
    wrong_value,
)
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.node_values import attributes_of, reads, source_of
from onnxgrad_cli.ir.sample_places import SampleAxis, Tracker
from onnxgrad_cli.ir.types import dtype_of, in_words, is_float, shape_of, tensor_type
from onnxgrad_cli.losses.classification import causal_lm, soft_cross_entropy
from onnxgrad_cli.losses.registry import FOR_OUTPUTS, written_function
from onnxgrad_cli.losses.same_shape import checked_axis, weighted_mean
from onnxgrad_cli.losses.spec import LossSpec, default_loss, settings_of
from onnxgrad_cli.options import AppendOptions, LossOptions
from onnxgrad_cli.passes.loss.chunks import write_chunks
from onnxgrad_cli.passes.loss.data_sets import evaluations, mask_of
from onnxgrad_cli.passes.loss.function import LossOp
from onnxgrad_cli.passes.loss.model_file import LossFile
from onnxgrad_cli.passes.parameters.select import drop_untied, refuse_constant_loss
from onnxgrad_cli.passes.proof_part import keep_for_proof
from onnxgrad_cli.record import LossRecord, StepRecord

LABEL = LossOptions.label
"""The default name of the label input."""


def append_losses(graph: Graph, options: AppendOptions, training: StepRecord) -> None:
    """Append every loss and penalty, and their sum, which is called 'loss'."""
    op = LossOp(graph, training)
    _refuse_unknown_options(options, training)
    if options.training_info:
        scheduled = any(spec.schedule for spec in options.losses)
        conflicts("`training_info`", {"a loss whose weight follows a schedule": scheduled}, "leave out the schedule")
    if (options.loss_chunks or 1) > 1 and not any(spec.name == "causal-lm" for spec in options.losses):
        raise conflict("`loss_chunks` requires the loss causal-lm", "leave out the option, or use that loss")
    terms, options = [], _with_free_label(graph, options, training)
    asked = list(training.predictions)
    evaluated = evaluations(op, options, training)
    options = options if len(evaluated) == 1 else replace(options, loss_chunks=1)
    for spec, output, name in zip(options.losses, asked, training.predictions, strict=True):
        op.scope, op.evaluation = f"loss/{Path(spec.name).stem}", evaluated[spec.data]
        owners = (spec.data or None, spec.output, output, spec.label or options.label)
        training.settings.append(settings_of(options.loss_options, *owners))
        term = _term(op, options, training, spec, op.val(name), training.settings[-1])
        training.terms.append(term.name)
        terms.append(term if spec.weight == 1.0 and not spec.schedule else term * _factor(op, training, spec, term))
    if any(spec.function for spec in options.losses):
        op.flush()
        drop_untied(graph, training, training.terms)
        if not options.l1 and not options.l2:
            refuse_constant_loss(graph, training, training.terms)
    for kind, factor in (("ReduceL1", options.l1), ("ReduceSumSquare", options.l2)):
        op.scope = f"loss/{kind}"
        if factor:
            penalties = [penalty(op, kind, op.val(name)) * factor for name in training.trained]
            training.penalties += [each.name for each in penalties]
            terms += penalties
    op.scope = "loss"
    widest = max((term.dtype for term in terms), key=(TensorProto.FLOAT, TensorProto.DOUBLE).index)
    total = op.cast(terms[0], widest) if len(terms) == 1 else op.Sum(*(op.cast(term, widest) for term in terms))
    training.loss = op.rename(total, graph.fresh("loss")).name
    training.terms = [training.loss if name == total.name else name for name in training.terms]
    graph.nodes.extend(op.nodes)
    keep_for_proof(graph, training)
    if any(spec.function for spec in options.losses):
        _drop_unread_labels(graph, training)
    fed_first(graph)


def _drop_unread_labels(graph: Graph, training: LossRecord) -> None:
    """Remove the labels that no loss reads from the model, with a note for each. Masks stay; data may lack them."""
    needed = graph.ancestors([training.loss]).union(training.masks.values())
    for name in [label for label in training.labels if label not in needed]:
        refill(graph.proto.graph.input, [value for value in graph.proto.graph.input if value.name != name])
        training.labels.remove(name)
        training.judged = ["" if label == name else label for label in training.judged]
        training.more = {at: [label for label in labels if label != name] for at, labels in training.more.items()}
        for arrays in training.sets.values():
            for array in [array for array, own in arrays.items() if own == name]:
                del arrays[array]
        text = f"no loss reads the label '{name}', so the training model has no such input"
        training.cautions.append(Caution("note", name, text))


def _factor(op: LossOp, training: LossRecord, spec: LossSpec, term: Val) -> Val | float:
    """Return the weight of a loss: a number, or a new input if the weight follows a schedule."""
    if not spec.schedule:
        return spec.weight
    name = op.graph.fresh(".".join(filter(None, (spec.data, Path(spec.name).stem, "weight"))))
    op.graph.add_input(name, tensor_type(term.dtype, []))
    training.factors[len(training.terms) - 1] = name
    return op.val(name)


def _with_free_label(graph: Graph, options: AppendOptions, training: LossRecord) -> AppendOptions:
    """Return the options. If the model already uses the default label name, replace it by a new one in the options."""
    takers = [spec for spec in options.losses if spec.loss is None or spec.loss.label != "none"]
    asked = [spec for spec in takers if not spec.label]
    if options.label != LABEL or not asked or not graph.taken(LABEL) or options.losses[0].data:
        return options
    name = next(name for i in itertools.count(1) if not graph.taken(name := f"{LABEL}_{i}"))
    text = f"the model already has a value '{LABEL}', so the label input is called '{name}'"
    training.cautions.append(Caution("note", name, text))
    return replace(options, label=name)


def _refuse_unknown_options(options: LossOptions, training: LossRecord) -> None:
    owners: dict[str, list[LossSpec]] = {"": list(options.losses)}
    for spec, prediction in zip(options.losses, training.predictions, strict=True):
        for owner in {spec.output or prediction, prediction, spec.label or options.label, spec.data} - {""}:
            owners.setdefault(owner, []).append(spec)
    for text in options.loss_options:
        owner, _, name = text.rpartition(":")
        if owner not in owners:
            hint = suggest(owner, [owner for owner in owners if owner], "outputs, labels and sets")
            raise unknown_name(f"`loss_options`: no loss uses an output, a label or a data set '{owner}'", hint)
        known = [option.name for spec in owners[owner] if spec.loss for option in spec.loss.options]
        if name not in known:
            names = ", ".join(spec.name for spec in owners[owner])
            raise unknown_setting(names, name, known)


def _term(
    op: LossOp, options: AppendOptions, training: LossRecord, spec: LossSpec, prediction: Val,
    given: Mapping[str, object],
) -> Val:  # fmt: skip
    """Return one loss on one output, reduced to a scalar. Its label becomes an input of the model.

    Args:
        op: the emitter.
        options: the options of the build.
        training: the record of the loss.
        spec: the loss.
        prediction: the output.
        given: the settings of this loss.
    """
    loss = LossFile(spec.name, op.graph, options.infer_by_run) if spec.loss is None else spec.loss
    label_type = loss.label_type(prediction, given)
    if isinstance(loss, losses.Loss):
        _refuse_one_class(op, given, loss, prediction)
    label = None if label_type is None else _label(op, training, spec.data, spec.label or options.label, label_type)
    training.judged.append("" if label is None else label.name)
    if isinstance(loss, LossFile):
        training.scalars.add(len(training.judged) - 1)
        if options.sample_weight:
            raise conflict(
                f"`sample_weight` can't be combined with '{spec.name}', because a loss from a file returns one "
                "number for the batch",
                "leave out the option, or weight the samples inside the file",
            )
        return op.wide(loss(op, prediction, label))
    doubts = _doubts(op, given, loss, prediction, is_default=spec is default_loss())
    training.cautions.extend(Caution("note", prediction.name, text) for text in doubts)
    parts = None
    if label is not None and loss.function is causal_lm:
        parts = _by_chunks(op, options, given, training, prediction, label)
    if parts is not None:
        total, divisor = parts
        if options.reduction == "sum":
            return total
        training.divisors[len(training.judged) - 1] = divisor.name
        return weighted_mean(op, total, divisor)
    values = [op.wide(prediction)]
    if loss.operands is None:
        values += [] if label is None else [op.wide(label)]
    else:
        values += _operands(op, training, spec.data, loss.operands, label)
    found, weights = _called(op, spec, loss, values, loss.settings(given))
    found, weights = op.wide(found), None if weights is None else op.wide(weights)
    if len(training.judged) - 1 in training.masks:
        _refuse_padded_mean(spec, loss, found)
    if found.known_shape is not None and all(size == 1 for size in found.known_shape):
        training.scalars.add(len(training.judged) - 1)
    _caution_pairs(training, prediction, found)
    if spec.function is not None:
        _note_mixing(op, training, spec, values, found)
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
    """Write causal-lm in chunks of tokens, with a note for the user.

    Return the sum of the losses and its divisor, or None if the loss is not computed in chunks.

    Chunks are not possible if the model keeps its outputs or the YieldOp, if a Gradient node or training information
    describes the loss, or if there are sample weights.
    """
    whole = options.keep_outputs or options.as_gradient_op or options.training_info or options.yield_ == "keep"
    ignored, output, parts = losses.LOSSES.lookup("causal-lm").ignored(given), prediction.name, None
    assert ignored is not None
    if not whole and not options.sample_weight:
        parts = write_chunks(op, training, prediction, label, ignored, options.loss_chunks)
    if training.chunks is not None:
        count = len(training.chunks.values)
        text = f"the loss is computed in {count} chunks of tokens; '{output}' is never computed as a whole"
        training.cautions.append(Caution("note", output, text))
    elif (options.loss_chunks or 1) > 1:
        text = (
            f"`loss_chunks={options.loss_chunks}` has no effect: outputs are kept, samples have weights, the "
            f"full matrix of the head is trained, or '{output}' is not computed from narrower values for each "
            "token separately"
        )
        training.cautions.append(Caution("note", output, text))
    return parts


def _operands(
    op: LossOp, training: LossRecord, data: str, operands: Mapping[str, tuple[str, str]], label: Val | None
) -> Iterator[Val]:
    """Yield a value for each parameter after the prediction of a loss function; see `losses.registry.of_function`.

    Raises:
        UsageError: the model has no such input or output.
    """
    known = {"input": training.inputs, "output": op.graph.output_names}
    known["label"] = known["mask"] = [*known["input"], *known["output"]]
    position = len(training.judged) - 1
    for parameter, (kind, name) in operands.items():
        if kind == "label" and not name:
            assert label is not None
            yield op.wide(label)
        elif name not in known[kind]:
            kinds = f"{kind}s" if kind in ("input", "output") else "inputs and outputs"
            message = f"`losses`: the parameter '{parameter}' names '{name}', which is not one of the model's {kinds}"
            raise unknown_name(message, suggest(name, known[kind], kinds))
        elif kind == "label":
            more = _label(op, training, data, parameter, op.graph.types[op.evaluation.own(name)])
            training.more.setdefault(position, []).append(more.name)
            yield op.wide(more)
        elif kind == "mask":
            mask = _label(op, training, data, parameter, _mask_type(op.val(name), parameter))
            training.masks[position] = mask.name
            yield op.wide(mask)
        else:
            yield op.wide(op.val(op.evaluation.own(name)))


def _mask_type(value: Val, parameter: str) -> TypeProto:
    """Return the type of a mask of the second axis of a value.

    Raises:
        UsageError: the value has no second axis, or its rank is unknown.
    """
    shape = value.known_shape or ()
    if len(shape) < 2:
        message = f"`losses`: the mask '{parameter}' needs a value with two axes or more, but '{value.name}' is"
        raise wrong_shape(f"{message} {in_words(value.type) or 'of unknown type'}", "name another input or output")
    return tensor_type(value.dtype if is_float(value.type) else TensorProto.FLOAT, shape[:2])


def _refuse_padded_mean(spec: LossSpec, loss: losses.Loss, found: Val) -> None:
    """Refuse a loss with a mask that has several elements per sample: their mean would also count the padding."""
    shape = found.known_shape or ()
    if any(size != 1 for size in shape[1:]):
        mask = mask_of(loss)
        text = f"`losses`: {spec.name} takes the mask '{mask}', but returns several losses per sample, {list(shape)}"
        raise wrong_shape(text, f"return one per sample, such as op.sum(losses * {mask}, [1]) / op.sum({mask}, [1])")


def _called(
    op: LossOp, spec: LossSpec, loss: losses.Loss, values: Sequence[Val], settings: Mapping[str, Any]
) -> tuple[Val, Val | None]:
    """Call a loss function, and return losses and weights. Errors of a user's function become UsageErrors."""
    op.in_function = spec.function is not None
    code = getattr(written_function(loss.function), "__code__", None)
    file = code.co_filename if code is not None else ""
    op.folder = Path(file).parent
    try:
        result = loss.function(op, *values, **settings)
    except Exception as error:
        if spec.function is None:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f"in line {lines[-1]} of '{file}'" if lines else ""
        if isinstance(error, OnnxgradError) and not isinstance(error, InternalError):
            if place:
                error.put_place(place)
            raise
        reason = f"{type(error).__name__}{place and f' {place}'}: {str(error).removeprefix('internal: ')}"
        raise UsageError(
            f"`losses`: the function '{loss.name}' raised an error: {reason}", "correct the function"
        ) from error
    finally:
        op.in_function = False
    parts = result if isinstance(result, tuple) else (result, None)
    if len(parts) != 2 or not isinstance(parts[0], Val) or not isinstance(parts[1], (Val, type(None))):
        raise wrong_type(
            f"`losses`: the function '{loss.name}' must return a value of the graph, but returns "
            f"{type(result).__name__}",
            "compute the losses with op and return them, or return a tuple of the losses and their weights",
        )
    for part in filter(None, parts):
        if not is_float(part.type):
            raise wrong_type(
                f"`losses`: the function '{loss.name}' must return floats, but returns {in_words(part.type)}",
                "compute the losses from floats",
            )
    return parts[0], parts[1]


def _label(op: LossOp, training: LossRecord, data: str, name: str, label_type: TypeProto) -> Val:
    """Return a label. In a named data set, the input is called SET.label."""
    graph = op.graph
    if data and name and name not in training.inputs:  # an array can't be an input and a label: refused below
        own = f"{data}.{name}"
        training.sets[data][name] = op.evaluation.labels[name] = own
        name = own
    if name in training.labels:
        old = graph.types[name]
        if (dtype_of(old), shape_of(old)) != (dtype_of(label_type), shape_of(label_type)):
            raise conflict(
                f"two losses need a label '{name}' of different types: {in_words(old)} and {in_words(label_type)}",
                "give each label its own name: `losses=NAME:OUTPUT:LABEL`",
            )
        return op.val(name)
    _refuse_taken(graph, name, "`label`")
    graph.add_input(name, label_type)
    training.labels.append(name)
    return op.val(name)


def _refuse_taken(graph: Graph, name: str, option: str) -> None:
    if not name or graph.taken(name):
        reason = f"the model already has a value or a node called '{name}'" if name else "the name is empty"
        raise wrong_value(f"{option}: {reason}", f"choose another name with {option}")


def _head(op: Op, prediction: Val) -> str:
    """Return the operator that computes an output; "" if the output is an input of the model."""
    producer = source_of(prediction.name, op.graph.producers())
    return "" if producer is None else producer.op_type


def _refuse_one_class(op: Op, given: Mapping[str, object], loss: losses.Loss, prediction: Val) -> None:
    """Refuse an output with a single class, as a softmax over it is 1 whatever the weights are."""
    axis = loss.class_axis(given)
    if loss.function is soft_cross_entropy:
        axis = checked_axis(prediction, loss.settings(given).get("axis", 1))
    if axis is None or prediction.shape[axis] != 1:
        return
    head = _head(op, prediction)
    if head in ("Softmax", "LogSoftmax"):
        hint = f"export the model with a Sigmoid instead of the {head}"
    elif prediction.rank > 2 and prediction.shape[-1] != 1 and loss.label == "class":
        hint = "take the last axis for the classes with `loss_options=class-axis=-1`"
    else:
        hint = f"for labels of 0 and 1 choose `losses={'bce' if head == 'Sigmoid' else 'bce-logits'!r}`"
    text = f"{loss.name} needs at least 2 classes, and axis {axis} of '{prediction.name}' has 1"
    raise wrong_shape(f"{text}: the softmax over one class is always 1", hint)


def _doubts(op: Op, given: Mapping[str, object], loss: losses.Loss, prediction: Val, is_default: bool) -> Iterator[str]:
    """Yield a sentence for each sign that a loss does not fit its output."""
    head = _head(op, prediction)
    made = f"output '{prediction.name}' is computed by {head}"
    if head in loss.rather:
        yield f"{made}, which the loss {loss.name} does not expect; use {loss.rather[head]} instead"
    elif head in FOR_OUTPUTS and is_default:
        better = f"a classifier trains better with `losses={FOR_OUTPUTS[head]!r}`"
        yield f"{made}, and the loss is {loss.name}, the default; {better}"
    axis = loss.class_axis(given)
    if axis is not None and isinstance(prediction.shape[axis], str) and isinstance(prediction.shape[-1], int):
        where = f"{loss.name} reads the classes from axis {axis}, whose size is not fixed"
        yield f"{where}; if the classes are on the last axis, set class-axis=-1"


def _caution_pairs(training: LossRecord, prediction: Val, found: Val) -> None:
    """Add a note if there is one loss per pair of samples, as [n] and [n, 1] give if they are combined by mistake."""
    shape, own = found.known_shape or (), prediction.known_shape or ()
    if own and isinstance(own[0], str) and shape.count(own[0]) > max(1, own.count(own[0])):
        sizes = ", ".join(map(str, shape))
        text = (
            f"the losses on '{prediction.name}' have the shape [{sizes}], one for each pair of samples; use "
            "op.squeeze or op.unsqueeze if values of the shapes [n] and [n, 1] were combined by mistake"
        )
        training.cautions.append(Caution("note", prediction.name, text))


def _note_mixing(op: LossOp, training: LossRecord, spec: LossSpec, values: Sequence[Val], found: Val) -> None:
    """Record that the loss of a sample depends on the other samples or their number, or that this can't be excluded.

    Args:
        op: the emitter.
        training: the record of the loss. If the loss certainly depends on the batch, a caution is added.
        spec: the loss.
        values: the arguments of the loss's function. Those with the batch axis of the first one consist of samples.
        found: the losses.
    """
    batch = (values[0].known_shape or (None,))[0]
    if batch is None:
        return
    op.flush()
    samples = [op.own(value).name for value in values if (value.known_shape or (None,))[0] == batch]
    tracker = Tracker(op.graph, batch, {name: [SampleAxis(0)] for name in samples}, frees=False)
    tracker.run([found.name], "")
    if tracker.refusals:
        why, is_certain = str(tracker.refusals[0]), tracker.mixes
    else:
        why, is_certain = _use_of_batch_size(op.graph, tracker.places, found.name), True
    if not why:
        return
    training.mixing[len(training.judged) - 1] = why
    if is_certain:
        text = f"the loss {spec.name} of a sample depends on its batch, and so on the batch size: {why}"
        training.cautions.append(Caution("note", spec.name, text))


def _use_of_batch_size(graph: Graph, samples: Mapping[str, SampleAxis], value: str) -> str:
    """Return the node by which a value depends on the size of the batch as a number; "" if it depends on shapes only.

    Args:
        graph: the graph.
        samples: map from each value that consists of samples to the axis of the samples.
        value: the value.
    """
    needed, sizes = graph.ancestors([value]), set[str]()
    for node in graph.nodes:
        if needed.isdisjoint(node.output):
            continue
        counts = node.op_type in ("Shape", "Size") and node.input[0] in samples
        if counts and attributes_of(node).get("start", 0) <= samples[node.input[0]].axis:
            sizes.update(node.output)
        elif not sizes.isdisjoint(reads(node)):
            if node.op_type == "Cast" and is_float(graph.types.get(node.output[0])):
                return f"{node.name} (Cast): it computes with the number of samples"
            sizes.update(name for name in node.output if not is_float(graph.types.get(name)))
    return ""


def _sample_weight(op: Op, training: LossRecord, name: str, loss: losses.Loss, prediction: Val, found: Val) -> Val:
    """Add the input for sample weights, and return it in a shape that broadcasts to the losses."""
    if not found.known_shape or not prediction.known_shape:
        raise conflict(
            f"`sample_weight` can't be combined with {loss.name} on '{prediction.name}', which is one number "
            "for the batch",
            "leave out the option, or choose an output with a batch axis",
        )
    if training.sample_weight is None:
        _refuse_taken(op.graph, name, "`sample_weight`")
        op.graph.add_input(name, tensor_type(found.dtype, [prediction.shape[0]]))
        training.sample_weight = name
        for arrays in training.sets.values():  # several sets are refused
            arrays[name] = name
    return op.unsqueeze(op.cast(op.val(name), found), range(1, found.rank))


def penalty(op: Op, kind: str, weight: Val) -> Val:
    """Return the sum of the absolute values ('ReduceL1') or squares ('ReduceSumSquare') of a weight, a scalar."""
    return reduced(op, kind, op.wide(weight))


def fed_first(graph: Graph) -> None:
    """Sort the inputs: those that must be fed come before initializers, which old models also declare as inputs."""
    inputs = graph.proto.graph.input
    refill(inputs, sorted(inputs, key=lambda value: value.name in graph.initializers))
