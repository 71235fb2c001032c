"""What a score is attributed to: an input of floats, or a value in between, which so becomes an input.

A value in between, such as a layer of Grad-CAM or the embeddings of tokens, is moved by an input of zeros that is added
to it. The gradient by that input is the one by the value, and whatever is added makes any other value of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.derivatives.derivative_model import float_inputs, open_model
from onnxgrad_cli.derivatives.values import choose
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import Shape, dtype_of, is_float, shape_of, tensor_type
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.record import Training
from onnxgrad_cli.training.data.states import recurrent_values
from onnxgrad_cli.verification.freed_batch import free_asked

KINDS = "float inputs"
"""What is attributed to, besides values in between: as errors call it."""

POOLING = frozenset({"Conv", "MaxPool", "AveragePool", "LpPool", "BatchNormalization", "InstanceNormalization"})
"""Operators whose results have channels on axis 1, and places behind it."""

REARRANGE = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape", "Gather", "Einsum"})
"""Operators behind which an axis may be another one."""


@dataclass(frozen=True)
class Subject:
    """What a score is attributed to.

    Attributes:
        name: the value, as the model calls it.
        fed: the input by which it is moved; itself where it is an input.
        model: the model, in which `fed` is an input.
        plain: the model as it is, in which a value in between is an output.
        path: where the model was read from.
    """

    name: str
    fed: str
    model: ModelProto
    plain: ModelProto
    path: Path | None

    @property
    def inner(self) -> bool:
        """Whether it is a value in between."""
        return self.fed != self.name


def typed(model: ModelProto, path: Path | None, options: Options) -> Graph:
    """A copy of a model as a graph, in which the type of every value is known that can be.

    Raises:
        UnsupportedError: its opset is newer than what is known.
    """
    graph = open_model(model, path, options)
    make_differentiable(graph, options, Training())
    return graph


def in_mode(model: ModelProto, path: Path | None, options: Options, tell: Tell) -> ModelProto:
    """The model as it is run: what it says of samples and what is differentiated are then in one mode.

    The batch is free where `shapes` asks for that; the model is changed then.

    Raises:
        UsageError: `shapes` contradicts the model.
        UnsupportedError: its opset is newer than what is known, or its batch can't be freed.
    """
    for caution in free_asked(Graph(model, path), options):
        tell(str(caution), 0)
    return model if options.mode == "keep" else typed(model, path, options).commit()


def the_input(model: ModelProto, path: Path | None, graph: Graph, wrt: str | None) -> Subject:
    """The input that is named, or the only one of floats; for tokens their embeddings.

    Empty caches of keys and values and the initial states of recurrent layers must be named.

    Args:
        model: the model, which is not changed.
        path: where it was read from.
        graph: it, typed.
        wrt: the name of an input or of a value in between; None is to be found out.

    Raises:
        UsageError: there is none such, or several.
    """
    inputs = float_inputs(graph)
    if wrt is None:
        states = recurrent_values(model.graph.node).states
        inputs = [name for name in inputs if 0 not in (shape_of(graph.types[name]) or ()) and name not in states]
        if not inputs:
            return _moved(model, path, graph, _embedding(model, graph))
        if len(inputs) > 1:
            raise UsageError(f"the model has the inputs {', '.join(inputs)}", "say with `wrt` which one is explained")
        return Subject(inputs[0], inputs[0], model, model, path)
    name = _one(choose(wrt, inputs, Graph(model), "`wrt`", KINDS)[wrt], wrt, "wrt")
    return Subject(name, name, model, model, path) if name in inputs else _moved(model, path, graph, name)


def the_layer(model: ModelProto, path: Path | None, graph: Graph, layer: str | None) -> Subject:
    """The layer that is named, or the last one with places behind its channels.

    Args:
        model, path, graph: see `the_input`.
        layer: the name of a value of shape [batch, channels, *places], or of its node; None is to be found out.

    Raises:
        UsageError: there is none such.
    """
    if layer is None:
        name = _last_layer(model, graph)
    else:
        name = _one(choose(layer, [], Graph(model), "`layer`", "values in betweens")[layer], layer, "layer")
    rank = len(shape_of(graph.types.get(name)) or ())
    if rank < 3:
        raise UsageError(f"`layer`: '{name}' has no channels and places", "name a value [batch, channels, *places]")
    return _moved(model, path, graph, name)


def _one(names: Sequence[str], pattern: str, option: str) -> str:
    if len(names) > 1:
        raise UsageError(f"`{option}`: '{pattern}' matches {len(names)} values", f"name one, such as {names[0]}")
    return names[0]


def _last_layer(model: ModelProto, graph: Graph) -> str:
    """The last value before pooling to one place or flattening: of channels on axis 1 and more than one place."""
    rows: dict[str, int] = {}
    found = ""
    for node in model.graph.node:
        known = [rows[name] for name in node.input if name in rows]
        if node.op_type in REARRANGE or not (known or node.op_type in POOLING):
            continue
        for name in node.output:
            shape = shape_of(graph.types.get(name)) or ()
            if len(shape) < 3 or (known and len(shape) != max(known)):
                continue
            rows[name] = len(shape)
            if any(dim != 1 for dim in shape[2:]):
                found = name
    if not found:
        raise UsageError(
            "the model has no convolutions: which layer Grad-CAM is of is not known",
            "name a value [batch, channels, *places] with `layer`, or take another method",
        )
    if _goes_on(model, graph, found):
        raise UsageError(
            f"the last layer of channels and places, '{found}', goes on as tokens: it is far from the scores",
            "name a value [batch, channels, *places] with `layer`, or take another method",
        )
    return found


def _goes_on(model: ModelProto, graph: Graph, layer: str) -> bool:
    """Whether matrices are multiplied behind a layer at each place, as in a transformer."""
    behind = {layer}
    for node in model.graph.node:
        if behind.isdisjoint(node.input):
            continue
        behind.update(node.output)
        ranks = [len(shape_of(graph.types.get(name)) or ()) for name in node.output]
        if node.op_type in ("MatMul", "Attention", "MultiHeadAttention") and max(ranks, default=0) > 2:
            return True
    return False


def _embedding(model: ModelProto, graph: Graph) -> str:
    """The rows of a table that an input of whole numbers chooses."""
    found = [
        node.output[0]
        for node in model.graph.node
        if node.op_type == "Gather"
        and node.input[1] in graph.input_names
        and node.input[0] in graph.initializers
        and is_float(graph.types.get(node.output[0]))
    ]
    if len(found) != 1:
        many = f"looks up {', '.join(found)}" if found else "has no input of floats, and looks none up in a table"
        raise UsageError(f"the model {many}", "name what is explained with `wrt`: an input or a value in between")
    return found[0]


def _moved(model: ModelProto, path: Path | None, graph: Graph, name: str) -> Subject:
    """A copy of the model in which something is added to a value, which is an output too.

    Raises:
        UsageError: the value is not of floats, or of no known rank.
    """
    value_type = graph.types.get(name)
    shape = shape_of(value_type)
    if not is_float(value_type) or shape is None:
        raise UsageError(f"'{name}' is of no known float type", "name another value, or fix shapes with `shapes`")
    names = Graph(model)
    fed, made = names.fresh(f"{name}_moved"), names.fresh(f"{name}_made")
    moved, plain = ModelProto(), ModelProto()
    moved.CopyFrom(model)
    plain.CopyFrom(model)
    for position, node in enumerate(moved.graph.node):
        if name in node.output:
            node.output[:] = [made if output == name else output for output in node.output]
            add = onnx.helper.make_node("Add", [made, fed], [name], name=names.fresh(f"{name}/move"))
            moved.graph.node.insert(position + 1, add)
            break
    else:
        raise UsageError(f"'{name}' is not made by a node of the graph itself", "name another value")
    kind = tensor_type(dtype_of(value_type), _named(shape, graph))
    moved.graph.input.append(onnx.helper.make_value_info(fed, kind))
    if name not in (output.name for output in plain.graph.output):
        plain.graph.output.append(onnx.helper.make_value_info(name, kind))
    return Subject(name, fed, moved, plain, path)


def _named(shape: Shape, graph: Graph) -> list[int | str]:
    """A shape whose symbols are those of the inputs; others are not said."""
    known = {dim for name in graph.input_names for dim in shape_of(graph.types.get(name)) or ()}
    return [dim if isinstance(dim, int) or dim in known else "?" for dim in shape]
