"""The role of an initializer follows from every place it is read at: settings, scales, frequencies, identities."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import SMALL
from onnxgrad_cli.passes.parameters.constants import ConstantRoles

INITIALIZERS = "float s = {0.5}, float[1] b = {0.5}, float[1, 1] square = {2}, float[2] w = {1, 2}, float[2] f = {1, 2}"


def roles(nodes: str) -> ConstantRoles:
    """The roles in a model of an input x and these nodes."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 1] x, bool c) => (float y) <{INITIALIZERS}> {{ {nodes} }}
    """
    return ConstantRoles(Graph(onnx.parser.parse_model(text)))


def named(reason: str) -> str:
    return f"{reason} (name it with `train` to train it)"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("y = Sub(s, x)", named("a scalar constant of Sub")),
        ("y = MatMul(x, s)", named("a scalar constant of MatMul")),
        ("y = Clip(x, s)", "bound of a Clip"),
        ("y = PRelu(x, s)", ""),
        ("p = PRelu(x, s) y = Mul(p, s)", ""),
        ("p = Mul(x, s) y = Div(p, s)", named("a scalar constant of Mul")),
        ("y = Mul(x, x)", ""),
    ],
)
def test_a_scalar_is_a_constant_wherever_it_is_read_but_as_a_slope(nodes: str, reason: str) -> None:
    assert roles(nodes).reason("s") == reason


@pytest.mark.parametrize(
    "product", ["MatMul(x, square)", "Gemm(x, square)", "Einsum<equation = 'ij,jk->ik'>(x, square)"]
)
@pytest.mark.parametrize("reader", ["Add(h, b)", "Add(b, h)", "Sub(h, b)", "Sub(b, h)"])
def test_one_element_added_to_a_product_is_its_bias(product: str, reader: str) -> None:
    nodes = f"h = {product} y = {reader}".replace("'", '"')
    assert roles(nodes).reason("b") == ""


@pytest.mark.parametrize(
    ("nodes", "op_type"),
    [
        ("h = MatMul(x, square) y = Mul(h, b)", "Mul"),
        ("h = MatMul(x, square) y = Max(h, b)", "Max"),
        ("h = Relu(x) y = Add(h, b)", "Add"),
        ("y = Sub(b, x)", "Sub"),
    ],
)
def test_one_element_is_a_constant_elsewhere(nodes: str, op_type: str) -> None:
    assert roles(nodes).reason("b") == named(f"a one-element constant of {op_type}")


def test_one_element_of_an_operator_that_is_no_factor_is_a_weight() -> None:
    assert roles("y = PRelu(x, b)").reason("b") == ""
    assert roles("h = MatMul(x, square) y = Add(h, w)").reason("w") == ""


@pytest.mark.parametrize(
    ("nodes", "table"),
    [
        ("p = Mul(x, f) y = Sin(p)", True),
        ("p = Div(x, f) y = Cos(p)", True),
        ("p = Mul(x, f) r = Relu(p) y = Sin(p)", True),
        ("p = Mul(x, f) t = Transpose(p) r = Relu(t) y = Sin(p)", True),
        ("p = Add(x, f) y = Sin(p)", False),
        ("p = Mul(x, f) y = Tan(p)", False),
        ("y = Mul(x, f)", False),
    ],
)
def test_frequencies(nodes: str, table: bool) -> None:
    reason = named("a table of frequencies before Sin or Cos")
    assert roles(nodes).reason("f") == (reason if table else "")


@pytest.mark.parametrize(
    ("branch", "reason"),
    [
        ("a = Clip(x, s)", "bound of a Clip"),
        ("m = Mul(x, x) a = Clip(m, x, s)", "bound of a Clip"),
        ("m = Mul(x, s) a = PRelu(m, s)", ""),
        ("a = If(c) <then_branch = i () => (float d) { d = Clip(x, s) }, "
         "else_branch = j () => (float d) { d = Neg(x) }>", "bound of a Clip"),
    ],
)  # fmt: skip
def test_what_a_branch_captures_has_the_role_that_it_plays_there(branch: str, reason: str) -> None:
    nodes = f"""
    y = If(c) <then_branch = t () => (float a) {{ {branch} }}, else_branch = e () => (float a) {{ a = Neg(x) }}>
    """
    assert roles(nodes).reason("s") == reason


def normalization(name: str, value: np.ndarray, position: int) -> str:
    """The reason of the scale (at 1) or shift (at 2) of an InstanceNormalization."""
    operands = ["x", "scale", "shift"]
    operands[position] = name
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[1, n, 4] x, float[n] scale, float[n] shift) => (float[1, n, 4] y)
    {{ y = InstanceNormalization({", ".join(operands)}) }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    return ConstantRoles(Graph(model)).reason(name)


IDENTITY = "the identity scale or shift of an InstanceNormalization without parameters"


@pytest.mark.parametrize(
    ("name", "value", "position", "reason"),
    [
        ("val_1", np.ones(3, np.float32), 1, IDENTITY),
        ("val_2", np.zeros(3, np.float32), 2, IDENTITY),
        ("block_Constant_4_output_0", np.ones(3, np.float32), 1, IDENTITY),
        ("val_1", np.zeros(3, np.float32), 1, ""),
        ("val_2", np.ones(3, np.float32), 2, ""),
        ("val_1", np.float32([1, 1, 0.5]), 1, ""),
        ("weight", np.ones(3, np.float32), 1, ""),
        ("val_1", np.ones(16 * SMALL, np.float32), 1, IDENTITY),
        ("val_1", np.ones(16 * SMALL + 1, np.float32), 1, ""),  # too large to be read for this
    ],
)
def test_an_exporter_writes_the_identity_of_a_normalization_without_parameters(
    name: str, value: np.ndarray, position: int, reason: str
) -> None:
    assert normalization(name, value, position) == reason


def test_the_values_of_external_weights_are_not_read() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 2, 4] x) => (float[1, 2, 4] y) <float[2] val_2 = {0, 0}>
    { y = InstanceNormalization(x, val_1, val_2) }
    """
    model = onnx.parser.parse_model(text)
    external = model.graph.initializer.add(name="val_1", data_type=TensorProto.FLOAT, dims=[2])
    external.data_location = TensorProto.EXTERNAL
    external.external_data.add(key="location", value="absent.bin")
    found = ConstantRoles(Graph(model))
    assert (found.reason("val_1"), found.reason("val_2")) == ("", IDENTITY)
