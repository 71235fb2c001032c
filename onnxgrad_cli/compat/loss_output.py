"""`add_loss_output` under its old name: add a loss to a model as its first output, without any gradient.

The losses have the same formulas as in `onnxgrad build`; this module only adds the old interface. Constants of a loss
are written as Constant nodes, so that they are not mistaken for weights.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
from onnx import ModelProto, TensorProto, TypeProto, helper, numpy_helper

from onnxgrad_cli import errors
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.choices import Reduction
from onnxgrad_cli.common.settings import declared, exactly, require
from onnxgrad_cli.derivatives.derivative_model import float_initializers, open_model
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import reduced
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.files import ModelSource, read_model
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import refill
from onnxgrad_cli.ir.node_values import subgraphs, with_bodies
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import is_external, is_float, shape_of, tensor_type
from onnxgrad_cli.losses.classification import picked
from onnxgrad_cli.losses.registry import LOSSES, Loss
from onnxgrad_cli.losses.same_shape import MIN_PROBABILITY, mae, mse
from onnxgrad_cli.passes.loss.append import penalty as penalty_of
from onnxgrad_cli.passes.prepare.normalise import normalise
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.passes.prepare.upgrade import upgrade

Penalty = Mapping[str, float | Mapping[str, float]]


def _elastic(op: Op, prediction: Val, label: Val, *, l1_weight: float = 0.5, l2_weight: float = 0.5) -> Val:
    return mae(op, prediction, label) * l1_weight + mse(op, prediction, label) * l2_weight


def _log(op: Op, prediction: Val, label: Val, *, eps: float = 1e-6, label_column: bool = True) -> Val:
    smallest = MIN_PROBABILITY[prediction.dtype]
    require(smallest <= eps < 0.5, f"eps must lie between {smallest:.3g} and 0.5")
    clipped = op.Clip(prediction, op.const(eps, prediction), op.const(1 - eps, prediction))
    logs = op.Log(clipped / op.sum(clipped, [1]))
    return picked(op, logs, op.squeeze(label, [1]) if label_column else label)[0]


ELASTIC_OPTIONS = {"l1_weight": "the weight of the absolute error", "l2_weight": "the weight of the squared error"}
LOG_OPTIONS = {
    "eps": "probabilities are clipped to [eps, 1 - eps]",
    "label_column": "the label is a column, [N, 1]; false: [N]",
}
ELASTIC = Loss("elastic", _elastic, "same", 0, declared(_elastic, ELASTIC_OPTIONS, "loss 'elastic'"), {})
LOG = Loss("log", _log, "class", 2, declared(_log, LOG_OPTIONS, "loss 'log'"), {})

SCORES: dict[str, tuple[Loss, str]] = {
    "squared_error": (LOSSES.lookup("mse"), "sum"),
    "l2": (LOSSES.lookup("mse"), "sum"),
    "absolute_error": (LOSSES.lookup("mae"), "sum"),
    "l1": (LOSSES.lookup("mae"), "sum"),
    "elastic": (ELASTIC, "sum"),
    "log": (LOG, "mean"),
}
"""Old name of a loss -> (the loss, its default reduction)."""


def add_loss_output(
    onx: ModelProto,
    score_name: str = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Penalty | None = None,
    output_index: int | str | None = None,
    *,
    reduction: str | None = None,
    **kwargs: object,
) -> ModelProto:
    """Add a loss on one output to a model, and return the new model.

    The inputs of the result are the model's inputs, the label, and the sample weights if there are any. The outputs are
    the loss, of shape [1, 1], and then all outputs of the model. The loss has the type of the output on which it is
    computed, or float32 for float16 and bfloat16. If an intermediate value has one of the new names, that value is
    renamed. A model with an older opset than 13 is converted to opset 13.

    With y the output and t the label, the losses are

    - 'squared_error' or 'l2': (y - t)²
    - 'absolute_error' or 'l1': |y - t|
    - 'elastic': l1_weight |y - t| + l2_weight (y - t)²; both weights are 0.5 unless given
    - 'log': -log p[t]. y has a column for each class; p is y clipped to [eps, 1 - eps] and divided by the sum of its
      row, and eps is 1e-6 by default. With label_column=False, the label has the shape [N] instead of [N, 1].

    Args:
        onx: the model; it is not changed.
        score_name: the name of a loss above.
        loss_name: the name of the new output.
        label_name: the name of the new input for the label. The label has the output's type and shape. For 'log' it
            holds the class number of each row, int64.
        weight_name: the name of a new input [N], of the output's type, with a weight for each row of the output. The
            weight multiplies all losses of the row. The divisor of a mean stays the same.
        penalty: initializer -> the penalty for it, which is added after the reduction. {"l1": a, "l2": b} adds a Σ|w| +
            b Σw². A number b adds b Σw².
        output_index: the position or the name of the output on which the loss is computed; None if there is only one.
        reduction: 'sum' or 'mean' over all elements (for 'log', over all rows). By default 'mean' for 'log' and 'sum'
            for the other losses.
        kwargs: options of the loss: l1_weight, l2_weight, eps, label_column.

    Raises:
        UsageError: an argument does not fit the model or the loss.
        UnsupportedError: the model's opset can't be converted to opset 13, or is too new.
    """
    if score_name not in SCORES:
        raise errors.unknown_name(f"there is no loss '{score_name}'", errors.suggest(score_name, SCORES, "losses"))
    loss, usual = SCORES[score_name]
    reduction = usual if reduction is None else reduction
    settings = {option.name: option.default for option in loss.options} | exactly(loss.options, kwargs, score_name)
    checks.one_of("reduction", reduction, Reduction)
    graph = open_model(onx, None)
    output = _output(graph, output_index)
    penalties = {} if penalty is None else _penalties(graph, penalty)
    _free_names(graph, loss_name=loss_name, label_name=label_name, weight_name=weight_name)
    _modernise(graph)
    op = Op(graph)
    op.scope = loss_name
    prediction = op.val(output)
    _refuse_unfit(prediction, loss)
    graph.add_input(label_name, _label_type(loss, prediction, settings))
    found = loss.function(op, op.wide(prediction), op.wide(op.val(label_name)), **settings)
    if weight_name is not None:
        found = found * _row_weights(op, weight_name, prediction, found)
    total = reduced(op, "ReduceMean" if reduction == "mean" else "ReduceSum", found)
    for name, (l1, l2) in penalties.items():
        term = _penalty(op, op.val(name), l1, l2)
        total = total if term is None else total + op.cast(term, total)
    op.rename(op.reshape(total, [1, 1]), loss_name)
    graph.nodes.extend(op.nodes)
    graph.add_output(loss_name)
    *own, added = graph.proto.graph.output
    refill(graph.proto.graph.output, [added, *own])
    return _with_constants_as_nodes(graph.commit(), {tensor.name for tensor in onx.graph.initializer})


def get_train_initializer(onx: ModelSource) -> dict[str, tuple[np.ndarray, TensorProto]]:
    """Return name -> (values, tensor), for the float initializers of a model, in order.

    Raises:
        UsageError: the argument is not a model, or the values of an initializer are in another file.
        OnnxgradError: the model can't be read.
    """
    graph = Graph(read_model(onx)[0])
    found = {}
    for name in float_initializers(graph):
        tensor = graph.initializers[name]
        if is_external(tensor):
            hint = "read the model with its external data, or save it as one file"
            raise errors.missing_value(f"the values of '{name}' are in another file", hint)
        found[name] = (numpy_helper.to_array(tensor), tensor)
    return found


def _output(graph: Graph, chosen: int | str | None) -> str:
    names = graph.output_names
    listed = ", ".join(f"{position} or '{name}'" for position, name in enumerate(names))
    if chosen is None and len(names) != 1:
        raise errors.ambiguous(f"`output_index`: the model has {len(names)} outputs", f"choose one: {listed}")
    if isinstance(chosen, str):
        if chosen not in names:
            hint = errors.suggest(chosen, names, "outputs")
            raise errors.unknown_name(f"`output_index`: the model has no output '{chosen}'", hint)
        return chosen
    position = 0 if chosen is None else chosen
    if not checks.is_number(position, 0, whole=True) or position >= len(names):
        raise errors.wrong_value(f"`output_index={chosen!r}` is not the position of an output", f"use {listed}")
    return names[position]


def _penalties(graph: Graph, penalty: Penalty) -> dict[str, tuple[float, float]]:
    if not penalty:
        raise errors.no_data("`penalty` is empty", 'leave it out, or name initializers: {"W": {"l1": 0.1, "l2": 0.1}}')
    floats = float_initializers(graph)
    for name in penalty:
        if name not in floats:
            hint = errors.suggest(name, floats, "weights")
            raise errors.unknown_name(f"`penalty`: the model has no float initializer '{name}'", hint)
    return {name: _factors(name, factors) for name, factors in penalty.items()}


def _factors(name: str, given: float | Mapping[str, float]) -> tuple[float, float]:
    factors = given if isinstance(given, Mapping) else {"l2": given}
    hint = 'pass a number, for "l2", or {"l1": a, "l2": b}'
    if not factors or not set(factors) <= {"l1", "l2"}:
        raise errors.unknown_name(f"`penalty` of '{name}': {given!r} must have the keys 'l1' or 'l2' only", hint)
    for value in factors.values():
        if not checks.is_number(value):
            raise errors.wrong_value(f"`penalty` of '{name}': {value!r} is not a finite number", hint)
    return float(factors.get("l1", 0.0)), float(factors.get("l2", 0.0))


def _penalty(op: Op, weight: Val, l1: float, l2: float) -> Val | None:
    kinds = {"ReduceL1": l1, "ReduceSumSquare": l2}
    terms = [penalty_of(op, kind, weight) * factor for kind, factor in kinds.items() if factor]
    return None if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _free_names(graph: Graph, **names: str | None) -> None:
    """Make the names of the new values available, by renaming intermediate values that already have these names.

    Args:
        graph: the graph.
        **names: argument of `add_loss_output` -> the name of a new value, or None.

    Raises:
        UsageError: an input, an output, an initializer or a value in a body has such a name.
    """
    given = {argument: name for argument, name in names.items() if name is not None}
    owned = {*graph.input_names, *graph.output_names, *graph.initializers}
    owned.update(tensor.values.name for tensor in graph.proto.graph.sparse_initializer)
    bodies = [body for node in with_bodies(graph.nodes) for body in subgraphs(node)]
    inner = {value.name for body in bodies for value in (*body.input, *body.initializer)}
    inner.update(name for body in bodies for node in body.node for name in node.output)
    made = {output for node in graph.nodes for output in node.output}
    seen: dict[str, str] = {}
    for argument, name in given.items():
        if not isinstance(name, str) or not name:
            raise errors.wrong_value(f"`{argument}={name!r}` is not a valid name", "pass a new name")
        if name in seen:
            hint = "choose another name for one of them"
            raise errors.conflict(f"`{seen[name]}` and `{argument}` are both '{name}'", hint)
        seen[name] = argument
        if name in owned or name in inner:
            where = "among its inputs, outputs and initializers" if name in owned else "in a body of a node"
            raise errors.conflict(f"`{argument}`: the model already has a '{name}' {where}", "choose another name")
        if name in made:
            _call(graph, name, graph.fresh(f"_{name}_"))
        else:
            graph.fresh(name)


def _call(graph: Graph, old: str, new: str) -> None:
    rename(graph.nodes, {old: new})
    for value in graph.proto.graph.value_info:
        if value.name == old:
            value.name = new
    for annotation in graph.proto.graph.quantization_annotation:
        if annotation.tensor_name == old:
            annotation.tensor_name = new


def _modernise(graph: Graph) -> None:
    """Convert the model to an opset that the emitter supports, and infer the type of every value."""
    if graph.opset() is None:
        graph.proto.opset_import.add(domain="", version=OLDEST_OPSET)
    if (graph.opset() or 0) < OLDEST_OPSET:
        normalise(graph)
        infer_types(graph)
        upgrade(graph, OLDEST_OPSET)
    infer_types(graph)


def _refuse_unfit(prediction: Val, loss: Loss) -> None:
    name, shape = prediction.name, prediction.known_shape
    if not is_float(prediction.type):
        hint = "choose another with `output_index`"
        raise errors.wrong_type(f"'{name}' is not a float output, so it can't have a loss", hint)
    if shape is None:
        message = f"the rank of output '{name}' is unknown, so its label can't be declared"
        raise errors.wrong_shape(message, "declare its shape in the model")
    if loss is LOG and (len(shape) != 2 or shape[1] == 1):
        message = "log takes probabilities with a row for each sample and a column for each class"
        hint = "choose the output that holds them with `output_index`"
        raise errors.wrong_shape(f"{message}, but '{name}' is [{', '.join(map(str, shape))}]", hint)


def _label_type(loss: Loss, prediction: Val, settings: Mapping[str, object]) -> TypeProto:
    found = loss.label_type(prediction, settings)
    assert found is not None  # each of these losses has a label
    if settings.get("label_column"):
        return tensor_type(TensorProto.INT64, [*(shape_of(found) or ()), 1])
    return found


def _row_weights(op: Op, name: str, prediction: Val, found: Val) -> Val:
    """Add the input for the weights of the rows, and return the weights in a shape that broadcasts to the losses."""
    if not prediction.shape:
        message = f"`weight_name` weights the rows of an output, but output '{prediction.name}' is a scalar"
        raise errors.conflict(message, "leave it out")
    op.graph.add_input(name, tensor_type(prediction.dtype, [prediction.shape[0]]))
    return op.unsqueeze(op.cast(op.val(name), found), range(1, found.rank))


def _with_constants_as_nodes(model: ModelProto, own: Container[str]) -> ModelProto:
    """Replace every initializer that is not in `own`, the initializers of the user's model, by a Constant node."""
    graph = model.graph
    added = [tensor for tensor in graph.initializer if tensor.name not in own]
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in added]
    refill(graph.node, [*nodes, *graph.node])
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in own])
    return model
