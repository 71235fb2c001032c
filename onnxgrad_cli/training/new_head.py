"""Replace the last layer of a classifier to train it for a different number of classes.

The new matrix is drawn from the uniform distribution of X. Glorot and Y. Bengio, Understanding the difficulty of
training deep feedforward neural networks, AISTATS 2010. The new bias is zero. The size of the output changes to the new
number of classes; all other layers stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, helper, numpy_helper

from onnxgrad_cli.errors import UsageError, suggest, unknown_name
from onnxgrad_cli.ir.nodes import reads, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.ir.weightless_copy import skeleton

THROUGH = frozenset({"Cast", "Identity", "LogSoftmax", "Sigmoid", "Softmax"})
"""Operators that may stand between the last layer and the output. They keep the number of classes."""

OF_THE_LAYER = {"MatMul": 1, "Gemm": 1, "Conv": 1}
"""Operators that can be a last layer -> the position of the input that is the weight matrix."""


@dataclass(frozen=True)
class Head:
    """The last layer of a classifier.

    Attributes:
        weight: the name of its matrix.
        axis: the axis of the matrix that runs over the classes.
        biases: the names of the bias vectors.
        results: the names of the values between the layer and the output, from the output back to the result of the
            layer.
        class_axis: the axis of the output that runs over the classes.
    """

    weight: str
    axis: int
    biases: list[str]
    results: list[str]
    class_axis: int


def with_classes(model: ModelProto, output: str | None, classes: int, seed: int) -> list[str]:
    """Change the number of classes of a model's last layer in place, and draw new weights for this layer.

    Args:
        model: the inference model; changed.
        output: the output with one score per class; None for the first output.
        classes: the new number of classes.
        seed: the seed of the random numbers.

    Returns:
        The names of the new weights.

    Raises:
        UsageError: the output is not computed by a last layer whose matrix and bias are stored and read by no other
            node.
    """
    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    name = output or next(iter(outputs))
    if name not in outputs:
        raise unknown_name(f"the model has no output '{name}'", suggest(name, outputs, "outputs"))
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
    """Update the declared shapes of the weights, values and outputs that a new last layer has changed.

    Args:
        model: the model; changed.
        weights: name -> new weight. Old files declare weights as inputs, files of PyTorch declare them in `value_info`.
        results: the values from the output back to the result of the layer, as in `Head.results`. The declared shape of
            the first one, the output, is already up to date.
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
    """Change the number of classes of each last layer in place to the number in the trained weights.

    Args:
        model: the inference model; changed.
        values: name -> trained weight.

    Returns:
        Output -> new number of classes, for the outputs that were changed.
    """
    found = {}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for output in model.graph.output:
        try:
            head = _head(model, output.name, stored)
        except UsageError:
            continue  # such an output keeps its size
        before, now = list(stored[head.weight].dims), list(np.shape(values.get(head.weight, ())))
        if len(now) == len(before) and now[head.axis] != before[head.axis]:
            found[output.name] = now[head.axis]
            with_classes(model, output.name, now[head.axis], seed=0)
    return found


def _head(model: ModelProto, name: str, stored: Mapping[str, TensorProto]) -> Head:
    """Return the last layer that computes an output.

    Raises:
        UsageError: there is no such layer, or its weights are not stored or are read by other nodes.
    """
    layer, biases, results = _last_layer(model, name, stored)
    attributes = {a.name: a.i for a in layer.attribute}
    convolves = layer.op_type == "Conv"
    if convolves and attributes.get("group", 1) != 1:
        raise _no_head(layer, results[-1])
    weight = layer.input[1]
    biases += [each for each in layer.input[2:3] if each]
    missing = next((each for each in (weight, *biases) if each not in stored), None)
    if missing is not None:
        what = f"`classes`: '{missing}' of the last layer '{layer.name}' is computed by the model"
        raise UsageError(what, "export it as a stored weight")
    _check_alone(model, layer, [weight, *biases])
    axis = 0 if convolves else -2 if attributes.get("transB") else -1
    return Head(weight, axis, biases, results, 1 if convolves else -1)


def _last_layer(
    model: ModelProto, name: str, stored: Mapping[str, TensorProto]
) -> tuple[NodeProto, list[str], list[str]]:
    """Return the node of the last layer, the names of the biases of Add nodes after it, and `Head.results`."""
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
    """Return a list with the stored operand (the bias) of an Add node; [] for other nodes."""
    return [each for each in node.input if each in stored][:1] if node is not None and node.op_type == "Add" else []


def _no_head(node: NodeProto | None, name: str) -> UsageError:
    what = f"a {node.op_type} ('{node.name}')" if node is not None else "no node"
    hint = f"export the layer as {' or '.join(OF_THE_LAYER)}, with only a bias or {', '.join(sorted(THROUGH))} after it"
    return UsageError(f"`classes`: '{name}' comes from {what}, which is not a last layer that can be replaced", hint)


def _check_alone(model: ModelProto, head: NodeProto, names: list[str]) -> None:
    """Raise an error if other nodes read a weight of the layer too, such as the embedding of a language model."""
    counts = dict.fromkeys(names, 0)
    for node in with_bodies(model.graph.node):
        for each in reads(node):
            if each in counts:
                counts[each] += 1
    shared = next((name for name, count in counts.items() if count > 1), None)
    if shared is not None:
        raise UsageError(
            f"`classes`: '{shared}' of the last layer '{head.name}' is also read by other nodes, so its shape can't "
            "change",
            "export the model again so that the last layer has a weight of its own",
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
