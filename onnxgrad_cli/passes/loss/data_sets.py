"""Evaluate the model on several data sets, each with its own losses.

The first set uses the inputs of the model. Each other set gets its own inputs, and a copy of the nodes that depend on
them. The copies read the same weights, so the backward part adds up the gradients of all sets.
"""

from __future__ import annotations

from onnx import TypeProto

from onnxgrad_cli.common.checks import conflicts
from onnxgrad_cli.errors import conflict, missing_value, wrong_value
from onnxgrad_cli.ir.types import UNNAMED, dtype_of, shape_of, tensor_type
from onnxgrad_cli.losses import Loss
from onnxgrad_cli.options import AppendOptions
from onnxgrad_cli.passes.loss.function import Evaluation, LossOp
from onnxgrad_cli.record import LossRecord, StepRecord


def evaluations(op: LossOp, options: AppendOptions, training: StepRecord) -> dict[str, Evaluation]:
    """Return a map: data set -> the evaluation of the model on it. Record inputs and outputs of the sets in `training`.

    Raises:
        UsageError: some losses name a data set and others don't, a name is already used in the model, or an option or
            the model doesn't allow several sets.
    """
    first, *others = dict.fromkeys(spec.data for spec in options.losses)
    found = {first: op.evaluation}
    if not first and not others:
        return found
    if "" in found or "" in others:
        name = next(spec.name for spec in options.losses if not spec.data)
        known = next(filter(None, (first, *others)))
        raise missing_value(
            f"`losses`: '{name}' has no data set, but a different loss has one", f"choose one: `losses={known}={name}`"
        )
    training.sets[first] = {name: name for name in training.inputs}
    if others:
        _check_copies(options, training)
    for name in others:
        found[name] = _copy(op, training, name)
        training.sets[name] = {each: found[name].names[each] for each in training.inputs}
    judged = zip(options.losses, training.predictions, strict=True)
    training.predictions = [found[spec.data].own(output) for spec, output in judged]
    return found


def _check_copies(options: AppendOptions, training: StepRecord) -> None:
    """Raise an error if an option or the model doesn't allow a second evaluation of the model.

    Raises:
        UsageError: such an option is set, a loss takes a mask, or the model updates running statistics.
    """
    for option, is_set in (
        ("sample_weight", options.sample_weight is not None),
        ("loss_chunks", (options.loss_chunks or 1) > 1),
        ("training_info", options.training_info),
    ):
        conflicts(f"`{option}`", {"losses on several data sets": is_set}, "leave it out")
    for spec in options.losses:
        mask = mask_of(spec.loss)
        what = f"`losses`: {spec.name} takes the mask '{mask}', which"
        conflicts(what, {"several data sets": bool(mask)}, "use a loss without a mask, or one data set")
    statistics = next(iter((*training.state, *training.fusions)), None)
    if statistics is not None:
        raise conflict(
            f"BatchNormalization in training mode computes '{statistics}' from a batch, and there are several data "
            "sets with a batch each",
            "use `mode='eval'`",
        )


def mask_of(loss: Loss | None) -> str:
    """Return the parameter of a loss that takes a mask, or "" if there is none."""
    operands = {} if loss is None else loss.operands or {}
    return next((parameter for parameter, (kind, _) in operands.items() if kind == "mask"), "")


def _copy(op: LossOp, training: LossRecord, data: str) -> Evaluation:
    """Add the inputs of a data set, called `SET.input`, and evaluate the model on them.

    Each symbolic size gets a new symbol, because the sets have different numbers of samples.
    """
    graph, names, symbols = op.graph, dict[str, str](), dict[str, str]()

    def own_size(size: int | str) -> int | str:
        if isinstance(size, int) or size == "?":
            return size
        if size not in symbols:
            symbols[size] = graph.fresh_symbol() if UNNAMED.fullmatch(size) else f"{data}.{size}"
        return symbols[size]

    def retyped(value_type: TypeProto) -> TypeProto:
        shape = shape_of(value_type)
        return value_type if shape is None else tensor_type(dtype_of(value_type), list(map(own_size, shape)))

    for name in training.inputs:
        names[name] = f"{data}.{name}"
        _refuse_taken(op, names[name], data)
        graph.add_input(names[name], retyped(graph.types[name]))
    for name in training.predictions:
        _refuse_taken(op, f"{data}/{name}", data)
    op.scope = data
    return op.evaluate(names, retyped)


def _refuse_taken(op: LossOp, name: str, data: str) -> None:
    if op.graph.taken(name):
        raise wrong_value(
            f"`losses`: the copy of the model for the data set '{data}' would have a value '{name}', but the model "
            "already has a value of this name",
            "give the data set a different name",
        )
