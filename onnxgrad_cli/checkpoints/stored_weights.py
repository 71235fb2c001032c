"""Write trained values into the inference model. Its graph, opset and names stay the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.errors import OnnxgradError, conflict
from onnxgrad_cli.files import load_external_data
from onnxgrad_cli.ir.modes import INITIALIZERS_ALONE, give_own_statistics, is_batch_normalization, own_statistics
from onnxgrad_cli.ir.node_values import subgraphs
from onnxgrad_cli.ir.weightless_copy import copied


def with_weights(model: ModelProto, weights: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a copy of an inference model with new values for its initializers and constants.

    Exporters store equal tensors once. The copies are outputs of Identity nodes, or the same tensor is used several
    times. If training has changed a copy, its Identity node is replaced by an initializer. If a running statistic is no
    longer equal to a tensor that it shared, it gets an initializer of its own.

    Args:
        model: the model; not changed.
        weights: the new values, by name.
        others: name -> further values, such as running statistics. Names that the model doesn't have are ignored.

    Raises:
        OnnxgradError: the model lacks a weight in `weights`, or has it with a different shape or type.
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
        hint = "use the model that was trained; the weight must not be in a function"
        message = f"the model has no weight '{next(iter(missing))}' for the trained values"
        raise OnnxgradError(message, hint, code="mismatch")
    return copy


def check_stored(model: ModelProto, names: Iterable[str]) -> None:
    """Check that `with_weights` can write values with these names.

    Raises:
        UsageError: the model has no tensor with such a name that can be written.
    """
    stored = writable(model)
    for name in names:
        if name not in stored:
            raise conflict(
                f"'{name}' can't be written back: it is in a function, in several bodies under the same name, or "
                "stored as a list of floats",
                f"freeze it with `freeze` '{name}', or inline functions with onnx.inliner.inline_local_functions first",
            )


def writable(model: ModelProto) -> set[str]:
    """Return the names of the values that `with_weights` can write."""
    stored = {name for _, name in stored_tensors(model.graph)}
    stored |= {node.output[0] for node in model.graph.node if node.op_type == "Identity"}
    layers = filter(is_batch_normalization, model.graph.node)
    return stored | {name for node in layers for name in own_statistics(node).values()}


def _store_copies(model: ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Replace an Identity node by an initializer if training has changed the original or its copy, the node's output.

    A copy in `values` gets its trained value. A running statistic that is a copy of a trained tensor keeps the stored
    value. For example, in a fresh layer the running variance and the scale are both ones, so one may be exported as a
    copy of the other. But the variance must not change when the scale is trained.

    Args:
        model: the model, which is changed.
        values: the new values, by name.
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
    """Add a copy of a tensor as an initializer called `name`. In old IR versions, also declare it as an input."""
    copy = model.graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = name
    if model.ir_version < INITIALIZERS_ALONE:
        model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))


def read_stored(model: ModelProto, names: Collection[str], path: Path | None) -> dict[str, np.ndarray]:
    """Read tensors of a model that are initializers or constants. Names that the model doesn't have are left out.

    Args:
        model: the model; not changed. External data of other tensors are not read.
        names: the names of the tensors.
        path: the file that the model was read from; external data are relative to it.
    """
    taken = ModelProto()
    for tensor, name in stored_tensors(model.graph):
        if name in names:
            taken.graph.initializer.add().CopyFrom(tensor)
            taken.graph.initializer[-1].name = name
    load_external_data(taken, path)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in taken.graph.initializer}


def stored_tensors(graph: GraphProto) -> Iterator[tuple[TensorProto, str]]:
    """Yield pairs (tensor, name of the value) for the initializers and constants of a graph and its bodies."""
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
        message = f"'{name}' is {wanted}{list(tensor.dims)} in the model, "
        message += f"but was trained as {array.dtype}{list(array.shape)}"
        raise OnnxgradError(message, "use the model that was trained", code="mismatch")
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
