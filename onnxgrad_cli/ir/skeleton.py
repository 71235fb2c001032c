"""Copies of a model, of all of it or without its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx
from onnx import GraphProto, ModelProto, TensorProto

from onnxgrad_cli.ir.node import Node, messages
from onnxgrad_cli.ir.types import SMALL, is_external, nbytes, tensor_type


def copied(model: ModelProto) -> ModelProto:
    """A copy of a model."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def without_initializers(model: ModelProto, names: Collection[str]) -> ModelProto:
    """A copy of a model without some of its initializers, whose values are never copied.

    Of an input that is declared without a type, because its initializer has one, the type is declared.
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
    model: ModelProto,
    nodes: Iterable[Node] | None = None,
    initializers: Mapping[str, TensorProto] | None = None,
) -> ModelProto:
    """A model without its weights: large initializers become typed inputs, small ones stay.

    Args:
        nodes, initializers: those in place of the model's own.
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
    graph.output.extend(outputs.values())  # onnx would forget the shape of what is declared twice
    graph.value_info.extend(whole.value_info)
    for name, tensor in initializers.items():
        if is_external(tensor) or nbytes(tensor) > SMALL:
            if name not in declared:
                value_type = tensor_type(tensor.data_type, list(tensor.dims))
                graph.input.append(onnx.helper.make_value_info(name, value_type))
        else:
            graph.initializer.append(tensor)
    for sparse in whole.sparse_initializer:
        value_type = tensor_type(sparse.values.data_type, list(sparse.dims))
        graph.input.append(onnx.helper.make_value_info(sparse.values.name, value_type))
    graph.node.extend(whole.node if nodes is None else messages(nodes))
    return bare


def copy_fields(source: ModelProto | GraphProto, target: ModelProto | GraphProto, but: Collection[str]) -> None:
    """Copy all fields of a message that are set, but those of these names."""
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
