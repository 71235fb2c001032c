"""Outputs in types that numpy lacks, read as numbers: floats of few bits as float32, integers of few bits as bytes.

onnxruntime gives none of them, or worse, the bits of a float8 as if they were its value. A Cast in the model is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.skeleton import copied

if TYPE_CHECKING:
    import onnxruntime

FEW_BITS = {"int4": TensorProto.INT8, "int2": TensorProto.INT8, "uint4": TensorProto.UINT8, "uint2": TensorProto.UINT8}

SHORT_FLOATS = ("bfloat16", "float8", "float4")


def unreadable(session: onnxruntime.InferenceSession, outputs: Sequence[str]) -> dict[str, int]:
    """Output -> the type to read it as, of those that are tensors of a type that numpy lacks."""
    kinds = {value.name: value.type.removeprefix("tensor(").removesuffix(")") for value in session.get_outputs()}
    lacking = [name for name in outputs if kinds[name] in FEW_BITS or kinds[name].startswith(SHORT_FLOATS)]
    return {name: FEW_BITS.get(kinds[name], TensorProto.FLOAT) for name in lacking}


def with_readable(model: ModelProto, types: Mapping[str, int]) -> tuple[ModelProto, dict[str, str]]:
    """A copy of a model that gives some of its outputs in another type too, and what these are called there."""
    found, called = copied(model), dict[str, str]()
    graph = found.graph
    taken = {name for node in with_bodies(graph.node) for name in (*node.input, *node.output)}
    taken.update(each.name for each in (*graph.input, *graph.output, *graph.initializer))
    for name, to in types.items():
        called[name] = name + "_read"
        while called[name] in taken:
            called[name] += "_"
        taken.add(called[name])
        graph.node.append(helper.make_node("Cast", [name], [called[name]], to=to))
        graph.output.append(helper.make_tensor_value_info(called[name], to, None))
    return found, called
