"""Types that follow from an operator where onnx infers none."""

from __future__ import annotations

import pytest
from onnx import parser

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import shape_of


@pytest.mark.parametrize("opset", [9, 10, 11])
@pytest.mark.parametrize(("axis", "shape"), [("<axis = 0>", ("?", 4)), ("<axis = -1>", (3, "?")), ("", ("?",))])
def test_compress_keeps_an_unknown_number(opset: int, axis: str, shape: tuple[int | str, ...]) -> None:
    graph = Graph(
        parser.parse_model(f"""
        <ir_version: 5, opset_import: ["": {opset}]>
        net (float[3, 4] x, bool[2] c) => (float[] y) {{ z = Compress{axis}(x, c) y = Relu(z) }}""")
    )
    infer_types(graph)
    found = shape_of(graph.types["z"])
    assert found is not None
    assert tuple(size if isinstance(size, int) else "?" for size in found) == shape
