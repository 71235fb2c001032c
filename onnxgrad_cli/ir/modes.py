"""Detect the mode of BatchNormalization and Dropout, and convert them to inference mode.

In training mode, BatchNormalization uses the statistics of its batch, so its result for one sample depends on the
others, and Dropout sets random elements to zero. In inference mode, BatchNormalization uses running statistics, and
Dropout returns its input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.ir.domains import is_standard
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, copied, make_node, refill, write
from onnxgrad_cli.ir.node_values import all_nodes, subgraphs, with_bodies

BY_ATTRIBUTE = 14
"""The opset that added the attribute training_mode. Before it, a node with several outputs is in training mode."""

INITIALIZERS_ALONE = 4
"""The first IR version in which an initializer need not be an input too. One that is not an input is a constant."""

RANDOM = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""Operators that return different values in each run, so equal nodes must not be merged."""


def is_batch_normalization(node: Node) -> bool:
    """Return True if a node is the standard's BatchNormalization."""
    return node.op_type == "BatchNormalization" and is_standard(node.domain)


def is_dropout(node: Node) -> bool:
    """Return True if a node is the standard's Dropout."""
    return node.op_type == "Dropout" and is_standard(node.domain)


def is_random(graph: Graph, node: Node) -> bool:
    """Return True if a node may draw random numbers. A Dropout does so only in training mode."""
    return node.op_type in RANDOM and (node.op_type != "Dropout" or drops(graph, node))


def drops(graph: Graph, node: Node) -> bool:
    """Return True if a Dropout drops elements, or may do so because its training_mode is an input or computed."""
    switch = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else np.array(False)
    return switch is None or bool(switch)


def uses_batch(node: Node, opset: int) -> bool:
    """Return True if a BatchNormalization uses the statistics of its batch, as in training mode."""
    asked = any(a.name == "training_mode" and a.i for a in node.attribute)
    return asked or (opset < BY_ATTRIBUTE and any(node.output[1:]))


def own_statistics(node: Node) -> dict[int, str]:
    """Return input position -> a name for running mean and variance that belong to this BatchNormalization alone.

    Exporters store equal tensors once, so untrained layers share their zeros and ones. But training gives each layer
    different statistics. A layer may also compute its statistics from its batch and store none.
    """
    return {3: f"{node.output[0]}/running_mean", 4: f"{node.output[0]}/running_var"}


def give_own_statistics(model: ModelProto, names: Collection[str]) -> None:
    """Give BatchNormalizations separate running statistics under the given names.

    A shared statistic is copied. A computed statistic is replaced by its initial value.

    Args:
        model: the model, which is changed in place. Tensors and nodes that become unused are removed. In a file of an
            old IR version, where initializers must be inputs too, the new tensors are also declared as inputs.
        names: names from `own_statistics`; other names are ignored.
    """
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    left = set()
    for node in filter(is_batch_normalization, graph.node):
        for position, name in own_statistics(node).items():
            shared = stored.get(node.input[position])
            if shared is None and node.input[1] in stored:
                shared = fresh_statistic(stored[node.input[1]], position)
            if name in names and shared is not None:
                left.add(node.input[position])
                node.input[position] = name
                copy = graph.initializer.add()
                copy.CopyFrom(shared)
                copy.name = name
                if model.ir_version < INITIALIZERS_ALONE:
                    graph.input.append(helper.make_tensor_value_info(name, copy.data_type, copy.dims))
    if left:
        _remove_unread(graph, left, stored)


def fresh_statistic(scale: TensorProto, position: int) -> TensorProto:
    """Return the initial running mean (0) or variance (1) of a BatchNormalization.

    Args:
        scale: its scale, which has the same shape and type.
        position: the input position of the statistic: 3 for the mean, 4 for the variance.
    """
    array = np.full(scale.dims, position - 3, helper.tensor_dtype_to_np_dtype(scale.data_type))
    return numpy_helper.from_array(array)


def _remove_unread(graph: GraphProto, names: Collection[str], stored: Mapping[str, TensorProto]) -> None:
    """Remove nodes that compute only unused values in `names`, and initializers that are then unused.

    Args:
        graph: the graph, which is changed.
        names: the values that may have become unused.
        stored: name -> initializer of the graph.
    """
    read = Counter(name for node in with_bodies(graph.node) for name in node.input)
    read.update(value.name for value in (*graph.input, *graph.output))
    unread = set(names)
    for node in reversed(list(graph.node)):
        if not unread.isdisjoint(node.output) and not any(read[name] for name in node.output):
            read.subtract(node.input)
            unread.update(node.input)
            graph.node.remove(node)
    for name in unread & stored.keys():
        if not read[name]:
            graph.initializer.remove(stored[name])


def is_for_inference(node: Node) -> bool:
    """Return True if a node is in inference mode whatever the values of its inputs are.

    Every operator except BatchNormalization and Dropout counts as being in inference mode.
    """
    if is_batch_normalization(node):
        asked = any(a.name == "training_mode" and (a.i or a.ref_attr_name) for a in node.attribute)
        return len(node.output) < 2 and not asked
    return not is_dropout(node) or len(node.input) < 3 or not node.input[2]


def for_inference(node: Node, read: Collection[str] | None = None) -> list[Node]:
    """Return nodes that replace a BatchNormalization or Dropout in a model for inference.

    Args:
        node: the node; not changed.
        read: the values that are used anywhere in the model, or None for all.

    Returns:
        A copy of the node in inference mode. For each used output of running statistics, also an Identity of the input
        statistics, because inference does not change them.
    """
    copy = copied(node)
    if is_dropout(node):
        del copy.input[2:]  # the input training_mode
        return [copy]
    del copy.output[1:]
    refill(copy.attribute, [a for a in node.attribute if a.name != "training_mode"])
    after_before = zip(node.output[1:3], node.input[3:5], strict=False)
    same = [(after, before) for after, before in after_before if after and (read is None or after in read)]
    return [copy, *(make_node("Identity", [before], [after]) for after, before in same)]


def put_in_inference(model: ModelProto) -> None:
    """Put every BatchNormalization and Dropout of a model in inference mode, including bodies and functions.

    Args:
        model: its nodes are changed. A stored training_mode of Dropout that becomes unused is removed. A Dropout whose
            training_mode is a model input stays unchanged, because the caller chooses its mode.
    """
    nodes = list(all_nodes(model))
    shown = _shown(model, nodes)
    reads = Counter(name for node in nodes for name in node.input)
    switches = Counter(node.input[2] for node in nodes if is_dropout(node) and not is_for_inference(node))
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    fed = {value.name for value in model.graph.input} - stored.keys()
    for owner in (model.graph, *model.functions):
        _put(owner, reads.keys() | shown, fed if owner is model.graph else ())
    gone = switches.keys() - (reads - switches).keys() - shown
    for name in gone & stored.keys():
        model.graph.initializer.remove(stored[name])


def _shown(model: ModelProto, nodes: Iterable[Node]) -> set[str]:
    """Return the inputs and outputs of the model's graphs, including bodies, and the outputs of its functions."""
    graphs = [model.graph, *(body for node in nodes for body in subgraphs(node))]
    shown = {value.name for graph in graphs for value in (*graph.input, *graph.output)}
    return shown.union(*(function.output for function in model.functions))


def _put(owner: GraphProto | FunctionProto, read: Collection[str], fed: Collection[str]) -> None:
    def stays(node: Node) -> bool:
        return is_for_inference(node) or (is_dropout(node) and node.input[2] in fed)

    for node in owner.node:
        for body in subgraphs(node) if node.attribute else ():
            _put(body, read, fed)
    if not all(map(stays, owner.node)):
        nodes = [new for node in owner.node for new in ([node] if stays(node) else for_inference(node, read))]
        write(nodes, owner.node)
