"""A last layer of another size: a network that was trained to tell some classes apart learns to tell others.

Its matrix is drawn anew, uniformly as X. Glorot and Y. Bengio, Understanding the difficulty of training deep
feedforward neural networks, AISTATS 2010; its bias is zero. The output has the new number of classes, all else stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, helper, numpy_helper

from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.nodes import reads, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.skeleton import skeleton
from onnxgrad_cli.ir.types import tensor_type

THROUGH = frozenset({"Cast", "Identity", "LogSoftmax", "Sigmoid", "Softmax"})
"""What may follow a last layer: it gives a number for each class as it takes one."""

OF_THE_LAYER = {"MatMul": 1, "Gemm": 1, "Conv": 1}
"""The operators of a last layer, and the input that holds the matrix."""


@dataclass(frozen=True)
class Head:
    """A last layer.

    Attributes:
        weight, axis: its matrix, and the axis of that which runs over the classes.
        biases: vectors that are added.
        results: the values from it on to the output.
        class_axis: the axis of the output that runs over the classes.
    """

    weight: str
    axis: int
    biases: list[str]
    results: list[str]
    class_axis: int


def with_classes(model: ModelProto, output: str | None, classes: int, seed: int) -> list[str]:
    """Give the last layer of a model another number of classes, in place; its weights are drawn anew.

    Args:
        model: the inference model; changed.
        output: the output that holds a number for each class; None is the first one.
        classes: how many there are to be.
        seed: the same one draws the same weights.

    Returns:
        The names of the new weights.

    Raises:
        UsageError: the output does not come from a matrix and a bias that nothing else reads.
    """
    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    name = output or next(iter(outputs))
    if name not in outputs:
        raise UsageError(f"the model has no output '{name}'", suggest(name, outputs, "outputs"))
    stored = {tensor.name: tensor for tensor in graph.initializer}
    head = _head(model, name, stored)
    rng = np.random.default_rng(seed)
    for each in (head.weight, *head.biases):
        _resize(stored[each], head.axis if each == head.weight else -1, classes, rng, each == head.weight)
    dims = outputs[name].type.tensor_type.shape.dim
    if dims:
        dims[head.class_axis].Clear()
        dims[head.class_axis].dim_value = classes
    _declare_again(model, {each: stored[each] for each in (head.weight, *head.biases)}, head.results)
    return [head.weight, *head.biases]


def _declare_again(model: ModelProto, weights: Mapping[str, TensorProto], results: Sequence[str]) -> None:
    """Let a model declare the sizes that a new last layer has given to weights, values and outputs.

    Args:
        model: the model; changed.
        weights: the new weights, by name. Old files have them among their inputs, and PyTorch's in `value_info`.
        results: the output of the layer, whose size is declared already, and the values from it back to the layer.
    """
    graph, output, changed = model.graph, results[0], {results[-1]}
    for node in graph.node:
        if not changed.isdisjoint(reads(node)):
            changed.update(node.output)
    declared = [value for value in graph.value_info if value.name not in changed and value.name not in weights]
    del graph.value_info[:]
    graph.value_info.extend(declared)
    for value in graph.input:
        if value.name in weights and value.type.tensor_type.HasField("shape"):
            value.type.CopyFrom(tensor_type(weights[value.name].data_type, weights[value.name].dims))
    others = {value.name: value.type.tensor_type.shape for value in graph.output if value.name in changed - {output}}
    if not others:
        return
    bare = skeleton(model)
    for value in bare.graph.output:
        if value.name in others:
            value.type.tensor_type.ClearField("shape")
    for value in infer_shapes(bare).graph.output:
        found = value.type.tensor_type.shape.dim
        for dim, size in zip(others.get(value.name, TensorShapeProto()).dim, found, strict=False):
            if size.HasField("dim_value"):
                dim.dim_value = size.dim_value


def with_trained_classes(model: ModelProto, values: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Give each last layer of a model, in place, as many classes as there are in what was trained of it.

    Args:
        model: the inference model; changed.
        values: what was trained, by name.

    Returns:
        The outputs that have got another number of classes, and that.
    """
    found = {}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for output in model.graph.output:
        try:
            head = _head(model, output.name, stored)
        except UsageError:
            continue  # its size is that of the model
        before, now = list(stored[head.weight].dims), list(np.shape(values.get(head.weight, ())))
        if len(now) == len(before) and now[head.axis] != before[head.axis]:
            found[output.name] = now[head.axis]
            with_classes(model, output.name, now[head.axis], seed=0)
    return found


def _head(model: ModelProto, name: str, stored: Mapping[str, TensorProto]) -> Head:
    """The last layer behind an output, whose weights are stored and its own."""
    layer, biases, results = _last_layer(model, name, stored)
    attributes = {a.name: a.i for a in layer.attribute}
    convolves = layer.op_type == "Conv"
    if convolves and attributes.get("group", 1) != 1:
        raise _no_head(layer, results[-1])
    weight = layer.input[1]
    biases += [each for each in layer.input[2:3] if each]
    missing = next((each for each in (weight, *biases) if each not in stored), None)
    if missing is not None:
        what = f"`classes`: '{missing}' of the last layer '{layer.name}' is computed"
        raise UsageError(what, "export it as a weight")
    _check_alone(model, layer, [weight, *biases])
    axis = 0 if convolves else -2 if attributes.get("transB") else -1
    return Head(weight, axis, biases, results, 1 if convolves else -1)


def _last_layer(
    model: ModelProto, name: str, stored: Mapping[str, TensorProto]
) -> tuple[NodeProto, list[str], list[str]]:
    """The node of the layer behind an output, the biases that are added after it, and the values from it on."""
    makers = {each: node for node in model.graph.node for each in node.output}
    biases: list[str] = []
    results = [name]
    while True:
        node = makers.get(name)
        if node is not None and node.op_type in OF_THE_LAYER:
            return node, biases, results
        bias = _bias(node, stored)
        if node is None or (node.op_type not in THROUGH and not bias):
            raise _no_head(node, name)
        biases += bias
        name = next(each for each in node.input if each not in bias)
        results.append(name)


def _bias(node: NodeProto | None, stored: Mapping[str, TensorProto]) -> list[str]:
    """What an Add adds that is stored, if it does."""
    return [each for each in node.input if each in stored][:1] if node is not None and node.op_type == "Add" else []


def _no_head(node: NodeProto | None, name: str) -> UsageError:
    what = f"a {node.op_type} ('{node.name}')" if node is not None else "no node"
    return UsageError(
        f"`classes`: '{name}' comes from {what}, which is no last layer that can be replaced",
        f"that is a {', '.join(OF_THE_LAYER)} with stored weights, a bias, and perhaps {', '.join(sorted(THROUGH))}",
    )


def _check_alone(model: ModelProto, head: NodeProto, names: list[str]) -> None:
    """Refuse weights that others read, as an embedding of tokens does that of a language model."""
    counts = dict.fromkeys(names, 0)
    for node in with_bodies(model.graph.node):
        for each in reads(node):
            if each in counts:
                counts[each] += 1
    shared = next((name for name, count in counts.items() if count > 1), None)
    if shared is not None:
        raise UsageError(
            f"`classes`: '{shared}' of the last layer '{head.name}' is read elsewhere, too", "part them first"
        )


def _resize(tensor: TensorProto, axis: int, classes: int, rng: np.random.Generator, drawn: bool) -> None:
    dims = list(tensor.dims) or [1]
    dims[axis] = classes
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    array = np.zeros(dims)
    if drawn:
        bound = math.sqrt(6 / (math.prod(dims) / classes + classes))
        array = rng.uniform(-bound, bound, dims)
    tensor.CopyFrom(numpy_helper.from_array(array.astype(kind), tensor.name))
