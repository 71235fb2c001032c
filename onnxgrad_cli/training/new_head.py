"""Replace the last layer of a classifier to train it for a different number of classes.

The new matrix is drawn from the uniform distribution of X. Glorot and Y. Bengio, Understanding the difficulty of
training deep feedforward neural networks, AISTATS 2010. The new bias is zero. The size of the output changes to the new
number of classes; all other layers stay the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, TensorShapeProto, helper, numpy_helper

from onnxgrad_cli.errors import UsageError, conflict, suggest, unknown_name
from onnxgrad_cli.ir.node_values import read_by, reads, with_bodies
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.ir.weightless_copy import skeleton

THROUGH = frozenset({"Cast", "Identity", "LogSoftmax", "Sigmoid", "Softmax"})
"""Operators that may stand between the last layer and the output. They keep the number of classes."""

LAYERS = ("MatMul", "Gemm", "Conv")
"""Operators that can be a last layer. Their second input is the weight matrix."""


@dataclass(frozen=True)
class Head:
    """The last layer of a classifier.

    Attributes:
        weight: the name of its matrix.
        axis: the axis of the matrix that runs over the classes.
        biases: the names of the bias vectors.
        result: the result of the layer, from which the output is computed.
        class_axis: the axis of the output that runs over the classes.
    """

    weight: str
    axis: int
    biases: list[str]
    result: str
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
    _resize(stored[head.weight], head.axis, classes, rng)
    for each in head.biases:
        _resize(stored[each], -1, classes, None)
    dims = outputs[name].type.tensor_type.shape.dim
    if dims:
        dims[head.class_axis].Clear()
        dims[head.class_axis].dim_value = classes
    names = [head.weight, *head.biases]
    _declare_again(model, {each: stored[each] for each in names}, name, head.result)
    return names


def _declare_again(model: ModelProto, weights: Mapping[str, TensorProto], output: str, result: str) -> None:
    """Update the declared shapes of the weights, values and outputs that a new last layer has changed.

    Args:
        model: the model; changed.
        weights: name -> new weight. Old files declare weights as inputs, PyTorch exports in `value_info`.
        output: the output with one score per class, whose declared shape is already up to date.
        result: the result of the layer.
    """
    graph, changed = model.graph, {result}
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
    layer, biases, result = _last_layer(model, name, stored)
    attributes = {a.name: a.i for a in layer.attribute}
    convolves = layer.op_type == "Conv"
    if convolves and attributes.get("group", 1) != 1:
        raise _no_head(layer, result)
    weight = layer.input[1]
    biases += [each for each in layer.input[2:3] if each]
    missing = next((each for each in (weight, *biases) if each not in stored), None)
    if missing is not None:
        what = f"`classes`: '{missing}' of the last layer '{layer.name}' is computed by the model"
        raise conflict(what, "export it as a stored weight")
    uses = Counter(read_by(with_bodies(model.graph.node)))  # the embedding of a language model is used twice
    shared = next((name for name in (weight, *biases) if uses[name] > 1), None)
    if shared is not None:
        what = f"`classes`: '{shared}' of the last layer '{layer.name}' is also read by other nodes"
        raise conflict(what, "export the model again so that the last layer has a weight of its own")
    axis = 0 if convolves else -2 if attributes.get("transB") else -1
    return Head(weight, axis, biases, result, 1 if convolves else -1)


def _last_layer(model: ModelProto, name: str, stored: Mapping[str, TensorProto]) -> tuple[NodeProto, list[str], str]:
    """Return the node of the last layer, the names of the biases of Add nodes after it, and the layer's result."""
    makers = {each: node for node in model.graph.node for each in node.output}
    biases: list[str] = []
    while node := makers.get(name):
        if node.op_type in LAYERS:
            return node, biases, name
        bias = [each for each in node.input if each in stored][:1] if node.op_type == "Add" else []
        if node.op_type not in THROUGH and not bias:
            break
        biases += bias
        name = next(each for each in node.input if each not in bias)
    raise _no_head(node, name)


def _no_head(node: NodeProto | None, name: str) -> UsageError:
    what = f"a {node.op_type} ('{node.name}')" if node is not None else "no node"
    hint = f"export the layer as {' or '.join(LAYERS)}, with only a bias or {', '.join(sorted(THROUGH))} after it"
    return conflict(f"`classes`: '{name}' comes from {what}, which is not a last layer that can be replaced", hint)


def _resize(tensor: TensorProto, axis: int, classes: int, rng: np.random.Generator | None) -> None:
    """Change the size of an axis, and fill the tensor with zeros, or with random numbers if `rng` is given."""
    dims = list(tensor.dims) or [1]
    dims[axis] = classes
    bound = math.sqrt(6 / (math.prod(dims) / classes + classes))
    array = np.zeros(dims) if rng is None else rng.uniform(-bound, bound, dims)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    tensor.CopyFrom(numpy_helper.from_array(array.astype(kind), tensor.name))
