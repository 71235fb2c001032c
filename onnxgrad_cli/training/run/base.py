"""The model that a training began with, told from others in a few digits.

All counts that makes a model compute otherwise: its nodes, with the bodies in them and the functions that they call,
their opsets, the tensors that were not trained, and which input and output is which. What a reader alone sees does not
count, nor does how a tensor is stored.
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
"""What a digest begins with. One that begins otherwise counts other things, and says nothing of this one."""


def untrained_digest(model: ModelProto, trained: Collection[str]) -> str:
    """What tells inference models apart by what a training left as it is.

    Args:
        model: the inference model.
        trained: the names of what the training has values for.

    Returns:
        The form; eight digits of nodes, names, types and shapes; and "-" with eight of the tensors' numbers, unless
        some lie in another file: these may be of gigabytes.
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
    """Return eight digits that tell tensors apart by element type, sizes and numbers."""
    tensor = tensor if isinstance(tensor, TensorProto) else numpy_helper.from_array(tensor)
    return _digits([_head(tensor).SerializeToString(deterministic=True), _numbers(tensor)])


def is_base(said: str, model: ModelProto, trained: Collection[str]) -> bool:
    """Whether a model may be the one of which `untrained_digest` has said this: numbers count where both have them.

    Of a digest in another form it is not known, and so it may be.
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
    """The opsets of the operators that nodes are of."""
    used = {plain_domain(node.domain) for node in with_bodies(nodes)}
    named = ((plain_domain(entry.domain), entry.version) for entry in imports)
    return sorted((domain, version) for domain, version in named if domain in used)


def _parts(
    graph: GraphProto, trained: Collection[str], left: list[TensorProto]
) -> Iterator[NodeProto | TensorProto | SparseTensorProto]:
    """The nodes and tensors of a graph as they count, but those that were trained; the tensors are added to `left`."""
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
    """A tensor without its numbers, and without what is said of it besides."""
    return TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims)


def _of_sparse(sparse: SparseTensorProto, left: list[TensorProto], name: str = "") -> SparseTensorProto:
    left += (sparse.values, sparse.indices)
    return SparseTensorProto(values=_head(sparse.values, name), indices=_head(sparse.indices), dims=sparse.dims)


def _of_node(node: NodeProto, trained: Collection[str], left: list[TensorProto]) -> NodeProto:
    """A node as it counts, without the numbers of tensors, which are added to `left`."""
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
    """A function as it counts. Its names are its own: nothing in it was trained."""
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
    """What a tensor holds, however it is stored."""
    if tensor.data_type == TensorProto.STRING:
        return b"".join(f"{len(text)} ".encode() + text for text in tensor.string_data)
    return numpy_helper.to_array(tensor).tobytes()
