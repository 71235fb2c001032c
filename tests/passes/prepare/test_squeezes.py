"""A Squeeze without axes keeps the batch, and only where the file does not say that it removes a named axis."""

from __future__ import annotations

import onnx
import pytest

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.passes.prepare.declarations import set_hints_aside
from onnxgrad_cli.passes.prepare.safe_forms import give_axes
from onnxgrad_cli.record import Training


def squeezed(inputs: str, declared: str) -> tuple[bool, list[list[int]], list[str]]:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => (float y)
        <{declared}> {{ t = Identity (x) s = Squeeze (t) y = ReduceSum <keepdims = 0> (s) }}""")
    graph, training = Graph(model), Training()
    infer_types(graph)
    changed = give_axes(graph, training)
    node = next((node for node in graph.nodes if node.op_type == "Squeeze"), None)
    axes = [list(graph.constant(name)) for name in node.input[1:]] if node is not None else []
    return changed, axes, [caution.subject for caution in training.cautions]


@pytest.mark.parametrize(
    ("inputs", "declared", "axes"),
    [
        ("float[batch, 1, 4] x", "", [[1]]),
        ("float[batch, 1, length] x", "float[batch, length] s", [[1]]),
        ("float[2, batch] z, float[batch, 1, 4] x", "float[batch, 4] s", [[1]]),
    ],
)
def test_the_batch_is_kept(inputs: str, declared: str, axes: list[list[int]]) -> None:
    assert squeezed(inputs, declared) == (True, axes, ["s"])


@pytest.mark.parametrize(
    ("inputs", "declared"),
    [
        ("float[a, b, c] x", "float[a, b] s"),  # c was 1 when the file was written
        ("float[batch, 1, length] x", ""),  # so may the length be
        ("float[4, n] x", ""),
        ("float[2, 1] x", ""),
    ],
)
def test_what_may_remove_a_named_axis_stays(inputs: str, declared: str) -> None:
    assert squeezed(inputs, declared) == (False, [], [])


@pytest.mark.parametrize(("output", "changed"), [("float[n] y", False), ("float[n, 4] y", True)])
def test_the_declared_rank_of_an_output_behind_counts(output: str, changed: bool) -> None:
    """A model of batches of 1 alone squeezes the batch away, and declares so."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g (float[batch, 1, 4] x) => ({output})
        {{ t = Identity (x) s = Squeeze (t) u = Sigmoid (s) y = Concat <axis = 0> (u, u) }}""")
    graph = Graph(model)
    set_hints_aside(graph)
    infer_types(graph)
    assert give_axes(graph, Training()) == changed
