"""Run the type and shape inference of onnx on models in which some types are unknown.

onnx crashes at a few operators if the type of their input is unknown, as for the result of a custom operator. Nodes of
these operators are moved to an unknown domain, so that onnx skips them, until the types of their inputs are inferred.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import onnx
from onnx import GraphProto, ModelProto

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.domains import ML
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import subgraphs, with_bodies

FRAGILE = {"EyeLike": "", "RegexFullMatch": "", "DictVectorizer": ML, "LabelEncoder": ML, "TreeEnsemble": ML}
"""Operator at which onnx 1.22 crashes if the type of an input is unknown -> its domain."""

HIDDEN = "onnxgrad.hidden"
"""The domain to which nodes are moved so that onnx skips them. No model uses it."""


class OutOfProportion(OnnxgradError):
    """Inference was stopped because a small model needs too much memory for it."""


def infer_shapes(
    model: ModelProto, *, check_type: bool = False, strict_mode: bool = False, data_prop: bool = False
) -> ModelProto:
    """Return the model with the types that onnx infers.

    Args:
        model: the model; it is changed during the call and restored afterwards.
        check_type, strict_mode, data_prop: see `onnx.shape_inference.infer_shapes`.

    Raises:
        onnx.shape_inference.InferenceError: the model contradicts itself and `strict_mode` is set.
        OutOfProportion: inference needs more than 1 GB, as for a vector that Concat doubles forty times.
    """

    def inferred() -> ModelProto:
        _ready_to_raise()
        with suppress(MemoryError), limited_memory(GB):
            return onnx.shape_inference.infer_shapes(model, check_type, strict_mode, data_prop)
        what = "onnx needs more than 1 GB of memory to infer the model's shapes"
        raise OutOfProportion(what, "look for an unreasonably large attribute or constant")

    hidden = [node for node in with_bodies(model.graph.node) if FRAGILE.get(node.op_type) == node.domain]
    while hidden:
        with _out_of_sight(model, hidden):
            found = inferred()
        typed = set(_typed(found.graph))
        untyped = [node for node in hidden if not typed.issuperset(filter(None, node.input))]
        if len(untyped) == len(hidden):
            return _in_sight(found)
        hidden = untyped
    return inferred()


@functools.cache
def _ready_to_raise() -> None:
    """Make onnx's library raise one error before the memory is limited.

    For its first error, the library allocates memory permanently. It would crash if there were not enough memory.
    """
    with suppress(onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
        onnx.checker.check_model(ModelProto())


@contextmanager
def _out_of_sight(model: ModelProto, nodes: Sequence[Node]) -> Iterator[None]:
    """Move nodes of a model to the domain `HIDDEN`, and back to their own domains at the end of the block."""
    model.opset_import.add(domain=HIDDEN, version=1)
    for node in nodes:
        node.domain = HIDDEN
    try:
        yield
    finally:
        _in_sight(model)


def _in_sight(model: ModelProto) -> ModelProto:
    """Move the nodes of a model that are in the domain `HIDDEN` back to their own domains, and return the model."""
    for node in with_bodies(model.graph.node):
        if node.domain == HIDDEN:
            node.domain = FRAGILE[node.op_type]
    model.opset_import.pop()
    return model


def _typed(graph: GraphProto) -> Iterator[str]:
    """Yield the names of values whose type is known, including those in bodies."""
    yield from (tensor.name for tensor in graph.initializer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.WhichOneof("value")
        if kind and (kind != "tensor_type" or value.type.tensor_type.elem_type):
            yield value.name
    for node in graph.node:
        for body in subgraphs(node):
            yield from _typed(body)
