"""The report against counts made by hand or by numpy, and its formats against parsers that are not ours."""

from __future__ import annotations

import cProfile
import dataclasses
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from markdown_it import MarkdownIt
from onnx import helper, numpy_helper
from rich.console import Console

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.common.escape import escaped, escaped_lines
from onnxgrad_cli.common.wording import as_cli_flags
from onnxgrad_cli.cost.training_cost import Cost, cost
from onnxgrad_cli.errors import CheckFailed, OnnxgradError, Refusal, UnsupportedError, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import LOSS, ROLES, VERSION, Role, describe
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.record import Training
from onnxgrad_cli.report import FORMATS, File, Report, make_report, render, summary
from onnxgrad_cli.report.blocks import (
    Block,
    Bullets,
    CodeBlock,
    ModelName,
    Name,
    Page as Document,
    Paragraph,
    Picture,
    Section,
    Table,
)
from onnxgrad_cli.report.html import html
from onnxgrad_cli.verification.verdict import Proof, ProofStep

HOSTILE = "a|b`c``d\\<script>alert(1)</script>&amp;[red]*x*_y_\n# z"

MLP = """g (float[batch, 4] x) => (float[batch, 3] y) {
    h = MatMul(x, w1)
    r = Relu(h)
    z = MatMul(r, w2)
    y = Add(z, b)
}"""


def model(text: str, opset: Any = 18, **weights: Any) -> onnx.ModelProto:
    """A model from text; its weights from arrays, as initializers."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]>{text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return proto


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def mlp() -> onnx.ModelProto:
    return model(MLP, w1=f32(4, 5), w2=f32(5, 3), b=f32(3))


def hostile() -> onnx.ModelProto:
    """The MLP with a weight and a node of a name that breaks every format that doesn't escape."""
    proto = mlp()
    for node in proto.graph.node:
        node.name = f"node {node.op_type} {HOSTILE}"
        node.input[:] = [HOSTILE if name == "w1" else name for name in node.input]
    proto.graph.initializer[0].name = HOSTILE
    return proto


def refused() -> tuple[TrainingModel, UnsupportedError]:
    """Two nodes of a domain without rules between the weight and the loss."""
    text = """g (float[2] x) => (float[2] y) <float[2] b, float[2] c> {
        a = Mul(x, w) b = Tanh(a) c = Exp(b) y = Neg(c) }"""
    proto = model(text, w=f32(2))
    proto.opset_import.append(helper.make_opsetid("acme", 1))
    for index in (1, 2):
        proto.graph.node[index].domain = "acme"
        proto.graph.node[index].name = f"odd {index} {HOSTILE}"
    built = TrainingModel(Graph(proto), Options())
    with pytest.raises(UnsupportedError) as caught:
        built.run()
    return built, caught.value


# -- what is in it -------------------------------------------------------------------------------------------


def test_weights_are_counted_as_numpy_counts_them() -> None:
    report = make_report(built=build(mlp(), Options(freeze=("b",))))
    sizes = {"w1": np.ones((4, 5)).size, "w2": np.ones((5, 3)).size}
    assert {w.name: w.count for w in report.weights} == sizes
    assert [w.share for w in report.weights] == pytest.approx([20 / 35, 15 / 35])
    assert [(w.shape, w.dtype, w.gradient) for w in report.weights] == [
        ((4, 5), "float", "w1_grad"),
        ((5, 3), "float", "w2_grad"),
    ]
    assert [(t.name, t.count, t.reason) for t in report.not_trained] == [("b", 3, "frozen by --freeze")]


def test_inputs_and_outputs_have_roles_types_and_shapes() -> None:
    report = make_report(built=build(mlp(), Options(grad_of_input=("x",), keep_outputs=True)))
    assert {v.name: (v.role, v.shape) for v in report.inputs} == {
        "x": ("model input", ("batch", 4)),
        "label": ("label", ("batch", 3)),
        "w1": ("weight", (4, 5)),
        "w2": ("weight", (5, 3)),
        "b": ("weight", (3,)),
    }
    assert [(v.name, v.role, v.of) for v in report.outputs] == [
        ("loss", "loss", ""),
        ("w1_grad", "gradient", "w1"),
        ("w2_grad", "gradient", "w2"),
        ("b_grad", "gradient", "b"),
        ("x_grad", "gradient", "x"),
        ("y", "kept output", ""),
    ]
    assert {v.dtype for v in (*report.inputs, *report.outputs)} == {"float"}


def test_passes_and_operators_account_for_every_node() -> None:
    built = build(mlp())
    report = make_report(built=built)
    assert [p.name for p in report.passes] == [r.name for r in built.records]
    assert [p.nodes_after for p in report.passes[:-1]] == [p.nodes_before for p in report.passes[1:]]
    there = Counter(node.op_type for node in built.model.graph.node)
    assert {row.op: row.model + row.loss + row.backward for row in report.operators} == there
    assert report.cost is not None
    assert sum(report.cost.nodes.values()) == len(built.model.graph.node)
    rows = {row.op: row for row in report.operators}
    assert (rows["MatMul"].model, rows["MatMul"].differentiated, rows["MatMul"].backward) == (2, 2, 3)
    assert (rows["Relu"].model, rows["Relu"].derivative) == (1, "rule")
    assert rows["Relu"].rules == ["onnxgrad_cli.autodiff.rules.activation.relu"]


def test_an_operator_without_a_wanted_gradient_says_so() -> None:
    text = "g (float[N, 3] x) => (float[N, 3] y) { s = Sin(x) k = Floor(s) m = Add(s, k) y = Mul(m, w) }"
    rows = {row.op: row.derivative for row in make_report(built=build(model(text, w=f32(3)))).operators}
    assert (rows["Sin"], rows["Floor"], rows["Mul"]) == ("not needed", "zero", "rule")


def test_what_was_asked_names_what_differs_from_the_defaults() -> None:
    options = Options(losses=(LossSpec("mse", "y", "t", 0.5),), dims={"batch": 2}, freeze=("b*",), keep_outputs=True)
    report = make_report(built=build(mlp(), options), command=["onnxgrad", "build", "a b.onnx"], model="a b.onnx")
    assert report.asked.command == "onnxgrad build 'a b.onnx'"
    assert report.asked.losses == ["0.5 times mse of 'y' against 't'"]
    assert report.asked.options == {
        "--loss": "mse:y:t:0.5", "--freeze": "b*", "--keep-outputs": "yes", "--dim": "batch=2",
    }  # fmt: skip
    assert make_report(built=build(mlp())).asked.options == {}


def test_files_are_measured(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"abc" * 1000)
    file = File.of(tmp_path / "m.onnx", "training model")
    assert (file.bytes, file.sha256) == (3000, hashlib.sha256(b"abc" * 1000).hexdigest())
    assert File.of(tmp_path / "m.onnx", "weights", digest=False).sha256 == ""


# -- the verdict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proof", "status", "words", "tone"),
    [
        (None, "built", "not proved: no proof was requested", "warn"),
        (Proof("skipped", "300 MB of weights"), "built", "not proved: 300 MB of weights", "warn"),
        (
            Proof(steps=[ProofStep("onnx checker", "passed", "full check", 0.1)]),
            "built",
            "proved: every check passed",
            "good",
        ),
        (
            Proof(steps=[ProofStep("a", "passed", "", 0.1), ProofStep("b", "skipped", "random", 0.1)]),
            "built",
            "not proved: b: random",
            "warn",
        ),
        (
            Proof("failed", steps=[ProofStep("gradients", "failed", "wrong: w1", 0.1)]),
            "check_failed",
            "do not train",
            "bad",
        ),
    ],
)
def test_the_verdict_follows_the_proof(proof: Proof | None, status: str, words: str, tone: str) -> None:
    report = make_report(built=build(mlp()), proof=proof)
    assert (report.status, report.tone) == (status, tone)
    assert words in report.verdict
    for kind in FORMATS:
        assert words in render(report, kind)


def test_stopping_early_is_no_training_model() -> None:
    report = make_report(built=build(mlp(), stop_after="backward"))
    assert report.status == "stopped"
    assert "'backward'" in report.verdict
    assert not report.next


def test_an_error_before_anything_was_built() -> None:
    report = make_report(error=OnnxgradError("no such file 'x'", "look again"), model="x")
    assert (report.status, report.error, report.hint, report.cost) == ("failed", "no such file 'x'", "look again", None)
    for kind in FORMATS:
        assert "look again" in render(report, kind)


def test_a_failed_check_names_what_failed() -> None:
    proof = Proof("failed", steps=[ProofStep("gradients", "failed", "wrong: w1", 0.1)])
    report = make_report(built=build(mlp()), error=CheckFailed("wrong"), proof=proof)
    assert (report.status, report.verdict) == (
        "check_failed",
        "A check failed (gradients): no training model was written.",
    )


def told(refusals: Iterable[Refusal]) -> list[Refusal]:
    return [dataclasses.replace(refusal, hint=as_cli_flags(refusal.hint)) for refusal in refusals]


def test_a_refusal_lists_every_node_and_what_to_do() -> None:
    built, error = refused()
    assert len(error.refusals) == 2
    report = make_report(built=built, error=error, model="m.onnx")
    assert (report.status, report.refusals) == ("refused", told(error.refusals))
    assert [w.name for w in report.weights] == ["w"]
    assert "## Cost" not in render(report, "md")
    for kind in ("md", "html"):
        text = render(report, kind)
        for refusal in error.refusals:
            assert as_cli_flags(refusal.hint) in text
    cells = [cell for table in tables(render(report, "md")) for row in table for cell in row]
    for refusal in error.refusals:
        assert one_line(refusal.node) in cells
    assert [step.text for step in report.next] == ["onnxgrad inspect m.onnx"]


# -- cautions ------------------------------------------------------------------------------------------------


def cautions(built: TrainingModel) -> set[tuple[str, str]]:
    return {(caution.kind, caution.subject) for caution in make_report(built=built).cautions}


def test_a_kink_is_named_with_its_convention() -> None:
    (caution,) = make_report(built=build(mlp())).cautions
    assert (caution.kind, caution.subject) == ("kink", "Relu")
    assert "0 at x = 0" in caution.text


def test_sums_decided_at_run_time_name_the_symbols() -> None:
    text = "g (float[N, M] x, float[K, M] z) => (float[P, M] y) { a = Mul(x, w) y = Add(a, z) }"
    built = build(model(text, w=f32(1)), Options(train=("w",), losses=(LossSpec("mse", "y"),), grad_of_input=("x",)))
    found = [c for c in make_report(built=built).cautions if c.kind == "run-time sum"]
    assert found
    assert all("'N'" in caution.text or "'K'" in caution.text for caution in found)


@pytest.mark.parametrize(("mode", "random"), [(", r, t", True), (", r, f", False), (", r", False), ("", False)])
def test_a_dropout_is_random_in_training_mode_only(mode: str, random: bool) -> None:
    text = f"g (float[N, 3] x) => (float[N, 3] y) {{ d = Dropout(x{mode}) y = Mul(d, w) }}"
    ratio = {"r": np.float32(0.5)} if mode else {}
    flags = {name: np.array(value) for name, value in (("t", True), ("f", False)) if f", {name}" in mode}
    built = build(model(text, w=f32(3), **ratio, **flags))
    assert (("random operator", "Dropout") in cautions(built)) == random


@pytest.mark.parametrize(("dtype", "name"), [(10, "float16"), (16, "bfloat16")])
def test_low_precision_is_named(dtype: int, name: str) -> None:
    proto = model(f"g ({name}[N, 3] x) => ({name}[N, 3] y) {{ y = Mul(x, w) }}")
    proto.graph.initializer.append(helper.make_tensor("w", dtype, [3], [1.0, 2.0, 3.0]))
    assert ("low-precision type", name) in cautions(build(proto))


def test_a_raised_opset_is_named() -> None:
    text = "g (float[N, 3] x) => (float[N, 3] y) { y = Mul(x, w) }"
    assert ("opset change", "opset") in cautions(build(model(text, opset=11, w=f32(3))))


def test_a_zero_gradient_is_named() -> None:
    text = "g (float[N, 3] x) => (float[N, 3] y) { a = Mul(x, w) b = Floor(x) y = Add(a, b) }"
    assert ("zero gradient", "x") not in cautions(build(model(text, w=f32(3)), Options(grad_of_input=("x",))))
    text = "g (float[N, 3] x, float[N, 3] z) => (float[N, 3] y) { a = Mul(x, w) b = Floor(z) y = Add(a, b) }"
    assert ("zero gradient", "z") in cautions(build(model(text, w=f32(3)), Options(grad_of_input=("z",))))


# -- cost ----------------------------------------------------------------------------------------------------


def forward_cost(text: str, sizes: dict[str, int] | None = None, **weights: np.ndarray) -> Cost:
    graph = Graph(model(text, **weights))
    infer_types(graph)
    return cost(graph, Training(), sizes)


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


def test_backward_products_are_counted_per_gradient() -> None:
    built = build(mlp())
    found = make_report(built=built, sizes={"batch": 8}).cost
    assert found is not None
    products = {c.op: c for c in found.operators}["MatMul"]
    assert products.forward == 2 * 8 * 4 * 5 + 2 * 8 * 5 * 3
    assert products.backward == 2 * 8 * 4 * 5 + 2 * (2 * 8 * 5 * 3)  # dw1; dw2 and d(relu), but no dx
    assert (found.sizes, found.assumed, found.at_run_time) == ({"batch": 8}, {}, 0)
    assert found.weight_bytes == found.gradient_bytes == 4 * (20 + 15 + 3)


def test_kept_values_are_those_that_the_backward_part_reads() -> None:
    """y = sigmoid(reshape(x w)): the sigmoid needs its own output; the reshaped product is kept by nobody."""
    text = """g (float[batch, 4] x) => (float[batch, 3] y)
        { h = MatMul(x, w) s = Sigmoid(h) r = Reshape(s, k) y = Reshape(r, l) }"""
    weights = {"w": f32(4, 3), "k": np.array([-1]), "l": np.array([-1, 3])}
    built = build(model(text, **weights))
    found = make_report(built=built, sizes={"batch": 10}).cost
    assert found is not None
    made = {value.name: value for value in found.kept}
    assert made["s"].shape == (10, 3)
    assert made["s"].bytes == 10 * 3 * 4
    assert not {"x", "w", "h", "r", "y"} & set(made)
    assert found.kept_bytes == sum(value.bytes for value in found.kept)


def test_memory_goes_with_the_values_that_are_still_to_be_read() -> None:
    """Of n numbers of 4 bytes: h; h and s; the view r is s, and y takes the place of h, z that of y."""
    text = """g (float[n] x) => (float[m] z)
        { h = Exp(x) s = Sigmoid(h) r = Reshape(s, k) y = Add(r, h) z = Mul(y, r) }"""
    found = forward_cost(text, {"n": 10}, k=np.array([-1]))
    assert found.memory[:5] == [40, 80, 80, 80, 80]


def test_modules_cost_what_their_nodes_do() -> None:
    """The modules are those of the weights' names; a gradient counts with the node that it is of."""
    text = "g (float[n, 4] x) => (float[n, 3] y) { a = MatMul(x, net.0.w) b = Relu(a) y = MatMul(b, net.1.w) }"
    text = text.replace("net.0.w", "w0").replace("net.1.w", "w1")
    named = model(text, w0=f32(4, 5), w1=f32(5, 3))
    for tensor, name in zip(named.graph.initializer, ("net.0.w", "net.1.w"), strict=True):
        for node in named.graph.node:
            node.input[:] = [name if each == tensor.name else each for each in node.input]
        tensor.name = name
    found = make_report(built=build(named), sizes={"n": 8}).cost
    assert found is not None
    costs = {each.module: (each.forward, each.backward) for each in found.modules}
    assert costs["net.0"][0] == 2 * 8 * 4 * 5 + 8 * 5 and costs["net.1"][0] == 2 * 8 * 5 * 3
    assert costs["net.1"][1] == 2 * 2 * 8 * 5 * 3
    assert sum(each.forward for each in found.modules) == found.flops_forward
    assert sum(each.backward for each in found.modules) == found.flops_backward


def test_sizes_are_found_behind_operators() -> None:
    """The convolution's output height has no symbol of the inputs': it follows from the size that is given."""
    text = "g (float[n, 1, h, w] x) => (float[n, 2, a, b] y) { c = Conv(x, k) y = Relu(c) }"
    found = forward_cost(text, {"n": 2, "h": 10, "w": 12}, k=f32(2, 1, 3, 3))
    out = 2 * 2 * 8 * 10
    assert (found.flops_forward, found.at_run_time) == (out * 18 + out, 0)
    alone = forward_cost(text.replace("h, w", "10, 12"), k=f32(2, 1, 3, 3))
    assert (alone.assumed, alone.flops_forward) == ({"n": 1}, (out * 18 + out) // 2)


def test_a_size_that_nobody_gave_is_one_that_the_network_takes() -> None:
    """A kernel of 20 on one sample would make an output of -18, and a negative count."""
    text = "g (float[batch, 1, samples] x) => (float[batch, 2, a] y) { c = Conv<strides = [4]>(x, k) y = Relu(c) }"
    found = forward_cost(text, k=f32(2, 1, 20))
    out = 2 * ((64 - 20) // 4 + 1)
    assert (found.assumed, found.flops_forward) == ({"batch": 1, "samples": 64}, out * 40 + out)


def test_what_is_known_at_run_time_only_is_counted_as_one_and_said() -> None:
    text = "g (float[n] x) => (float[1, m] y) { i = NonZero(x) g = Gather(x, i) y = Exp(g) }"
    found = forward_cost(text, {"n": 5})
    assert (found.at_run_time, found.flops_forward) == (2, 1)


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


def test_the_step_after_gathered_gradients_is_counted() -> None:
    """It stands in a branch; to gather takes an addition a weight besides, and the mean a division."""
    costs = []
    for runs in (1, 3):
        report = make_report(built=build(mlp(), Options(optimizer="adam", accumulate=runs)))
        assert report.cost is not None and report.cost.uncounted == {}
        costs.append(report.cost)
    plain, gathered = costs
    weights = 20 + 15 + 3
    assert 0 <= gathered.flops_optimizer - plain.flops_optimizer - 2 * weights < 10
    assert (plain.branches, gathered.branches) == (0, 1)
    assert "For 1 If, the more expensive branch counts" in render(report, "md")


def test_counting_takes_time_with_the_nodes() -> None:
    """Twice the nodes are twice the calls of functions, which no load of the machine changes."""

    def calls(count: int) -> int:
        nodes = [helper.make_node("Sigmoid", [f"x{i}"], [f"x{i + 1}"]) for i in range(count)]
        value = helper.make_tensor_value_info
        graph = Graph(
            helper.make_model(
                helper.make_graph(nodes, "g", [value("x0", 1, ["n", 4])], [value(f"x{count}", 1, ["n", 4])]),
                opset_imports=[helper.make_opsetid("", 18)],
            )
        )
        infer_types(graph)
        profile = cProfile.Profile()
        assert profile.runcall(cost, graph, Training(), {"n": 2}).flops_forward == count * 8
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(2_000) < 2.1 * calls(1_000)


# -- formats -------------------------------------------------------------------------------------------------


def one_line(name: str) -> str:
    return name.replace("\n", "\\n")


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of every table, as a Markdown parser of others reads them."""
    found: list[list[list[str]]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and token.level == 4 and found:
            found[-1][-1].append("".join(child.content for child in token.children or ()))
    return found


def full(proto: onnx.ModelProto) -> Report:
    proof = Proof(steps=[ProofStep("a | b", "passed", f"about '{HOSTILE}'", 0.25)], executor="onnxruntime in float64")
    return make_report(
        built=build(proto), proof=proof, files=[File(f"{HOSTILE}.onnx", "training model", 1_234_567, "ab" * 32)],
        command=["onnxgrad", "build", HOSTILE], model=f"dir/{HOSTILE}.onnx", sizes={"batch": 8},
    )  # fmt: skip


def test_markdown_tables_are_well_formed_whatever_the_names() -> None:
    text = render(full(hostile()), "md")
    found = tables(text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == sum(len(table) + 1 for table in found)  # no line of a table is taken for anything else
    for table in found:
        assert len({len(row) for row in table}) == 1
    by_head = {table[0][0]: table for table in found}
    assert by_head["weight"][1][:1] == [one_line(HOSTILE)]
    assert by_head["weight"][1][3:6] == ["20", "52.6 %", one_line(f"{HOSTILE}_grad")]
    assert by_head["check"][1] == ["a | b", "passed", f"about {one_line(HOSTILE)}"]
    assert by_head["file"][1][2] == "1,234,567"
    assert "<script>" not in MarkdownIt("commonmark").enable("table").render(text)


def test_markdown_sections() -> None:
    headings = [line[3:] for line in render(full(mlp()), "md").splitlines() if line.startswith("## ")]
    assert headings == [
        "Cautions", "Trained weights", "Inputs and outputs", "Cost", "Proof", "Request", "Files", "Versions",
        "Next steps",
    ]  # fmt: skip
    page = render(full(mlp()), "html")
    details = page[page.index("<details>") : page.index("</details>")]
    assert re.findall("<h2[^>]*>([^<]*)<", details) == ["Passes", "Operators", "Cost in detail", "Programs"]
    assert not re.search(r"\d m?s\b", render(full(mlp()), "md") + page), "times are in the JSON report only"


def test_a_report_of_a_sample_is_short(tmp_path: Path) -> None:
    sample = Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx"
    out = tmp_path / "t.onnx"
    options = Options(losses=[LossSpec("cross-entropy")], label="y")
    run_build(sample, out, options, command="onnxgrad build")
    text = (tmp_path / "t.onnx.report.md").read_text()
    assert len(text.splitlines()) <= 120
    run_build(sample, out, options, command="onnxgrad build", force=True)
    assert (tmp_path / "t.onnx.report.md").read_text() == text


class Page(HTMLParser):
    """Checks that elements nest, and collects text, also by the headings, paragraphs and cells that it stands in."""

    VOID = frozenset({"meta", "link", "br", "hr", "img"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.code: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "code":
            self.code.append("")
        if tag in ("h1", "h2", "p", "li", "th", "td", "pre"):
            self.said.append("")
        self.links += [value or "" for key, value in attrs if key in ("href", "src")]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "code":
            self.code[-1] += data
        if self.said and not {"nav", "svg"} & {*self.open}:
            self.said[-1] += data


def test_html_nests_escapes_and_needs_nothing_from_outside() -> None:
    text = render(full(hostile()), "html")
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    assert "script" not in page.tags
    assert one_line(HOSTILE) in page.code
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "http" not in text


MARKS = st.text(st.sampled_from("aZ0 _*`~[]()<>&\\!#+-=.|:'\"\t\n\x1b\u202e")) | st.text()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MARKS.filter(str.strip), MARKS, MARKS)
def test_any_text_is_shown_as_it_is(words: str, name: str, listing: str) -> None:
    """No text becomes markup: the page has our elements alone, and they say what was given, made visible."""
    mixed = (words, ModelName(name), words)
    blocks: list[Block] = [
        Paragraph(mixed), Bullets([mixed]), Table((words, "n"), [(mixed, Name(name))], frozenset({1})),
        CodeBlock("sh", listing), Picture(lambda: "<svg></svg>", words, CodeBlock("text", "")),
    ]  # fmt: skip
    verdict = ("Built, ", *mixed, ".")
    page = Page()
    page.feed(html(Document(("Of ", *mixed, "."), verdict, "good", [("x", mixed)], [Section("A b", blocks)]), "p.html"))
    line, shown = escaped("".join(mixed)), escaped(words).strip()
    assert [text.strip() for text in page.said] == [
        f"Of {line}.", f"Built, {line}.", "", "at a glance", "x", line.strip(), "A b", line.strip(), line.strip(),
        shown, "n", line.strip(), escaped(name).strip(), escaped_lines(listing).strip(), shown, "",
    ]  # fmt: skip
    links = [link for link in page.links if link != "#a-b"]
    assert links == [f"p.html#{quote(escaped(name), safe='')}"] * 6 * (name != "")
    assert page.tags <= {
        "html", "head", "meta", "title", "style", "body", "nav", "div", "h1", "h2", "p", "strong", "code", "a", "ul",
        "li", "table", "thead", "tbody", "tr", "th", "td", "pre", "svg",
    }  # fmt: skip


def test_json_is_the_whole_tree() -> None:
    report = full(hostile())
    tree = json.loads(render(report, "json"))
    assert tree == json.loads(json.dumps(dataclasses.asdict(report)))
    assert set(tree) == {field.name for field in dataclasses.fields(Report)}
    assert tree["weights"][0]["name"] == HOSTILE
    assert tree["format"] == 1
    built, error = refused()
    refusals = json.loads(render(make_report(built=built, error=error), "json"))["refusals"]
    assert [Refusal(**refusal) for refusal in refusals] == told(error.refusals)


def test_what_memory_costs_is_drawn_and_told() -> None:
    options = Options(losses=[LossSpec("mse")], recompute=RecomputeSpec("budget", size=1))
    report = make_report(built=build(mlp(), options))
    done = report.recomputed
    assert done is not None and done.trade[0] == (done.kept_before, 0) and done.trade[-1] == (done.kept, done.flops)
    assert 'class="taken"' in render(report, "html")
    assert "operations added" in render(report, "html")
    assert json.loads(render(report, "json"))["recomputed"]["trade"] == [list(pair) for pair in done.trade]


def test_apostrophes_are_no_quotes() -> None:
    error = OnnxgradError("it can't be that 'a name' isn't one")
    assert "can't be that `a name` isn't one" in render(make_report(error=error), "md")


def test_an_unknown_format_is_an_error_of_usage() -> None:
    with pytest.raises(UsageError) as caught:
        render(full(mlp()), "htm")
    assert "html" in str(caught.value.hint)


def shown(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(summary(report))
    return stream.getvalue()


def test_the_summary_takes_names_as_they_are() -> None:
    text = shown(full(hostile()))
    assert one_line(f"{HOSTILE}.onnx") in text
    assert "3 tensors, 38 parameters (152 B)" in text
    assert len(text.splitlines()) < 15


def test_the_summary_of_a_refusal_lists_the_nodes() -> None:
    built, error = refused()
    text = shown(make_report(built=built, error=error))
    assert text.count("acme::") >= 2
    assert "--freeze" in text


# -- the model describes itself ------------------------------------------------------------------------------


def test_a_training_model_describes_itself() -> None:
    built = build(mlp(), Options(grad_of_input=("x",), label="t", keep_outputs=True))
    stored = onnx.load_model_from_string(built.model.SerializeToString())
    roles = describe(stored)
    assert roles.loss == "loss"
    assert roles.fed == ["x", "t"]
    assert roles.gradients == {name: f"{name}_grad" for name in ("w1", "w2", "b", "x")}
    assert roles.outputs["y"] == Role("kept output")
    assert [(term.name, term.output, term.label) for term in roles.losses] == [("mse", "y", "t")]
    assert roles.reduction == "mean"


def test_a_second_build_describes_the_second_model() -> None:
    again = build(build(mlp()).model, Options(losses=(LossSpec("mse", "w1_grad", "t2"),), train=("w2",)))
    keys = [entry.key for entry in again.model.metadata_props]
    assert len(keys) == len(set(keys))
    assert describe(again.model).losses[0].output == "w1_grad"
    assert describe(again.model).loss == again.training.loss


def test_other_metadata_stay() -> None:
    proto = mlp()
    helper.set_model_props(proto, {"author": "somebody", VERSION: "0.0.0"})
    props = {entry.key: entry.value for entry in build(proto).model.metadata_props}
    assert props["author"] == "somebody"
    assert props[VERSION] != "0.0.0"


def test_a_model_without_a_description_is_refused() -> None:
    with pytest.raises(UsageError, match="not a training model"):
        describe(mlp())


@pytest.mark.parametrize("value", ["", "{", "[]", '{"inputs": {}}', '{"inputs": {}, "outputs": {"loss": "loss"}}'])
def test_a_broken_description_is_an_error(value: str) -> None:
    proto = build(mlp()).model
    helper.set_model_props(proto, {ROLES: value, LOSS: '{"terms": [], "reduction": "mean"}'})
    with pytest.raises(OnnxgradError, match="can't be read"):
        describe(proto)


def test_a_description_that_no_longer_fits_is_an_error() -> None:
    proto = build(mlp()).model
    del proto.graph.output[1]
    with pytest.raises(OnnxgradError, match="'w1_grad', which it does not have"):
        describe(proto)


def test_the_program_in_the_report_runs_and_the_loss_falls(tmp_path: Path) -> None:
    path = tmp_path / 'a "quoted" model.onnx'
    built = build(mlp())
    onnx.save(built.model, path)
    report = make_report(built=built, files=[File.of(path, "training model")])
    (program,) = (step.text for step in report.next if step.language == "python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_the_next_command_trains_with_the_same_loss_and_checks_on_the_same_data() -> None:
    options = Options(losses=[LossSpec("mse", "y", "target")], freeze=("b*",), optimizer="adamw")
    command = "onnxgrad build m.onnx --test-data 'my data.npz'"
    files = [File(path="t.onnx", role="training model", bytes=1, sha256="")]
    report = make_report(built=build(mlp(), options), model="m.onnx", command=command, files=files)
    train, check = (step.text for step in report.next if step.language == "sh")
    assert train == "onnxgrad train m.onnx --loss mse:y:target --freeze 'b*' --optimizer adamw --data DATA"
    assert check == "onnxgrad check t.onnx --data 'my data.npz'"


def test_versions_are_those_that_run() -> None:
    versions: dict[str, Any] = make_report().versions
    assert (versions["onnx"], versions["numpy"]) == (onnx.__version__, np.__version__)
    assert list(versions) == ["onnxgrad", "onnx", "onnxruntime", "numpy", "Python"]


def test_a_loss_without_a_label_names_none() -> None:
    """`identity` has no label, also where another loss has taken the default one."""
    text = "g (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = Mul(x, w) z = Abs(y) }"
    built = build(model(text, w=f32(3)), Options(losses=(LossSpec("mse", "y"), LossSpec("identity", "z"))))
    assert make_report(built=built).asked.losses == ["mse of 'y' against 'label'", "identity of 'z'"]
    assert [term.label for term in describe(built.model).losses] == ["label", ""]


def test_a_target_does_not_change_what_a_step_costs() -> None:
    """Its functions hide sizes from shape inference, which a product then has from its other factor."""
    counts = []
    for target in ("standard", "ort-cpu"):
        model = onnx.load(Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx")
        built = build(model, Options(losses=(LossSpec("cross-entropy"),), target=target))
        counts.append(cost(built.graph, built.training).flops_backward)
    assert abs(counts[0] - counts[1]) < 0.01 * counts[0]
