"""The way back: the inference model as it was, its graph, opset and names, with the values that training has found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE, give_own_statistics, is_batch_normalization, own_statistics
from onnxgrad_cli.ir.nodes import subgraphs
from onnxgrad_cli.ir.skeleton import copied


def with_weights(model: ModelProto, weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> ModelProto:
    """A copy of an inference model with other values for its initializers and constants.

    Exporters write equal tensors once and the others as Identity of it, or as it; such a node becomes an initializer
    where training has made it another, and a running statistic that is shared no more gets a name of its own.

    Args:
        model: the model; not changed.
        weights: the new values, by name.
        others: more values, of which those are written that the model has (running statistics).

    Raises:
        OnnxgradError: the model has no such weight, or one of another shape or type.
    """
    copy = copied(model)
    made = {name for node in model.graph.node for name in node.output}
    missing = {**{name: array for name, array in others.items() if name in made}, **weights}
    values = {**others, **weights}
    _store_copies(copy, values)
    give_own_statistics(copy, values)
    for tensor, name in stored_tensors(copy.graph):
        if name in values:
            _replace(tensor, name, values[name])
            missing.pop(name, None)
    if missing:
        raise OnnxgradError(
            f"the model has no weight '{next(iter(missing))}' to write the trained one to",
            "it stands in a function, or this is another model than the one that was trained",
        )
    return copy


def check_stored(model: ModelProto, names: Iterable[str]) -> None:
    """Make sure that `with_weights` can write values of these names.

    Raises:
        UsageError: the model has no such tensor of that name.
    """
    stored = writable(model)
    for name in names:
        if name not in stored:
            raise UsageError(
                f"'{name}' can't be written back: the model has no tensor that is called so alone, as it stands in a "
                "function, in bodies under one name, or as a list of floats",
                f"leave it as it is with `freeze` '{name}', or let onnx.inliner.inline_local_functions bring functions "
                "into the graph first",
            )


def writable(model: ModelProto) -> set[str]:
    """The names of the values that `with_weights` can write."""
    stored = {name for _, name in stored_tensors(model.graph)}
    stored |= {node.output[0] for node in model.graph.node if node.op_type == "Identity"}
    layers = filter(is_batch_normalization, model.graph.node)
    return stored | {name for node in layers for name in own_statistics(node).values()}


def _store_copies(model: ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Make initializers of the copies that training has made another, and of running statistics that it left alone.

    A running variance that is a copy of a scale, both being ones in a fresh layer, does not follow the scale.
    """
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    statistics = {name for node in graph.node if is_batch_normalization(node) for name in node.input[3:5]}
    nodes = GraphProto(node=graph.node).node
    del graph.node[:]
    for node in nodes:
        name = node.output[0] if node.op_type == "Identity" else ""
        if name in values:
            _add(model, numpy_helper.from_array(values[name]), name)
        elif name in statistics and node.input[0] in values and node.input[0] in stored:
            _add(model, stored[node.input[0]], name)
        else:
            graph.node.append(node)


def _add(model: ModelProto, tensor: TensorProto, name: str) -> None:
    """Add a copy of a tensor as an initializer called `name`, which in old files is an input too."""
    copy = model.graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = name
    if model.ir_version < INITIALIZERS_ALONE:
        model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))


def read_stored(model: ModelProto, names: Collection[str], path: Path | None) -> dict[str, np.ndarray]:
    """The values of those of `names` that a model stores, in initializers or constants.

    Args:
        model: the model; not changed. Of external data only these tensors are read.
        names: of values.
        path: where the model was read from; external data are relative to it.
    """
    taken = ModelProto()
    for tensor, name in stored_tensors(model.graph):
        if name in names:
            taken.graph.initializer.add().CopyFrom(tensor)
            taken.graph.initializer[-1].name = name
    load_external_data(taken, path)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in taken.graph.initializer}


def stored_tensors(graph: GraphProto) -> Iterator[tuple[TensorProto, str]]:
    """The tensors that a graph and the bodies in it hold, with the names of the values they are."""
    yield from ((tensor, tensor.name) for tensor in graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield attribute.t, node.output[0]
        for body in subgraphs(node):
            yield from stored_tensors(body)


def _replace(tensor: TensorProto, name: str, array: np.ndarray) -> None:
    wanted = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if array.dtype != wanted or list(array.shape) != list(tensor.dims):
        raise OnnxgradError(
            f"'{name}' is {wanted}{list(tensor.dims)} in the model, {array.dtype}{list(array.shape)} as it was trained",
            "this is another model than the one that was trained",
        )
    own = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, own))
