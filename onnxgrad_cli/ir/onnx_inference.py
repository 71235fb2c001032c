"""onnx's inference of types and shapes, of models in which some types are unknown.

Of a few operators it ends the process where the type of their input is unknown, as behind an operator that onnx does
not know. They are hidden from it until it has found that type without them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import onnx
from onnx import GraphProto, ModelProto

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.nodes import subgraphs, with_bodies

ML = "ai.onnx.ml"
FRAGILE = {"EyeLike": "", "RegexFullMatch": "", "DictVectorizer": ML, "LabelEncoder": ML, "TreeEnsemble": ML}
"""The operators that need a typed input, as of onnx 1.22 -> their domains."""

HIDDEN = "onnxgrad.hidden"
"""The domain of operators that nobody knows."""


class OutOfProportion(OnnxgradError):
    """What a model of few bytes asks for fills the memory."""


def infer_shapes(
    model: ModelProto, *, check_type: bool = False, strict_mode: bool = False, data_prop: bool = False
) -> ModelProto:
    """The model with the types that onnx infers.

    Args:
        model: the model; it is as it was when this returns.
        check_type, strict_mode, data_prop: see `onnx.shape_inference.infer_shapes`.

    Raises:
        onnx.shape_inference.InferenceError: the model contradicts itself, where `strict_mode` asks for that.
        OutOfProportion: it asks for more than 1 GB, as a vector that Concat doubles forty times.
    """

    def inferred() -> ModelProto:
        _ready_to_raise()
        with suppress(MemoryError), limited_memory(GB):
            return onnx.shape_inference.infer_shapes(model, check_type, strict_mode, data_prop)
        what = "onnx takes more than 1 GB to infer the model's shapes"
        raise OutOfProportion(what, "look for an attribute or a constant out of all proportion")

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
    """Let onnx's library raise once: it takes memory for that, for good, and ends the process where none is left."""
    with suppress(onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
        onnx.checker.check_model(ModelProto())


@contextmanager
def _out_of_sight(model: ModelProto, nodes: Sequence[Node]) -> Iterator[None]:
    """Let some nodes of a model be of a domain that nobody knows."""
    model.opset_import.add(domain=HIDDEN, version=1)
    for node in nodes:
        node.domain = HIDDEN
    try:
        yield
    finally:
        _in_sight(model)


def _in_sight(model: ModelProto) -> ModelProto:
    """A model whose hidden nodes are of their domains again."""
    for node in with_bodies(model.graph.node):
        if node.domain == HIDDEN:
            node.domain = FRAGILE[node.op_type]
    model.opset_import.pop()
    return model


def _typed(graph: GraphProto) -> Iterator[str]:
    """The values, those of bodies too, of which the type is known."""
    yield from (tensor.name for tensor in graph.initializer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.WhichOneof("value")
        if kind and (kind != "tensor_type" or value.type.tensor_type.elem_type):
            yield value.name
    for node in graph.node:
        for body in subgraphs(node):
            yield from _typed(body)
