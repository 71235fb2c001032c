"""Compute a digest that identifies the base model of a training.

The digest covers everything that influences the results of a model, except for trained tensors: nodes with their
bodies, functions, opsets, untrained tensors, and the order of inputs and outputs. Doc strings and the way in which a
tensor is stored do not influence the digest.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto as Opset,
    SparseTensorProto,
    TensorProto,
    numpy_helper,
)

from onnxgrad_cli.ir.domains import plain_domain
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import is_external

FORM = "3."
"""The prefix of a digest: the version of the digest's format. Digests of different versions can't be compared."""

Part = list[Any]
"""What the digest covers of a message of ONNX: strings, numbers, bytes, and the parts of the messages in it."""


def untrained_digest(model: ModelProto, trained: Collection[str]) -> str:
    """Return a digest of the parts of an inference model that training doesn't change.

    Args:
        model: the inference model.
        trained: the names of the tensors that the training has values for.

    Returns:
        `FORM`, then eight hexadecimal digits for nodes, names, types and shapes, then "-" and eight digits for the
        values of the untrained tensors. If any of these tensors has external data, "-" and the digits for values are
        left out, because external data may be gigabytes.
    """
    graph, left = model.graph, list[TensorProto]()
    stored = {tensor.name for tensor in graph.initializer}
    parts: Part = [_opsets(model.opset_import, graph.node)]
    for values in (graph.input, graph.output):  # old files have initializers among the inputs
        parts.append([value.name for value in values if value.name not in stored])
    parts += _parts(graph, trained, left)
    functions = sorted(model.functions, key=lambda each: (each.domain, each.name, each.overload))
    parts += [_of_function(function, left) for function in functions]
    form = _digits(repr(part).encode() for part in parts)
    return f"{FORM}{form}" if any(map(is_external, left)) else f"{FORM}{form}-{_digits(map(_numbers, left))}"


def tensor_digest(tensor: TensorProto | np.ndarray) -> str:
    """Return a digest of a tensor's element type, shape and values, as eight hexadecimal digits."""
    tensor = tensor if isinstance(tensor, TensorProto) else numpy_helper.from_array(tensor)
    return _digits([repr(_head(tensor)).encode(), _numbers(tensor)])


def is_base(said: str, model: ModelProto, trained: Collection[str]) -> bool:
    """Return False if the digest of a base model shows that a model is not this base model, otherwise True.

    The digits for the values of untrained tensors are compared only if both digests have them. Digests of different
    format versions can't be compared, so the result is True.

    Args:
        said: the digest of the base model, as `untrained_digest` returned it.
        model: the model to compare.
        trained: the names of the tensors that the training has values for.
    """
    if not said.startswith(FORM):
        return True
    before, now = (digest.partition("-") for digest in (said, untrained_digest(model, trained)))
    return before[0] == now[0] and (before[2] == now[2] or not before[2] or not now[2])


def _digits(parts: Iterable[bytes]) -> str:
    check = 0
    for part in parts:
        check = zlib.crc32(part, zlib.crc32(f"{len(part)} ".encode(), check))
    return f"{check:08x}"


def _opsets(imports: Iterable[Opset], nodes: Iterable[NodeProto]) -> list[tuple[str, int]]:
    """Return (domain, opset version) for each domain that the nodes use."""
    used = {plain_domain(node.domain) for node in with_bodies(nodes)}
    named = ((plain_domain(entry.domain), entry.version) for entry in imports)
    return sorted((domain, version) for domain, version in named if domain in used)


def _parts(graph: GraphProto, trained: Collection[str], left: list[TensorProto]) -> Iterator[Part]:
    """Yield the digest's parts for the nodes and untrained tensors of a graph.

    Args:
        graph: the graph.
        trained: the names of trained tensors.
        left: the untrained tensors are appended to this list. Their values are not in the parts.
    """
    for node in graph.node:
        if node.op_type != "Constant" or node.output[0] not in trained:
            yield _of_node(node, trained, left)
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):
        if tensor.name not in trained:
            left.append(tensor)
            yield [tensor.name, *_head(tensor)]
    for sparse in sorted(graph.sparse_initializer, key=lambda sparse: sparse.values.name):
        if sparse.values.name not in trained:
            yield [sparse.values.name, *_of_sparse(sparse, left)]


def _head(tensor: TensorProto) -> Part:
    return [tensor.data_type, list(tensor.dims)]


def _of_sparse(sparse: SparseTensorProto, left: list[TensorProto]) -> Part:
    left += (sparse.values, sparse.indices)
    return [_head(sparse.values), _head(sparse.indices), list(sparse.dims)]


def _of_node(node: NodeProto, trained: Collection[str], left: list[TensorProto]) -> Part:
    attributes = [_of_attribute(attribute, trained, left) for attribute in node.attribute]
    return [node.op_type, plain_domain(node.domain), node.overload, list(node.input), list(node.output), attributes]


def _of_attribute(attribute: AttributeProto, trained: Collection[str], left: list[TensorProto]) -> Part:
    tensors = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    sparse = [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []), *attribute.sparse_tensors]
    bodies = [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    plain = AttributeProto()
    if not tensors and not sparse and not bodies:
        plain.CopyFrom(attribute)
        plain.ClearField("doc_string")
    left += tensors
    inner = [list(map(_head, tensors)), [_of_sparse(each, left) for each in sparse]]
    inner += [[_of_body(body, trained, left) for body in bodies], plain.SerializeToString(deterministic=True)]
    return [attribute.name, attribute.type, attribute.ref_attr_name, *inner]


def _of_body(body: GraphProto, trained: Collection[str], left: list[TensorProto]) -> Part:
    names = [[value.name for value in values] for values in (body.input, body.output)]
    return [*names, *_parts(body, trained, left)]


def _of_function(function: FunctionProto, left: list[TensorProto]) -> Part:
    """Return the digest's part for a function. Functions never contain trained tensors."""
    names = [function.name, function.domain, function.overload, list(function.input), list(function.output)]
    attributes = [_of_attribute(attribute, (), left) for attribute in function.attribute_proto]
    nodes = [_of_node(node, (), left) for node in function.node]
    return [names, list(function.attribute), attributes, _opsets(function.opset_import, function.node), nodes]


def _numbers(tensor: TensorProto) -> bytes:
    """Return the values of a tensor as bytes, independently of the way they are stored."""
    if tensor.data_type == TensorProto.STRING:
        return b"".join(f"{len(text)} ".encode() + text for text in tensor.string_data)
    return numpy_helper.to_array(tensor).tobytes()
