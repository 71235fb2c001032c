"""The operations of a forward and a backward part, counted by hand."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.cost.training_cost import cost
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.record import Training
from onnxgrad_cli.report import make_report
from tests.report.test_build_report import f32, model


@pytest.mark.parametrize(
    ("text", "weights", "expected"),
    [
        ("g (float[7, 4] x) => (y) { y = MatMul(x, w) }", {"w": (4, 3)}, 2 * 7 * 4 * 3),
        ("g (float[2, 5, 7, 4] x) => (y) { y = MatMul(x, w) }", {"w": (4, 3)}, 2 * 2 * 5 * 7 * 4 * 3),
        ("g (float[4, 7] x) => (y) { y = Gemm<transA = 1>(x, w, b) }", {"w": (4, 3), "b": (3,)}, 2 * 7 * 4 * 3 + 21),
        # 3 x 3 kernel, stride 2, one pixel of padding: 8 x 8 -> 4 x 4; two groups of 2 channels; bias
        (
            "g (float[1, 4, 8, 8] x) => (y) { y = Conv<strides = [2, 2], pads = [1, 1, 1, 1], group = 2>(x, w, b) }",
            {"w": (6, 2, 3, 3), "b": (6,)},
            (6 * 4 * 4) * (2 * 2 * 9) + 6 * 4 * 4,
        ),
        # each of 4 x 5 x 5 inputs is multiplied into 3 x 2 x 2 outputs
        ("g (float[1, 4, 5, 5] x) => (y) { y = ConvTranspose(x, w) }", {"w": (4, 3, 2, 2)}, 2 * 100 * 12),
        ('g (float[7, 4] x) => (y) { y = Einsum<equation = "ij,jk->ik">(x, w) }', {"w": (4, 3)}, 2 * 7 * 4 * 3),
        ('g (float[7, 4] x) => (y) { y = Einsum<equation = "...i,ij">(x, w) }', {"w": (4, 3)}, 2 * 7 * 4 * 3),
        ('g (float[7, 4] x) => (y) { y = Einsum<equation = "ij,k->ijk">(x, w) }', {"w": (3,)}, 7 * 4 * 3),
        # 9 steps, batch 2, input 4, hidden 3, 4 gates
        (
            "g (float[9, 2, 4] x) => (y) { y = LSTM<hidden_size = 3>(x, w, r) }",
            {"w": (1, 12, 4), "r": (1, 12, 3)},
            2 * 9 * 2 * (4 * 3 * 4 + 4 * 3 * 3),
        ),
        ("g (float[1, 2, 8, 8] x) => (y) { y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }", {}, 2 * 16 * 4),
        ("g (float[7, 4] x) => (y) { t = Transpose(x) s = Shape(t) y = Reshape(x, s) }", {}, 0),
        ("g (float[7, 4] x) => (y) { y = Exp(x) }", {}, 28),
        ("g (float[7, 4] x) => (y) { y = ReduceSum(x) }", {}, 28),
        ("g (int64[7, 4] x) => (y) { y = Add(x, x) }", {}, 0),
    ],
)
def test_flops_by_hand(text: str, weights: dict[str, tuple[int, ...]], expected: int) -> None:
    text = text.replace("(y)", "(float[] y)")
    proto = model(text, **{name: f32(*shape) for name, shape in weights.items()})
    del proto.graph.output[:]
    proto.graph.output.append(onnx.ValueInfoProto(name="y"))
    graph = Graph(proto)
    infer_types(graph)
    found = cost(graph, Training())
    assert (found.flops_forward, found.uncounted) == (expected, {})


PRODUCT = "MatMul(h, w)"


BODY = {
    "loop": f"""Loop(m, , x) <body = b (int64 i, bool on, float[n, 4] h) => (bool on_out, float[n, 4] k)
        {{ on_out = Identity(on) p = {PRODUCT} k = Tanh(p) }}>""",
    "scan": f"""Scan<num_scan_inputs = 1, scan_input_axes = [1],
        body = b (float[n, 4] h, float[n, 4] s) => (float[n, 4] k) {{ p = {PRODUCT} k = Add(p, s) }}>(x, xs)""",
    "branch": f"""If(c) <
        then_branch = t () => (float[n, 4] k) {{ h = Exp(x) p = {PRODUCT} k = Tanh(p) }},
        else_branch = e () => (float[n, 4] q) {{ q = Exp(x) }}>""",
    "branch in a loop": f"""Loop(m, , x) <body = b (int64 i, bool on, float[n, 4] h) => (bool on_out, float[n, 4] k) {{
        on_out = Identity(on)
        k = If(c) <
            then_branch = t () => (float[n, 4] o) {{ o = Exp(h) }},
            else_branch = e () => (float[n, 4] q) {{ p = {PRODUCT} q = Tanh(p) }}>
    }}>""",
}


def with_body(kind: str, **weights: np.ndarray) -> onnx.ModelProto:
    inputs = "float[n, 4] x, float[n, t, 4] xs, bool c"
    inputs += "" if "m" in weights else ", int64 m"
    return model(f"g ({inputs}) => (float[n, 4] y) {{ y = {BODY[kind]} }}", w=f32(4, 4), **weights)


@pytest.mark.parametrize(
    ("kind", "products", "others", "branches"),
    [("loop", 5, 5, 0), ("scan", 7, 7, 0), ("branch", 1, 2, 1), ("branch in a loop", 5, 5, 1)],
)
def test_bodies_count_as_often_as_they_run_and_of_branches_the_dearer(
    kind: str, products: int, others: int, branches: int
) -> None:
    graph = Graph(with_body(kind, m=np.array(5)))
    infer_types(graph)
    found = cost(graph, Training(), {"n": 3, "t": 7})
    assert (found.uncounted, found.at_run_time, found.branches) == ({}, 0, branches)
    assert {c.op: c.forward for c in found.operators}["MatMul"] == products * 2 * 3 * 4 * 4
    assert found.flops_forward == products * 2 * 3 * 4 * 4 + others * 3 * 4


@pytest.mark.parametrize(("kind", "times"), [("loop", 5), ("scan", 7), ("branch in a loop", 5)])
def test_products_of_a_body_walked_back_are_counted(kind: str, times: int) -> None:
    """An iteration is computed again, and has two products of gradients; the last sum of a Scan is not needed again."""
    built = build(with_body(kind, m=np.array(5)))
    found = make_report(built=built, sizes={"n": 3, "t": 7}).cost
    assert found is not None and found.uncounted == {}
    products = {c.op: c for c in found.operators}["MatMul"]
    again = 2 if kind == "scan" else 3
    assert (products.forward, products.backward) == (times * 2 * 3 * 4 * 4, again * times * 2 * 3 * 4 * 4)


def test_a_loop_of_unknown_length_is_not_counted_and_said() -> None:
    graph = Graph(with_body("loop"))
    infer_types(graph)
    found = cost(graph, Training(), {"n": 3})
    assert (found.uncounted, found.flops_forward) == ({"Loop": 1}, 0)
