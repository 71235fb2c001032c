"""Copies of a model, with or without its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy

from onnx import GraphProto, ModelProto, TensorProto

from onnxgrad_cli.ir.node import Node, messages
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES, is_external, nbytes, tensor_type


def copied(model: ModelProto) -> ModelProto:
    """Return a deep copy of a model."""
    return deepcopy(model)


def without_initializers(model: ModelProto, names: Collection[str]) -> ModelProto:
    """Return a copy of a model without the initializers in `names`, whose values are not copied even temporarily.

    An input may be declared without a type, because its initializer has the type. If this initializer is left out, the
    copy declares the type of the input.
    """
    copy = ModelProto()
    copy_fields(model, copy, ("graph",))
    copy_fields(model.graph, copy.graph, ("initializer",))
    copy.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in names)
    untyped = {value.name: value for value in copy.graph.input if not value.type.WhichOneof("value")}
    for tensor in model.graph.initializer if untyped else ():
        if tensor.name in untyped and tensor.name in names:
            untyped[tensor.name].type.CopyFrom(tensor_type(tensor.data_type, tensor.dims))
    return copy


def skeleton(
    model: ModelProto, nodes: Iterable[Node] | None = None, initializers: Mapping[str, TensorProto] | None = None
) -> ModelProto:
    """Return a model without its weights: large initializers become typed inputs, small ones stay.

    Args:
        model: the model; not changed.
        nodes: nodes to use instead of the model's own.
        initializers: name -> initializer to use instead of the model's own.
    """
    whole = model.graph
    initializers = {t.name: t for t in whole.initializer} if initializers is None else initializers
    bare = ModelProto(ir_version=max(model.ir_version, 4), producer_name="onnxgrad")
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    graph = bare.graph
    graph.name = whole.name or "graph"
    graph.input.extend(whole.input)
    declared = {value.name for value in whole.input}
    outputs = {v.name: v for v in whole.output if v.name not in declared and v.name not in initializers}
    graph.output.extend(outputs.values())  # onnx loses the shape of a value that is declared twice
    graph.value_info.extend(whole.value_info)
    for name, tensor in initializers.items():
        if is_external(tensor) or nbytes(tensor) > MAX_SHAPE_BYTES:
            if name not in declared:
                graph.input.add(name=name, type=tensor_type(tensor.data_type, tensor.dims))
        else:
            graph.initializer.append(tensor)
    for sparse in whole.sparse_initializer:
        graph.input.add(name=sparse.values.name, type=tensor_type(sparse.values.data_type, sparse.dims))
    graph.node.extend(whole.node if nodes is None else messages(nodes))
    return bare


def copy_fields(source: ModelProto | GraphProto, target: ModelProto | GraphProto, but: Collection[str]) -> None:
    """Copy all set fields of a message to another, except the fields named in `but`."""
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
