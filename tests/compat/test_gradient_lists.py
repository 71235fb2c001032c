"""Gradients as lists of nodes: right where they are right, refused at registration where they are malformed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.compat.gradient_lists import gradient_definition
from onnxgrad_cli.errors import OnnxgradError, UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.verification.gradients.gradcheck import gradcheck
from tests.facts import raises, raises_as
from tests.harness import with_gradient


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with registry.scoped():
        yield


def constant(value: Any, dtype: str) -> dict[str, Any]:
    return {"value": {"value": value, "dtype": dtype, "is_tensor": True}}


def model_of(nodes: str, function: str, opset: int = 18, kind: str = "double") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {opset}, "f": 1]>
        g ({kind}[N, 3] a, {kind}[3] b) => ({kind}[N, 3] y) {{ {nodes} }}
        <domain: "f", opset_import: ["": {opset}]> {function}
    """)


POINT = {"a": np.array([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]]), "b": np.array([1.5, 2.0, -0.5])}
SLOPE = "y = f.slope(a, b)"
PRODUCT = "slope (a, b) => (y) { y = Mul(a, b) }"


@pytest.mark.parametrize("opset", [13, 18, 22])
@pytest.mark.parametrize("kind", ["float", "double"])
def test_a_definition_is_a_rule(opset: int, kind: str) -> None:
    gradient_definition("f", "slope")(
        [
            ("Mul", ["GO(0)", "I(1)"], ["GI(0)"]),
            ("Mul", ["GO(0)", "I(0)"], ["whole"]),
            ("Constant", [], ["axis"], constant([0], "int")),
            ("ReduceSum", ["whole", "axis"], ["GI(1)"], {"keepdims": {"value": 0, "dtype": "int"}}),
        ]
    )
    assert gradcheck(model_of(SLOPE, PRODUCT, opset, kind), POINT, order=2) < 1e-6


def test_what_is_broadcast_is_summed_by_itself() -> None:
    gradient_definition("f", "slope")([("Mul", ["GO(0)", "I(1)"], ["GI(0)"]), ("Mul", ["GO(0)", "I(0)"], ["GI(1)"])])
    assert gradcheck(model_of(SLOPE, PRODUCT), POINT, order=2) < 1e-6


def test_the_older_minimum_of_all() -> None:
    """As the older registry had it for a minimum: shared evenly among ties; constants in the type of an input."""
    gradient_definition("f", "least")(
        [
            ("Equal", ["I(0)", "O(0)"], ["mask"]),
            ("Constant", [], ["zero"], constant(0.0, "IElemType(0)")),
            ("Constant", [], ["one"], constant(1.0, "OElemType(0)")),
            ("Where", ["mask", "one", "zero"], ["chosen"]),
            ("ReduceSum", ["chosen"], ["count"], {"keepdims": {"value": 0, "dtype": "int"}}),
            ("Div", ["GO(0)", "count"], ["share"]),
            ("Mul", ["chosen", "share"], ["GI(0)"]),
        ]
    )
    model = model_of("y = f.least(a)", "least (a) => (y) { y = ReduceMin<keepdims = 0>(a) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.shape.SetInParent()
    run = Executor(with_gradient(model, ["a"], ["y"], "g_"))
    a = np.array([[1.0, 2.0, 1.0]])
    np.testing.assert_array_equal(run({"a": a, "b": POINT["b"], "g_y": np.array(3.0)})["g_grad_a"], [[1.5, 0, 1.5]])


def test_every_attribute_type() -> None:
    gradient_definition("f", "slope")(
        [
            ("Cast", ["I(1)"], ["b"], {"to": {"value": onnx.TensorProto.DOUBLE, "dtype": "int"}}),
            ("Shape", ["I(0)"], ["shape"]),
            ("ConstantOfShape", ["shape"], ["zero"], constant(0.0, "IElemType(0)")),
            ("LeakyRelu", ["zero"], ["none"], {"alpha": {"value": 1, "dtype": "float"}}),
            ("Add", ["none", "b"], ["factor"]),
            ("Transpose", ["factor"], ["turned"], {"perm": {"value": [1, 0], "dtype": "int"}}),
            ("Einsum", ["GO(0)", "turned"], ["GI(0)"], {"equation": {"value": "nk,kn->nk", "dtype": "string"}}),
            ("Constant", [], ["yes"], constant(True, "bool")),
            ("Mul", ["GO(0)", "I(0)"], ["product"]),
            ("Where", ["yes", "product", "product"], ["GI(1)"]),
        ]
    )
    assert gradcheck(model_of(SLOPE, PRODUCT), POINT) < 1e-6


def test_only_what_is_wanted_is_written() -> None:
    gradient_definition("f", "slope")([("Mul", ["GO(0)", "I(1)"], ["GI(0)"]), ("Sin", ["I(0)"], ["GI(1)"])])
    backward = with_gradient(model_of(SLOPE, PRODUCT), ["a"], ["y"], "g_")
    assert "Sin" not in {node.op_type for node in backward.graph.node}


def test_an_output_without_a_gradient_counts_as_zeros() -> None:
    gradient_definition("f", "two")([("Sub", ["GO(0)", "GO(1)"], ["GI(0)"])])
    function = "two (a) => (y, z) { y = Identity(a) z = Neg(a) }"
    model = model_of("y, z = f.two(a)", function)
    assert gradcheck(model, POINT, wrt=["a"]) < 1e-6
    model = model_of("k, z = f.two(a) y = Add(k, z)", function)
    model.graph.input.pop()
    assert gradcheck(model, {"a": POINT["a"]}) < 1e-6


def test_an_operator_without_schema_has_the_type_of_the_input() -> None:
    gradient_definition("", "Gelu", override=True)(
        [(("QuickGelu", "com.microsoft"), ["GO(0)"], ["GI(0)"], {"alpha": {"value": 1.5, "dtype": "float"}})]
    )
    model = model_of("y = Gelu(a)", PRODUCT, 20, "float")
    backward = with_gradient(model, ["a"], ["y"], "g_")
    assert {e.domain: e.version for e in backward.opset_import}["com.microsoft"] == 1
    feeds = {name: np.float32(x) for name, x in POINT.items()}
    g = np.float32([[1, 2, 3], [-1, -2, -3]])
    found = Executor(backward, fallback=False)({**feeds, "g_y": g})["g_grad_a"]
    np.testing.assert_allclose(found, g / (1 + np.exp(-1.5 * g)), 1e-4)


@pytest.mark.parametrize(
    "nodes, what",
    [
        ([], "it is not a list of nodes"),
        ("Mul", "it is not a list of nodes"),
        ([("Mul", ["GO(0)"])], "node 0: it is neither"),
        ([("Mul", "GO(0)", ["GI(0)"])], "not lists of names"),
        ([(("Mul",), ["GO(0)", "I(1)"], ["GI(0)"])], ("failed", "0", "Mul")),
        ([("Mul", ["GO(0)", "I(1)"], ["GI(0)"], [])], "attributes are not a dictionary"),
        ([("Mull", ["GO(0)", "I(1)"], ["GI(0)"])], "node 0 \\(Mull\\).*valid at none"),
        ([("Mul", ["GO(0)"], ["GI(0)"])], "valid at none"),
        ([("Relu", ["GO(0)"], ["GI(0)"], {"alpha": {"value": 1, "dtype": "int"}})], "valid at none"),
        ([("Mul", ["GO(0)", "slope"], ["GI(0)"])], ("failed", "0", "slope")),
        ([("Mul", ["GO(0)", "s"], ["GI(0)"]), ("Neg", ["I(0)"], ["s"])], ("failed", "0", "s")),
        (
            [("Neg", ["t"], ["s"]), ("Neg", ["s"], ["t"]), ("Neg", ["s"], ["GI(0)"])],
            ("failed", "0", "t"),
        ),
        ([("Neg", ["GO(0)"], ["GI(0)"]), ("Neg", ["I(0)"], ["GI(0)"])], ("failed", "1", "GI(0)")),
        ([("Neg", ["GO(0)"], ["GI(0)"]), ("Neg", ["GI(0)"], ["GI(1)"])], ("failed", "1", "0")),
        ([("Neg", ["GO(0)"], ["I(0)"])], "it makes I\\(0\\)"),
        ([("Neg", ["GO(x)"], ["GI(0)"])], ("failed", "0", "GO(x)")),
        ([("Neg", ["GO(0)"], ["grad"])], "makes no GI"),
        ([("Neg", ["GO(1)"], ["GI(0)"])], ("failed", "0", "1", "1")),
        ([("Neg", ["I(2)"], ["GI(0)"])], "has no input 2"),
        ([("Neg", ["GO(0)"], ["GI(2)"])], "has no input 2"),
        ([("Cast", ["GO(0)"], ["GI(0)"], {"to": 1})], ("failed", "0", "to", "value", "dtype", "is_tensor")),
        ([("Cast", ["GO(0)"], ["GI(0)"], {"to": {"value": 1, "dtype": "long"}})], ("failed", "0", "to", "long")),
        ([("Cast", ["GO(0)"], ["GI(0)"], {"to": {"value": 1.0, "dtype": "int"}})], ("failed", "0", "to", "1.0")),
        ([("Constant", [], ["GI(0)"], constant(1.0, "IElemType(2)"))], "has no input 2"),
        (
            [(("FusedMatMul", "com.microsoft"), ["GO(0)", "I(1)"], ["s"]), ("Neg", ["s"], ["GI(0)"])],
            ("failed", "0", "FusedMatMul", "FusedMatMul", "s"),
        ),
        ([(("ATen", "org.pytorch.aten"), ["GO(0)"], ["GI(0)"])], ("failed", "0", "PyTorch")),
    ],
)
def test_a_malformed_definition_is_refused(nodes: Any, what: str | tuple[str, ...]) -> None:
    with raises_as(OnnxgradError, what) as caught:
        gradient_definition("", "Mul", override=True)(nodes)
    assert caught.value.hint
    assert registry.lookup("Mul").source.startswith("onnxgrad_cli.autodiff.rules")


def test_what_is_registered_already_must_be_overridden() -> None:
    nodes = [("Neg", ["GO(0)"], ["GI(0)"])]
    with raises(OnnxgradError, "conflict", "onnxgrad_cli", "onnxgrad_cli", "gradient_lists", "gradient_definition"):
        gradient_definition("", "Neg")(nodes)
    gradient_definition("", "Neg", override=True)(nodes)
    assert registry.lookup("Neg").source.endswith("gradient_definition of Neg")


def test_the_keys_of_aten_are_refused() -> None:
    with raises(OnnxgradError, "failed", "PyTorch"):
        gradient_definition("org.pytorch.aten", "ATen", "embedding", "")
    with raises(OnnxgradError, "failed", "PyTorch"):
        gradient_definition("org.pytorch.aten", "ATen")


@pytest.mark.parametrize(
    "nodes, what",
    [
        ([("Mul", ["GO(0)", "I(1)"], ["GI(0)"])], r"does not make GI\(1\)"),
        ([("Mul", ["GO(0)", "I(2)"], ["GI(0)"]), ("Neg", ["I(1)"], ["GI(1)"])], r"reads I\(2\), which the node"),
        ([("Mul", ["GO(0)", "O(1)"], ["GI(0)"]), ("Neg", ["I(1)"], ["GI(1)"])], r"reads O\(1\), which the node"),
        ([("Neg", ["GO(0)"], ["GI(0)"]), ("Neg", ["I(1)"], ["GI(1)"]), ("Neg", ["I(1)"], ["GI(2)"])], r"makes GI\(2\)"),
        ([("Gelu", ["GO(0)"], ["GI(0)"]), ("ReduceMax", ["I(1)"], ["GI(1)"],
          {"axes": {"value": [0], "dtype": "int"}})], ("failed", "1", "ReduceMax", "13", "28")),
        ([("Transpose", ["GO(0)"], ["GI(0)"], {"perm": {"value": [0, 1, 2], "dtype": "int"}}),
          ("Neg", ["I(1)"], ["GI(1)"])], r"node 0 \(Transpose\): internal"),
        ([("Cast", ["GO(0)"], ["GI(0)"], {"to": {"value": 1, "dtype": "int"}}), ("Neg", ["I(1)"], ["GI(1)"])],
         "cotangent of type FLOAT"),
        ([("ReduceSum", ["GO(0)"], ["GI(0)"]), ("Neg", ["I(1)"], ["GI(1)"])],
         ("refused", "y", "f::slope", "1", "1", "a", "N", "3")),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_node_is_refused(nodes: Any, what: str | tuple[str, ...]) -> None:
    with raises_as(OnnxgradError, what):
        gradient_definition("f", "slope")(nodes)
        with_gradient(model_of(SLOPE, PRODUCT), ["a", "b"], ["y"], "g_")


def test_an_attribute_that_a_list_can_not_see_is_refused() -> None:
    gradient_definition("f", "slope")([("Neg", ["GO(0)"], ["GI(0)"])])
    model = model_of("y = f.slope<alpha = 2.0>(a, b)", "slope <alpha: float = 1.0> (a, b) => (y) { y = Mul(a, b) }")
    with raises(UnsupportedError, "refused", "y", "f::slope", "2.0"):
        with_gradient(model, ["a"], ["y"], "g_")


def test_the_opset_is_raised_as_far_as_the_list_needs() -> None:
    from onnxgrad_cli.builder import build

    gradient_definition("", "Erf", override=True)([("Gelu", ["GO(0)"], ["GI(0)"])])
    text = """<ir_version: 8, opset_import: ["": 15]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { h = Mul(x, w) y = Erf(h) }"""
    assert build(onnx.parser.parse_model(text)).graph.opset() == 20
