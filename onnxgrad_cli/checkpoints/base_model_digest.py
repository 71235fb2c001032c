"""Compute a digest that identifies the base model of a training.

The digest covers everything that influences the results of a model, except for trained tensors: nodes with their
bodies, functions, opsets, untrained tensors, and the order of inputs and outputs. Doc strings and the way in which a
tensor is stored do not influence the digest.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator

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
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.types import is_external

FORM = "2."
"""The prefix of a digest: the version of the digest's format. Digests of different versions can't be compared."""


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
    parts = [f"{_opsets(model.opset_import, graph.node)}".encode()]
    for values in (graph.input, graph.output):  # old files have initializers among the inputs
        parts.append(f"{[value.name for value in values if value.name not in stored]}".encode())
    parts += [part.SerializeToString(deterministic=True) for part in _parts(graph, trained, left)]
    functions = sorted(model.functions, key=lambda each: (each.domain, each.name, each.overload))
    parts += [_of_function(function, left).SerializeToString(deterministic=True) for function in functions]
    form = _digits(parts)
    return f"{FORM}{form}" if any(map(is_external, left)) else f"{FORM}{form}-{_digits(map(_numbers, left))}"


def tensor_digest(tensor: TensorProto | np.ndarray) -> str:
    """Return a digest of a tensor's element type, shape and values, as eight hexadecimal digits."""
    tensor = tensor if isinstance(tensor, TensorProto) else numpy_helper.from_array(tensor)
    return _digits([_head(tensor).SerializeToString(deterministic=True), _numbers(tensor)])


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


def _parts(
    graph: GraphProto, trained: Collection[str], left: list[TensorProto]
) -> Iterator[NodeProto | TensorProto | SparseTensorProto]:
    """Yield copies of the nodes and untrained tensors of a graph, with only the parts that the digest covers.

    Args:
        graph: the graph.
        trained: the names of trained tensors.
        left: the untrained tensors are appended to this list, with their values, which the copies lack.
    """
    for node in graph.node:
        if node.op_type != "Constant" or node.output[0] not in trained:
            yield _of_node(node, trained, left)
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):
        if tensor.name not in trained:
            left.append(tensor)
            yield _head(tensor, tensor.name)
    for sparse in sorted(graph.sparse_initializer, key=lambda sparse: sparse.values.name):
        if sparse.values.name not in trained:
            yield _of_sparse(sparse, left, sparse.values.name)


def _head(tensor: TensorProto, name: str = "") -> TensorProto:
    """Return a tensor without values, with the name `name` and the element type and shape of `tensor`."""
    return TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)


def _of_sparse(sparse: SparseTensorProto, left: list[TensorProto], name: str = "") -> SparseTensorProto:
    left += (sparse.values, sparse.indices)
    return SparseTensorProto(values=_head(sparse.values, name), indices=_head(sparse.indices), dims=sparse.dims)


def _of_node(node: NodeProto, trained: Collection[str], left: list[TensorProto]) -> NodeProto:
    """Return a copy of a node, with only the parts that the digest covers.

    Append its tensors, whose values are left out, to `left`.
    """
    found = NodeProto(op_type=node.op_type, domain=plain_domain(node.domain), overload=node.overload)
    found.input.extend(node.input)
    found.output.extend(node.output)
    found.attribute.extend(_of_attribute(attribute, trained, left) for attribute in node.attribute)
    return found


def _of_attribute(attribute: AttributeProto, trained: Collection[str], left: list[TensorProto]) -> AttributeProto:
    tensors = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
    sparse = [*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []), *attribute.sparse_tensors]
    bodies = [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    found = AttributeProto(name=attribute.name, type=attribute.type, ref_attr_name=attribute.ref_attr_name)
    if not tensors and not sparse and not bodies:
        found.CopyFrom(attribute)
        found.ClearField("doc_string")
    left += tensors
    found.tensors.extend(map(_head, tensors))
    found.sparse_tensors.extend(_of_sparse(each, left) for each in sparse)
    found.graphs.extend(_of_body(body, trained, left) for body in bodies)
    return found


def _of_body(body: GraphProto, trained: Collection[str], left: list[TensorProto]) -> GraphProto:
    found = GraphProto()
    for value in body.input:
        found.input.add(name=value.name)
    for value in body.output:
        found.output.add(name=value.name)
    for part in _parts(body, trained, left):
        kind = {NodeProto: found.node, TensorProto: found.initializer, SparseTensorProto: found.sparse_initializer}
        kind[type(part)].append(part)
    return found


def _of_function(function: FunctionProto, left: list[TensorProto]) -> FunctionProto:
    """Return a copy of a function, with only the parts that the digest covers.

    Functions never contain trained tensors.
    """
    found = FunctionProto(name=function.name, domain=function.domain, overload=function.overload)
    found.input.extend(function.input)
    found.output.extend(function.output)
    found.attribute.extend(function.attribute)
    found.attribute_proto.extend(_of_attribute(attribute, (), left) for attribute in function.attribute_proto)
    for domain, version in _opsets(function.opset_import, function.node):
        found.opset_import.add(domain=domain, version=version)
    found.node.extend(_of_node(node, (), left) for node in function.node)
    return found


def _numbers(tensor: TensorProto) -> bytes:
    """Return the values of a tensor as bytes, independently of the way they are stored."""
    if tensor.data_type == TensorProto.STRING:
        return b"".join(f"{len(text)} ".encode() + text for text in tensor.string_data)
    return numpy_helper.to_array(tensor).tobytes()
