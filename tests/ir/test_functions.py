"""The number of nodes that inlining makes, against onnx's own inliner, and functions that are refused."""

from __future__ import annotations

import onnx
import pytest
from onnx import inliner, parser

from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir import functions
from onnxgrad_cli.ir.functions import check_growth
from onnxgrad_cli.ir.graph import Graph

HEAD = """
<ir_version: 10, opset_import: ["" : 18, "f" : 1]>
g (float[n] x) => (float[n] y) { y = f.f0(x) }
"""


def chain(calls: list[int]) -> onnx.ModelProto:
    """A model whose function i calls the function i + 1 a number of times."""
    text = HEAD
    for i, count in enumerate(calls):
        last = i == len(calls) - 1
        nodes = "".join(f"v{k + 1} = {'Neg' if last else f'f.f{i + 1}'}(v{k}) " for k in range(count))
        text += f'<domain: "f", opset_import: ["" : 18, "f" : 1]> f{i} (v0) => (v{count}) {{ {nodes} }}\n'
    return parser.parse_model(text)


def check(model: onnx.ModelProto) -> None:
    check_growth(model.functions, Graph(model).nodes)


@pytest.mark.parametrize("calls", [[1], [3], [2, 3], [2, 2, 5], [4, 1, 2]])
def test_as_many_nodes_as_onnx_inlines(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(calls)
    nodes = len(inliner.inline_local_functions(model).graph.node)
    monkeypatch.setattr(functions, "GROWTH", 0)
    monkeypatch.setattr(functions, "MOST_NODES", nodes)
    check(model)
    monkeypatch.setattr(functions, "MOST_NODES", nodes - 1)
    with pytest.raises(OnnxgradError) as caught:
        check(model)
    assert "'f::f0'" in caught.value.message and f"{nodes:,}" in caught.value.message


def test_large_files_may_grow_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain([5, 5])  # 11 stored nodes become 25
    monkeypatch.setattr(functions, "MOST_NODES", 1)
    monkeypatch.setattr(functions, "GROWTH", 3)
    check(model)
    monkeypatch.setattr(functions, "GROWTH", 2)
    with pytest.raises(OnnxgradError):
        check(model)


def test_calls_that_are_nested_too_deep() -> None:
    check(chain([1] * functions.DEEPEST))
    with pytest.raises(OnnxgradError):
        check(chain([1] * (functions.DEEPEST + 2)))
