"""Types as they are told to a reader."""

from __future__ import annotations

import pytest
from onnx import TensorProto, TypeProto, helper

from onnxgrad_cli.ir.types import in_words

FLOAT = helper.make_tensor_type_proto(TensorProto.FLOAT, ["batch", None, 10])


@pytest.mark.parametrize(
    ("value_type", "words"),
    [
        (FLOAT, "float[batch, ?, 10]"),
        (helper.make_tensor_type_proto(TensorProto.BFLOAT16, None), "bfloat16[...]"),
        (helper.make_sequence_type_proto(FLOAT), "sequence of float[batch, ?, 10]"),
        (TypeProto(map_type=TypeProto.Map()), "map"),
        (TypeProto(), ""),
        (None, ""),
        (TypeProto(tensor_type=TypeProto.Tensor(elem_type=2**31 - 1)), "element type 2147483647[...]"),
    ],
)
def test_a_type_in_words(value_type: TypeProto | None, words: str) -> None:
    """A file may declare an element type that nobody knows."""
    assert in_words(value_type) == words
