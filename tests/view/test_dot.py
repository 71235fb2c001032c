"""DOT is read again by a parser, whatever the names in a model are."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import ModelProto, helper

from onnxgrad_cli.view import Box, BoxKind, Cluster, Drawing, Edge, dot, draw, fold, html
from tests.cli_harness import MLP, UNKNOWN_OPS
from tests.pictures import dot_text, read_dot
from tests.view.test_drawing import BODIES, SAMPLES, WEIRD, Page, check_formats, model, says, trained


@pytest.fixture(scope="module")
def models() -> dict[str, ModelProto]:
    """Every sample, training models of some, a model with bodies, one with operators that nobody knows."""
    found = {path.stem: onnx.load(path) for path in SAMPLES}
    for name in ("linear_regression", "digits_cnn", "tiny_transformer"):
        found[f"{name} training"] = trained(name)
    return {**found, "bodies": model(BODIES), "unknown": model(UNKNOWN_OPS), "mlp": model(MLP)}


def test_every_model_in_every_format(models: dict[str, ModelProto]) -> None:
    for proto in models.values():
        whole = draw(proto)
        check_formats(whole)
        check_formats(fold(whole, 20))


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(NAMES, NAMES, NAMES, NAMES)
def test_any_text_is_escaped(title: str, line: str, name: str, value: str) -> None:
    from onnxgrad_cli.view.drawing import short

    box = Box("n1", BoxKind.FORWARD, short(title), (short(line),), line, 1, makes=2)
    other = Box("v2", BoxKind.OUTPUT, short(value))
    group = Cluster("g3", short(name), BoxKind.BACKWARD, (box,))
    drawing = Drawing(name, Cluster("model", "", None, (group, other), container=True), (Edge("n1", "v2", (value,)),))
    nodes, _ = read_dot(dot(drawing))
    assert dot_text(nodes["n1"]["label"]) == says(box)
    assert Page(html(drawing)).seen.count("title") >= 1


def test_weird_names() -> None:
    nodes, last = [], "in"
    for i, name in enumerate(WEIRD):
        nodes.append(helper.make_node("Relu", [last], [name], name=f"{name}/{i}"))
        last = name
    values = [helper.make_tensor_value_info(name, 1, ['n"<']) for name in ("in", last)]
    graph = helper.make_graph(nodes, 'gr"aph\n<b>\\', values[:1], values[1:])
    drawing = draw(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    check_formats(drawing)
