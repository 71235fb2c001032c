"""The role of an initializer follows from every place it is read at: settings, scales, frequencies, identities."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.provenance import Provenance, provenance
from onnxgrad_cli.ir.types import MAX_SHAPE_BYTES
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.parameters.constants import ConstantRoles, settings
from onnxgrad_cli.passes.prepare.normalise import normalise

INITIALIZERS = "float s = {0.5}, float[1] b = {0.5}, float[1, 1] square = {2}, float[3] w = {1, 2, 3}"


def roles(nodes: str, f: str = "float[3] f = {1, 0.3, 0.2}") -> ConstantRoles:
    """The roles in a model of an input x and these nodes."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[1, 1] x, bool c) => (float y) <{INITIALIZERS}, {f}> {{ {nodes} }}
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
    decision = roles(nodes).decide("b")
    assert decision.heuristic == "scalar" and f" {op_type} " in decision.reason


def test_one_element_of_an_operator_that_is_no_factor_is_a_weight() -> None:
    assert roles("y = PRelu(x, b)").reason("b") == ""
    assert roles("h = MatMul(x, square) y = Add(h, w)").reason("w") == ""


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


IDENTITY = "the constant scale or shift of an InstanceNormalization without parameters"


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
        ("val_1", np.ones(16 * MAX_SHAPE_BYTES, np.float32), 1, IDENTITY),
        ("val_1", np.ones(16 * MAX_SHAPE_BYTES + 1, np.float32), 1, ""),  # too large to be read for this
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


def exported(nodes: str, values: str, name: str = "t", *, literal: bool = False, pytorch: bool = True) -> ConstantRoles:
    """The roles in a model as PyTorch's older exporter writes it, of a vector t and a matrix w."""
    stored = "" if literal else f", float[3] {name} = {{{values}}}"
    written = f"{name} = Constant<value = float[3] {{{values}}}>()" if literal else ""
    text = f"""<ir_version: 8, opset_import: ["": 17], producer_name: "{"pytorch" if pytorch else "other"}">
    g (float[n, 3] x, int64[1] i) => (float y) <float[3, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}{stored}>
    {{ {written} {nodes} }}
    """
    graph = Graph(onnx.parser.parse_model(text))
    graph.provenance = provenance(graph.proto)
    graph.settings = settings(graph)
    normalise(graph)
    return ConstantRoles(graph)


@pytest.mark.parametrize("pytorch", [True, False])
@pytest.mark.parametrize("literal", [True, False])
def test_what_pytorch_writes_into_a_node_stood_in_the_code(literal: bool, pytorch: bool) -> None:
    found = exported("h = MatMul(x, w) y = Mul(h, t)", "0.3, -1, 2", literal=literal, pytorch=pytorch).decide("t")
    assert (found.heuristic == "literal") == (literal and pytorch)


STANDARDISED = named("a statistic that standardises an input")


@pytest.mark.parametrize(
    ("nodes", "constant"),
    [
        ("a = Sub(x, t) b = Div(a, w) y = MatMul(b, w)", False),  # no number for each channel
        ("a = Sub(x, t) b = Div(a, u) y = MatMul(b, w)", True),
        ("f = Transpose(x) a = Sub(f, t) b = Mul(a, u) y = MatMul(b, w)", True),
        ("a = Sub(x, t) y = MatMul(a, w)", False),
        ("a = Add(x, t) b = Div(a, u) y = MatMul(b, w)", False),
        ("a = Sub(t, x) b = Div(a, u) y = MatMul(b, w)", False),
        ("h = MatMul(x, w) r = Relu(h) a = Sub(r, t) y = Div(a, u)", False),
        ("a = Sub(x, t) r = Relu(a) b = Div(r, u) y = MatMul(b, w)", False),
    ],
)
def test_statistics_of_data_meet_an_input_first(nodes: str, constant: bool) -> None:
    found = exported(f"u = Constant<value = float[3] {{0.5, 2, 0.7}}>() {nodes}", "0.3, -1, 2", pytorch=False)
    assert found.reason("t") == (STANDARDISED if constant else "")
    assert found.doubts.keys() == ({"t"} if constant else set())
    if " u)" in nodes:
        assert found.reason("u") == (STANDARDISED if constant else "")


@pytest.mark.parametrize(("values", "reason"), [("0, 0, 0", named("an initial state of zeros")), ("0, 0.1, 0", "")])
@pytest.mark.parametrize("nodes", ["h = MatMul(t, w) y = Add(x, h)",
                                   "s = Unsqueeze(t, i) z = Expand(s, i) y = GRU(x, w, w, , , z)"])  # fmt: skip
def test_a_network_starts_from_zeros_unless_it_has_learned(nodes: str, values: str, reason: str) -> None:
    assert exported(nodes, values).reason("t") == reason


@pytest.mark.parametrize(
    ("nodes", "values"),
    [
        ("h = MatMul(x, w) y = MatMul(t, h)", "0, 0, 0"),  # no layer is applied to it
        ("y = InstanceNormalization(x, t, t)", "8, 16, 32"),
        ("h = MatMul(x, w) y = Add(h, t)", "8, 16, 32"),
        ("c = Concat<axis = 0>(w, t) y = MatMul(x, c)", "8, 16, 32"),
        ("e = Unsqueeze(t, i) y = Einsum<equation = 'ij,jk->ik'>(e, w)", "8, 16, 32"),
    ],
)
def test_where_a_weight_is_expected_its_values_say_nothing(nodes: str, values: str) -> None:
    assert exported(nodes.replace("'", '"'), values).reason("t") == ""


@pytest.mark.parametrize(
    ("name", "value", "reader", "reason", "doubt"),
    [
        ("block.alpha", "0.3712345", "Mul(x, {})", "", False),
        ("block.alpha", "0", "Mul(x, {})", "", True),
        ("block.alpha", "0.5", "Max(x, {})", named("a scalar constant of Max"), False),
        ("block.alpha", "-1e9", "Mul(x, {})", named("a scalar constant of Mul"), False),
        ("onnx__Mul_3", "0.5", "Mul(x, {})", named("a scalar constant of Mul"), False),
        ("val_3", "0.5", "Mul(x, {})", named("a scalar constant of Mul"), False),
    ],
)
def test_of_a_single_number_the_name_tells(name: str, value: str, reader: str, reason: str, doubt: bool) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17], producer_name: "pytorch">
    g (float[n] x) => (float y) {{ y = {reader.format("t")} }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.node[0].input[1] = name
    model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.float32), name))
    written = Provenance(by_pytorch=True, literals=frozenset({name}))
    for said in (Provenance(by_pytorch=True), Provenance(), written):
        graph = Graph(model)
        graph.provenance = said
        found = ConstantRoles(graph)
        member = said.by_pytorch and said is not written
        expected = reason if member else named(f"a scalar constant of {model.graph.node[0].op_type}")
        assert found.reason(name) == expected
        assert (name in found.doubts) == (doubt and member)


def test_what_is_kept_in_bounds_is_learned() -> None:
    assert roles("e = Exp(s) y = Mul(x, e)").decide("s") == ("bounded", "")
    assert roles("e = Sqrt(s) y = Mul(x, e)").decide("s").heuristic == "scalar"
    generated = roles("e = Exp(val_3) y = Mul(x, e)", f="float val_3 = {0.5}")
    assert generated.decide("val_3").heuristic == "scalar"


def test_a_pair_turns() -> None:
    nodes = "c = Gather(cos, i) s = Gather(sin, i) a = Mul(x, c) b = Mul(x, s) y = Add(a, b)"
    turn = np.random.default_rng(0).uniform(0, 6, (5, 3)).astype(np.float32)
    for sine, reason in ((np.sin(turn), named("a cosine or sine of a rotation")), (np.sin(turn + 1), "")):
        text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x, int64[2] i) => (float y) {{ {nodes} }}"""
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(numpy_helper.from_array(f, n) for f, n in ((np.cos(turn), "cos"), (sine, "sin")))
        found = ConstantRoles(Graph(model))
        assert (found.reason("cos"), found.reason("sin")) == (reason, reason)


def test_a_setting_of_an_operator_stays_one_when_a_definition_takes_its_place() -> None:
    text = """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[1, 2, 3, 4] x, int64[1, 3] at) => (float[1, 2, 3, 4] y) <float[4, 4] w, float[8, 2] c, float[8, 2] s>
    { h = MatMul(x, w) y = com.microsoft.RotaryEmbedding(h, at, c, s) }
    """
    model = onnx.parser.parse_model(text.replace("<float[4, 4] w, float[8, 2] c, float[8, 2] s>", ""))
    draw = np.random.default_rng(0).standard_normal
    shapes = {"w": (4, 4), "c": (8, 2), "s": (8, 2)}
    model.graph.initializer.extend(
        numpy_helper.from_array(draw(shape).astype(np.float32), name) for name, shape in shapes.items()
    )
    training = build(model, Options(), stop_after="prepare").training
    assert (training.trained, set(training.not_trained.values())) == (["w"], {"rotary cache"})


SINES = np.stack([np.sin(turn := np.outer(np.arange(6), [1, 0.1])), np.cos(turn)], -1).reshape(6, 4)


@pytest.mark.parametrize(
    ("values", "said", "reason"),
    [
        (np.float32([[0.3, -1, 2], [1, 4, 0.7]]), "fixed", named("PyTorch's exporter does not mark it as a parameter")),
        (np.float32([[0.3, -1, 2], [1, 4, 0.7]]), "learned", ""),
        (np.float32([[0.3, -1, 2], [1, 4, 0.7]]), "", ""),
        (np.float32([[8, 16, 32], [8, 16, 32]]), "learned", ""),
        (np.float32([[8, 16, 32], [8, 16, 32]]), "", named("a table of whole numbers")),
        (SINES.astype(np.float32), "learned", named("a table of sines and cosines")),
    ],
)
def test_what_the_exporter_says_goes_before_the_values(values: np.ndarray, said: str, reason: str) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    g (float[1] x) => (float y) { y = Mul(x, t) }
    """)
    model.graph.initializer.append(numpy_helper.from_array(values, "t"))
    graph = Graph(model)
    graph.provenance = Provenance(**{said: frozenset({"t"})} if said else {})
    assert ConstantRoles(graph).reason("t") == reason


def test_no_number_at_all_is_no_weight() -> None:
    """JAX selects NaN where the variance is of no numbers; moved or not, it must not be multiplied into a slope."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 18]>
    g (float[3, 2] x) => (float[3, 2] y) <float[2] w = {0.5, 2}, float zero = {0}>
    { h = Mul(x, w) b = Greater(h, zero) y = Where(b, h, none) }
    """)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((3, 1), np.nan, np.float32), "none"))
    result = build(model)
    assert "none_grad" not in [value.name for value in result.model.graph.output]
    assert "w_grad" in [value.name for value in result.model.graph.output]
