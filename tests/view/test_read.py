"""Pictures of models that no exporter writes: they end with a picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, parser

from onnxgrad_cli.common.escape import escaped_lines
from onnxgrad_cli.view import Box, BoxKind, Cluster, Drawing, Edge, dot, draw, fold, html

EMPTY_BODIES = """
<ir_version: 8, opset_import: ["": 17]>
g (float[2] x, bool c) => (float[2] y) {
  y = If (c) <then_branch = a () => (float[2] x) {}, else_branch = b () => (float[2] x) {}>
}
"""


def drawn(model: ModelProto) -> str:
    found = draw(model)
    return html(found) + "".join(map(dot, (found, fold(found, depth=1), fold(found, limit=1))))


def test_empty_bodies() -> None:
    assert "If" in drawn(parser.parse_model(EMPTY_BODIES))


def nested(depth: int) -> ModelProto:
    """Branches inside each other, with nodes of one module in each."""
    text = "v{0} = Relu(x) w{0} = Relu(v{0})"
    inner = text.format(depth)
    for i in reversed(range(depth)):
        branch = f"g{i} () => (float[2] w{i + 1}) {{ {inner} }}"
        other = f"h{i} () => (float[2] u{i}) {{ u{i} = Relu(x) }}"
        inner = f"v{i} = Relu(x) w{i} = If (c) <then_branch = {branch}, else_branch = {other}>"
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[2] x, bool c) => (float[2] w0) {{ {inner} }}'
    )
    return model


def test_bodies_inside_each_other_fold() -> None:
    model = nested(6)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['m', '']")
    assert drawn(model)


def test_functions_that_double_are_not_followed() -> None:
    """The inference of types would take 2^30 steps."""
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = []
    for i in range(30):
        body = [helper.make_node(f"f{i + 1}", [a], [b], domain="f") for a, b in (("x", "h"), ("h", "y"))]
        functions.append(helper.make_function("f", f"f{i}", ["x"], ["y"], body, opset))
    functions.append(helper.make_function("f", "f30", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], opset))
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="f")], "g", value[:1], value[1:])
    assert "f0" in drawn(helper.make_model(graph, opset_imports=opset, functions=functions))


@pytest.mark.parametrize("op_type", ["Flatten", "Constant"])
def test_attributes_of_a_function_outside_of_one(op_type: str) -> None:
    node = helper.make_node(op_type, ["x"] if op_type == "Flatten" else [], ["y"])
    node.attribute.add(name="axis", type=AttributeProto.INT, ref_attr_name="there")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    assert "@there" in drawn(helper.make_model(helper.make_graph([node], "g", value[:1], value[1:])))


@pytest.mark.parametrize("write", [dot, html])
def test_formats_make_what_they_are_given_visible(write: Callable[[Drawing], str]) -> None:
    """Even of a drawing that nobody has read from a model, with a graph that holds nothing."""
    evil = "a\x1b[31m\u202e\u3164\nBREAK"
    boxes = tuple(Box(key, BoxKind.FORWARD, evil, (evil,), "", 1, (), 2) for key in ("n0", "n1"))
    drawing = Drawing(
        evil, Cluster("g", "", None, (Cluster("h", evil, BoxKind.FORWARD, boxes),)), (Edge("n0", "n1", (evil,)),)
    )
    text = write(drawing)
    assert "BREAK" in text and escaped_lines(text) == text
