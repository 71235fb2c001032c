"""Choose the subject of an explanation: the float input or inner value to which a score is attributed.

If the subject is an inner value, such as the layer of Grad-CAM or the embeddings of tokens, the model gets a new input
that is added to the value. The gradient with respect to this input equals the gradient with respect to the inner value.
To change the inner value, the difference between the new and the original value is fed to the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data.initial_states import recurrent_values
from onnxgrad_cli.derivatives.derivative_model import float_inputs, open_model
from onnxgrad_cli.derivatives.named_values import choose, take_name
from onnxgrad_cli.errors import ambiguous, missing_value, wrong_shape, wrong_type, wrong_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.types import Shape, dtype_of, in_words, is_float, shape_of, tensor_type
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.prepare import make_differentiable
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.checks.freed_batch import free_asked

WITHOUT_GRADIENT = "integers such as token ids have no gradient"

POOLING = frozenset({"Conv", "MaxPool", "AveragePool", "LpPool", "BatchNormalization", "InstanceNormalization"})
"""Operators whose results have channels on axis 1, followed by spatial axes."""

REARRANGE = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Shape", "Gather", "Einsum"})
"""Operators that may move or merge the axes of a value."""


@dataclass(frozen=True)
class Subject:
    """The value to which a score is attributed.

    Attributes:
        name: the name of the value in the model.
        fed: the input that changes the value: the value itself if it is an input, otherwise the new input that is added
            to the value.
        model: the model in which `fed` is an input.
        plain: the original model. If the subject is an inner value, it is also an output there.
        path: the file that the model was read from.
    """

    name: str
    fed: str
    model: ModelProto
    plain: ModelProto
    path: Path | None

    @property
    def inner(self) -> bool:
        """True if the subject is an inner value, and False if it is an input."""
        return self.fed != self.name


def typed(model: ModelProto, path: Path | None, options: Options) -> Graph:
    """Return a copy of a model as a graph that is prepared for differentiation and has inferred types.

    Raises:
        UnsupportedError: the opset of the model is newer than the newest supported one.
    """
    graph = open_model(model, path, options)
    make_differentiable(graph, options, Training())
    return graph


def in_mode(model: ModelProto, path: Path | None, options: Options, tell: Tell) -> ModelProto:
    """Return the model in the requested mode (training or inference), for its outputs and its derivatives alike.

    If the option `shapes` makes the batch size dynamic, the given model is changed in place.

    Raises:
        UsageError: `shapes` contradicts the model.
        UnsupportedError: the opset of the model is newer than the newest supported one, or its batch size can't be made
            dynamic.
    """
    for caution in free_asked(Graph(model, path), options):
        tell(str(caution), 0)
    return model if options.mode == "keep" else typed(model, path, options).commit()


def the_input(model: ModelProto, path: Path | None, graph: Graph, wrt: str | None) -> Subject:
    """Return the subject for an input or inner value. The default is the only float input or the token embeddings.

    Empty caches of keys and values, and the initial states of recurrent layers, are never the default.

    Args:
        model: the model, which is not changed.
        path: the file that the model was read from.
        graph: the model with types.
        wrt: the name of an input or of an inner value; None for the default.

    Raises:
        UsageError: there is no such value, or the default is ambiguous.
    """
    inputs = float_inputs(graph)
    if wrt in required_inputs(graph) and wrt not in inputs:
        hint = f"choose a float input with `wrt`: {', '.join(inputs)}" if inputs else _instead(model, graph)
        raise wrong_type(f"`wrt`: '{wrt}' is {in_words(graph.types.get(wrt))}, and {WITHOUT_GRADIENT}", hint)
    if wrt is not None:
        name = _chosen("wrt", wrt, inputs, "float inputs", model)
    else:
        states = recurrent_values(model.graph.node).states
        known = [name for name in inputs if 0 not in (shape_of(graph.types[name]) or ()) and name not in states]
        if len(known) > 1:
            raise ambiguous(f"the model has several inputs: {', '.join(known)}", "choose one with `wrt`")
        found = known or embeddings(model, graph)
        if len(found) != 1:
            raise wrong_type(no_float_inputs(graph), _instead(model, graph))
        name = found[0]
    return Subject(name, name, model, model, path) if name in inputs else _moved(model, path, graph, name)


def the_layer(model: ModelProto, path: Path | None, graph: Graph, layer: str | None) -> Subject:
    """Return the subject for the layer with the given name, or for the last layer with spatial axes.

    Args:
        model, path, graph: see `the_input`.
        layer: the name of a value of shape [batch, channels, *positions], or of its node; None for the default.

    Raises:
        UsageError: there is no such layer.
    """
    hint = "choose a value [batch, channels, *positions] with `layer`, or use another method"
    if layer is not None:
        name = _chosen("layer", layer, [], "values inside the model", model)
        if len(shape_of(graph.types.get(name)) or ()) < 3:
            raise wrong_shape(f"`layer`: '{name}' must have channels and positions", hint)
    elif not (name := _last_with_places(model, graph)):
        raise missing_value("`layer`: the model has no convolutions, so there is no default layer", hint)
    elif _goes_on(model, graph, name):
        problem = f"the default layer '{name}' is followed by layers of tokens, so it is far from the scores"
        raise missing_value(f"`layer`: {problem}", hint)
    return _moved(model, path, graph, name)


def _chosen(option: str, pattern: str, inputs: list[str], kind: str, model: ModelProto) -> str:
    """Return the input or inner value that the user has chosen with an option.

    Raises:
        UsageError: there is no such value, or the pattern matches several.
    """
    names = choose(pattern, inputs, Graph(model), f"`{option}`", kind)[pattern]
    if len(names) > 1:
        message = f"`{option}`: '{pattern}' matches {len(names)} values, but must match one"
        raise ambiguous(message, f"choose one of them, such as {names[0]}")
    return names[0]


def _last_with_places(model: ModelProto, graph: Graph) -> str:
    """Return the name of the last value that has channels on axis 1, and spatial axes with more than one position.

    It is the last such value before a flattening or a global pooling. "" if there is none.
    """
    ranks: dict[str, int] = {}
    found = ""
    for node in model.graph.node:
        known = [ranks[name] for name in node.input if name in ranks]
        if node.op_type in REARRANGE or not (known or node.op_type in POOLING):
            continue
        for name in node.output:
            shape = shape_of(graph.types.get(name)) or ()
            if len(shape) == max(known) if known else len(shape) > 2:
                ranks[name] = len(shape)
                found = name if any(dim != 1 for dim in shape[2:]) else found
    return found


def _goes_on(model: ModelProto, graph: Graph, layer: str) -> bool:
    """Return True if a layer is followed by attention, or by matrix products of rank 3 or more, as in a transformer."""
    behind = {layer}
    for node in model.graph.node:
        if behind.isdisjoint(node.input):
            continue
        behind.update(node.output)
        ranks = [len(shape_of(graph.types.get(name)) or ()) for name in node.output]
        if node.op_type in ("MatMul", "Attention", "MultiHeadAttention") and max(ranks, default=0) > 2:
            return True
    return False


def required_inputs(graph: Graph) -> list[str]:
    """Return the inputs that must be fed, in order."""
    return [name for name in graph.input_names if name not in graph.initializers]


def no_float_inputs(graph: Graph) -> str:
    """Return the error message, with the reason, for a model without float inputs except states and empty caches."""
    floats = float_inputs(graph)
    others = [f"'{n}' is {in_words(graph.types.get(n))}" for n in required_inputs(graph) if n not in floats]
    but = " except states and empty caches" if floats else ""
    return f"the model has no float inputs{but}, and {WITHOUT_GRADIENT}: {', '.join(others)}"


def embeddings(model: ModelProto, graph: Graph) -> list[str]:
    """Return the embeddings: the results of Gather nodes that select rows of float weights by an integer input."""
    gathers = (node for node in model.graph.node if node.op_type == "Gather" and node.input[1] in graph.input_names)
    found = (node.output[0] for node in gathers if node.input[0] in graph.initializers)
    return [name for name in found if is_float(graph.types.get(name))]


def _instead(model: ModelProto, graph: Graph) -> str:
    """Return a hint for a model whose inputs are integers. It names a float value that can be explained instead."""
    found = embeddings(model, graph)
    if len(found) == 1:
        hint = "leave out `wrt` to explain the embeddings"
        return hint
    seen = set(required_inputs(graph))
    for node in model.graph.node:
        if not seen.isdisjoint(node.input):
            seen.update(node.output)
            found += [name for name in node.output if is_float(graph.types.get(name))]
    hint = "export the model with a float input"
    if found:
        hint = f"choose a float value inside the model, such as `wrt={found[0]!r}`"
    return hint


def _moved(model: ModelProto, path: Path | None, graph: Graph, name: str) -> Subject:
    """Return the subject for an inner value, with a copy of the model in which a new input is added to the value.

    Raises:
        UsageError: the value is not float, its rank is unknown, or no node of the main graph computes it.
    """
    value_type = graph.types.get(name)
    shape = shape_of(value_type)
    if not is_float(value_type) or shape is None:
        hint = "choose another value, or set shapes with `shapes`"
        raise wrong_type(f"'{name}' must be a float tensor whose rank is known", hint)
    moved, plain = Graph(copied(model), path), copied(model)
    if name not in moved.producers():
        raise wrong_value(f"'{name}' is not computed by a node of the main graph", "choose another value")
    fed, made = moved.fresh(f"{name}_moved"), moved.fresh(f"{name}_made")
    add = make_node("Add", [made, fed], [name], name=moved.fresh(f"{name}/move"))
    moved.nodes.insert(take_name(moved, name, made), add)
    kind = tensor_type(dtype_of(value_type), _named(shape, graph))
    moved.add_input(fed, kind)
    if name not in (output.name for output in plain.graph.output):
        plain.graph.output.append(onnx.helper.make_value_info(name, kind))
    return Subject(name, fed, moved.commit(), plain, path)


def _named(shape: Shape, graph: Graph) -> list[int | str]:
    """Return a shape in which symbols that occur in no input are replaced by '?'."""
    known = {dim for name in graph.input_names for dim in shape_of(graph.types.get(name)) or ()}
    return [dim if isinstance(dim, int) or dim in known else "?" for dim in shape]
