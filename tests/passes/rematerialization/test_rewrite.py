"""Recomputation: the gradients stay what they are, less is kept, and nothing random or kept in place runs twice."""

from __future__ import annotations

import io
import itertools
from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from torch import nn

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import Caution, UsageError
from onnxgrad_cli.ir.node import ROLE
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.rematerialization.recompute import parse_recompute
from tests.cli_harness import MLP
from tests.facts import raises

BATCH, WIDTH = 64, 32


def blocks(count: int = 8, drop: float = 0.0) -> nn.Sequential:
    """Layers with what exporters write in several nodes: GELU, a normalization, SiLU."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU()]
        parts += [nn.Dropout(drop)] if drop else []
    net = nn.Sequential(*parts, nn.Linear(WIDTH, 4))
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # the exporter merges weights of equal values
    return net


def exported(net: nn.Module, *shape: int) -> ModelProto:
    file = io.BytesIO()
    example = torch.randn(*(shape or (2, WIDTH)))
    torch.onnx.export(
        net.eval(), (example,), file, opset_version=17, dynamo=False, input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def made(model: ModelProto, recompute: str = "", **options: object) -> TrainingModel:
    asked = parse_recompute(recompute) if recompute else None
    copy = ModelProto()
    copy.CopyFrom(model)
    return build(copy, Options(losses=(LossSpec("mse"),), recompute=asked, **options))  # type: ignore[arg-type]


def session(model: ModelProto, level: str = "ORT_ENABLE_ALL", path: str = "") -> ort.InferenceSession:
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    if path:
        options.optimized_model_filepath = path
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ran(built: TrainingModel, feeds: dict[str, np.ndarray], level: str = "ORT_ENABLE_ALL") -> list[np.ndarray]:
    return session(built.model, level).run(None, feeds)


def data(width: int = WIDTH, out: int = 4, batch: int = BATCH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (batch, width), "label": (batch, out)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


ASKED = ["elementwise", "block:/*4/Mul*", "block:/1[0-9]/*", "block:auto", "budget:100kB", "budget:1B"]


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.thinned(9, 3)
def test_gradients_are_the_same(asked: str, level: str) -> None:
    model, feeds = exported(blocks()), data()
    plain, again = made(model, dims={"batch": BATCH}), made(model, asked, dims={"batch": BATCH})
    done = again.training.recomputed
    assert done is not None and done.nodes > 0
    assert done.kept < (0.3 if asked == "block:auto" else 0.8) * done.kept_before
    for one, other in zip(ran(plain, feeds, level), ran(again, feeds, level), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(one).max()))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.thinned(3)
def test_beside_torch(asked: str) -> None:
    net, feeds = blocks(3), data()
    again = made(exported(net), asked)
    found = dict(zip([o.name for o in again.model.graph.output], ran(again, feeds), strict=True))
    loss = nn.functional.mse_loss(net(torch.tensor(feeds["x"])), torch.tensor(feeds["label"]))
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    named = dict(net.named_parameters())
    assert [name for name in again.training.gradients if name in named]
    for name, gradient in again.training.gradients.items():
        if name in named:  # the exporter names transposed matrices anew
            theirs = named[name].grad
            assert theirs is not None
            np.testing.assert_allclose(found[gradient], theirs.numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_any_batch(batch: int) -> None:
    """Zeros in the shape of a Reshape keep each size, one of 0 too."""
    model, feeds = exported(blocks(2)), data(batch=batch)
    for one, other in zip(ran(made(model), feeds), ran(made(model, "block:/4/*"), feeds), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_values_that_are_no_numbers_stay_so() -> None:
    """What holds a copy back is computed from gradients: infinite ones hold it back as well."""
    model, feeds = exported(blocks(2)), data()
    feeds["label"][0] = np.inf
    for one, other in zip(ran(made(model), feeds), ran(made(model, "elementwise"), feeds), strict=True):
        np.testing.assert_array_equal(np.isfinite(other), np.isfinite(one))


def test_the_optimizer_merges_no_copy(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A copy runs beside its node: both products are there in what onnxruntime makes of the model."""
    again = made(exported(blocks(4)), "block:/4/*")
    session(again.model, path=str(tmp_path / "optimized.onnx"))
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    held = [node for node in optimized.node if node.name.startswith("recompute/")]
    assert len(held) > 20
    products = Counter(node.op_type for node in optimized.node if node.op_type in ("Gemm", "MatMul", "FusedMatMul"))
    plain = made(exported(blocks(4)))
    session(plain.model, path=str(tmp_path / "plain.onnx"))
    before = Counter(n.op_type for n in onnx.load(tmp_path / "plain.onnx").graph.node)
    assert products.total() > sum(before[kind] for kind in products)


@pytest.mark.parametrize("asked", ["elementwise", "block:/9/*", "budget:1B"])
def test_nothing_random_runs_twice(asked: str) -> None:
    model = exported(blocks(4, drop=0.5).train())
    train = {"mode": "train", "dims": {"batch": BATCH}}
    file = io.BytesIO()
    torch.onnx.export(
        blocks(4, drop=0.5), (torch.randn(2, WIDTH),), file, opset_version=17, dynamo=False, input_names=["x"],
        output_names=["y"], dynamic_axes={"x": {0: "batch"}}, training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    plain, again = made(model, **train), made(model, asked, **train)
    assert again.training.recomputed is not None and again.training.recomputed.nodes > 0
    drawn = [Counter(n.op_type for n in built.model.graph.node)["Dropout"] for built in (plain, again)]
    assert drawn == [4, 4]


def test_bodies_and_running_statistics_are_left_alone() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4, 6] x) => (float[N, 4, 6] y)
        <float[4] scale = {1, 2, 3, 4}, float[4] b = {0, 1, 2, 3}, float[4] mean = {0, 0, 0, 0},
         float[4] var = {1, 1, 1, 1}, float[6, 6] w, float one = {1}>
        {
            a = MatMul(x, w)
            n, m2, v2 = BatchNormalization <training_mode = 1> (a, scale, b, mean, var)
            t = Tanh(n)
            s = ReduceSum <keepdims = 0> (t)
            c = Less(s, one)
            u = If (c) <then_branch = th () => (float[N, 4, 6] p) { p = Sin(t) },
                        else_branch = el () => (float[N, 4, 6] q) { q = Mul(t, t) }>
            z = Exp(u)
            k = Sigmoid(z)
            y = MatMul(k, w)
        }
    """)
    rng = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((6, 6)).astype(np.float32) / 4, "w"))
    feeds = {name: rng.standard_normal((3, 4, 6)).astype(np.float32) for name in ("x", "label")}
    plain = made(model)
    for asked in ("elementwise", "block:k", "block:t", "budget:1B"):
        again = made(model, asked)
        assert again.training.recomputed is not None and again.training.recomputed.nodes > 0
        for kind in ("If", "BatchNormalization"):
            counts = [sum(n.op_type == kind for n in built.model.graph.node) for built in (plain, again)]
            assert counts[0] == counts[1]
        for one, other in zip(ran(plain, feeds), ran(again, feeds), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def order_of(built: TrainingModel, feeds: dict[str, np.ndarray]) -> list[str]:
    """The names of the nodes as onnxruntime runs them."""
    import json

    options = ort.SessionOptions()
    options.log_severity_level, options.enable_profiling = 3, True
    run = ort.InferenceSession(built.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    run.run(None, feeds)
    with open(run.end_profiling()) as file:
        events = json.load(file)
    return [event["name"] for event in events if event["name"].endswith("_kernel_time")]


def test_copies_wait_until_their_turn(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A segment comes back after the weights' gradients of the segments behind it."""
    monkeypatch.chdir(tmp_path)
    names = order_of(made(exported(blocks(4)), "block:/4/*"), data())
    copies = [place for place, name in enumerate(names) if name.startswith("recompute//0/")]
    late = [place for place, name in enumerate(names) if name.startswith("grad//18/")]
    assert copies and late and min(copies) > max(late)


def test_what_takes_no_gradient_waits_too(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Derivatives could be made in the forward part, and all cotangents before the first weight's gradient."""
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())), nn.Linear(WIDTH, 4))
    names = order_of(made(exported(net), "elementwise", dims={"batch": BATCH}), data())
    products = [place for place, name in enumerate(names) if "/Gemm/Gemm" in name]
    derivatives = [place for place, name in enumerate(names) if name.startswith("grad/") and "/Erf_" in name]
    assert len(derivatives) == 6
    assert min(derivatives) > min(products)
    for one, other in itertools.pairwise(derivatives):
        assert sum(one < place < other for place in products) == 2  # of the layer's input, and of its weight


@pytest.mark.parametrize("options", [
    {"optimizer": "adamw"}, {"loss_scale": 8.0}, {"keep_outputs": True}, {"yield_": "input"}, {"grad_of_input": ("x",)},
    {"optimizer": "sgd", "loss_scale": "dynamic", "accumulate": 2}, {"identifiers": True},
])  # fmt: skip
@pytest.mark.thinned(6, 2)
def test_with_other_options(options: dict[str, object]) -> None:
    model, feeds = exported(blocks(2)), data()
    plain, again = made(model, **options), made(model, "block:/4/*", **options)
    sessions = [session(built.model) for built in (plain, again)]
    for port in sessions[0].get_inputs():
        if port.name not in feeds and "float" in port.type and all(isinstance(d, int) for d in port.shape):
            feeds |= {port.name: np.full(port.shape, 0.01, np.float32)} if not port.shape else {}
    for one, other in zip(*(each.run(None, feeds) for each in sessions), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_it_can_be_differentiated_again() -> None:
    """Copies are standard nodes: the input's gradient of the training model's own loss is the same."""
    again = made(exported(blocks(1)), "elementwise", yield_="input")
    assert {node.domain for node in again.model.graph.node} <= {"", "ai.onnx"}


def test_half_types() -> None:
    model = exported(blocks(2).half().float())
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    head = helper.make_node("Cast", ["x32"], ["x"], name="narrow", to=TensorProto.FLOAT16)
    tail = helper.make_node("Cast", ["y"], ["y32"], name="widen", to=TensorProto.FLOAT)
    model.graph.node.insert(0, head)
    model.graph.node.append(tail)
    model.graph.input[0].name, model.graph.output[0].name = "x32", "y32"
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float16)))
    del model.graph.value_info[:]
    feeds = {"x32": data()["x"], "label": data()["label"]}
    for one, other in zip(ran(made(model), feeds), ran(made(model, "elementwise"), feeds), strict=True):
        np.testing.assert_allclose(other, one, rtol=5e-3, atol=1e-3)


FORMS = "write, for example, block:'*layer*/output' or budget:512MB"
SIZES = "give a number and one of B, kB, MB, GB, KiB, MiB, GiB, such as 512MB"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("elementwize", ("unknown_name", "recompute", "elementwize"), "did you mean elementwise?"),
        ("", ("unknown_name", "recompute", ""), "kinds: elementwise, block, budget, optimal"),
        ("block", ("wrong_value", "recompute", "block"), FORMS),
        ("elementwise:3", ("wrong_value", "recompute", "elementwise:3"), FORMS),
        ("budget:lots", ("wrong_value", "recompute", "lots"), SIZES),
        ("budget:5QB", ("wrong_value", "recompute", "5QB"), SIZES),
        ("budget:-5MB", ("wrong_value", "recompute", "-5MB"), SIZES),
        ("budget:inf", ("wrong_value", "recompute", "inf"), SIZES),
        ("budget:nan", ("wrong_value", "recompute", "nan"), SIZES),
    ],
)
def test_bad_words(text: str, message: tuple[str, ...], hint: str) -> None:
    with raises(UsageError, *message) as caught:
        parse_recompute(text)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512_000_000), ("1.5 GiB", 3 << 29), ("12", 12), ("3kb", 3000), ("0.5kB", 500), ("0", 0)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_recompute(f"budget:{text}") == RecomputeSpec("budget", "", size)


def test_words_without_a_size() -> None:
    assert parse_recompute("elementwise") == RecomputeSpec("elementwise")
    assert parse_recompute("block: *output ") == RecomputeSpec("block", "*output")


def test_a_pattern_that_matches_nothing() -> None:
    with raises(UsageError, "unknown_name", "recompute", "q"):
        made(parser.parse_model(MLP), "block:q")


def test_not_with_a_gradient_node() -> None:
    with pytest.raises(UsageError, match="`recompute`"):
        made(parser.parse_model(MLP), "elementwise", as_gradient_op=True)


def test_a_budget_out_of_reach_is_told() -> None:
    again = made(exported(blocks()), "budget:1B")
    assert any("bytes stay" in str(caution) for caution in again.training.cautions)
    assert any("batch = 1" in str(caution) for caution in again.training.cautions)


def test_a_budget_counts_what_is_made_of_weights() -> None:
    """Such as transposed weights, which are more than all else here: what is left of the budget is for the rest."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        small (float[2, 64] x) => (float[2, 64] y) <float[64, 64] v> {
            w = Transpose(v) h = MatMul(x, w) t = Sin(h) e = Exp(t) y = Mul(e, t)
        }
    """)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.float32), "v"))
    done = made(model, grad_of_input=("x",), recompute="budget:17kB").training.recomputed
    assert done is not None and done.kept_before > 17_000 and done.nodes
    assert 64 * 64 * 4 < done.kept <= 17_000


PROGRAMS = {
    "an output is kept of a node that runs again": (
        "block:[hc]",
        "h = Sub(x, w) a, c = Split<axis = 1>(h, parts) t = Tanh(a) y = Mul(t, c)",
    ),
    "a view of an input is read before its copy would be": (
        "block:s",
        "f = Unsqueeze(x, axis) d = Add(f, w) s = Mul(d, d) q = Tanh(s) y = Mul(q, f)",
    ),
    "all gradients are zeros, and need no seed": ("elementwise", "h = Mul(x, w) y = Sign(h)"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_programs(name: str) -> None:
    asked, nodes = PROGRAMS[name]
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        small (float[2, 4] x) => (float[] y)
        <float[4] w = {{1, -2, 3, 0.5}}, int64[2] parts = {{2, 2}}, int64[1] axis = {{1}}> {{ {nodes} }}
    """)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    plain, again = (made(model, each, grad_of_input=("x",)) for each in ("", asked))
    (label,) = plain.training.labels
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 4)).astype(np.float32)}
    shape = [dim.dim_value for value in plain.model.graph.input if value.name == label
             for dim in value.type.tensor_type.shape.dim]  # fmt: skip
    feeds[label] = rng.standard_normal(shape).astype(np.float32)
    for one, other in zip(ran(plain, feeds), ran(again, feeds), strict=True):
        np.testing.assert_array_equal(other, one)


def test_the_operations_that_are_added_are_counted_where_sizes_are_known_from_statements_alone():
    """A Reshape to zeros holds a value back, and no inference sees through it."""
    weights = ", ".join(["0.1"] * 64)
    model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 4, 8] x) => (float[N, 4, 8] y)
    <float[8, 8] w = {{{weights}}}, float[8, 8] v = {{{weights}}}, int64[3] dims = {{0, -1, 2}},
     int64[3] back = {{0, 4, 8}}>
    {{
        a = MatMul(x, w) b = Reshape(a, dims) c = Sigmoid(b) d = Exp(c) e = Reshape(d, back) y = MatMul(e, v)
    }}
    """)
    done = build(model, Options(recompute=parse_recompute("elementwise"))).training.recomputed
    assert done is not None
    assert (done.nodes, done.flops) == (2, 4 * 8)


def small(nodes: str) -> ModelProto:
    """A program over [N, 4], which counts as [1, 4] where nobody says otherwise: 16 bytes for each value."""
    return parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        small (float[N, 4] x) => (float[N, 4] y) <float[4] w = {{1, -2, 3, 0.5}}> {{ {nodes} }}
    """)


SINES = " ".join(f"a{i + 1} = {('Sin', 'Cos')[i % 2]}(a{i})" for i in range(40))
KEPT = 4 + 2 * 16
"""The bytes of the loss, of the difference of prediction and label, and of its square, whose size is read."""


@pytest.mark.parametrize(
    ("asked", "kept"),
    [("elementwise", KEPT + 16), ("budget:0B", KEPT + 16), ("block:a2", KEPT + 16), ("block:a[24]", KEPT + 32)],
)
def test_a_segment_is_32_nodes_long_or_a_block(asked: str, kept: int) -> None:
    """Stored are the results between segments alone; without recomputation, all but a40, which nobody reads."""
    done = made(small(f"a0 = Mul(x, w) {SINES} y = Exp(a40)"), asked).training.recomputed
    assert done is not None and (done.asked, done.kept_before) == (asked, KEPT + 41 * 16)
    assert done.kept == kept


CURVE = "h = Mul(x, w) a = Sin(h) y = Exp(a)"
FLAT = "h = Mul(x, w) y = Sign(h)"
NONE = "no value can be computed again"
COUNTED = "the bytes were counted with N = 1; set another size with `dims=NAME=SIZE`"
SHORT = "36 bytes stay stored, because the other values can't be computed again from less; try block:GLOB"


@pytest.mark.parametrize(
    ("nodes", "asked", "texts"),
    [
        (FLAT, "elementwise", [NONE]),
        (FLAT, "block:h", [NONE]),
        (FLAT, "budget:3B", [NONE, COUNTED]),
        (FLAT, "budget:4B", [COUNTED]),
        (CURVE, "elementwise", []),
        (CURVE, "budget:36B", [COUNTED]),
        (CURVE, "budget:35B", [SHORT, COUNTED]),
    ],
)
def test_what_is_told_of_it(nodes: str, asked: str, texts: list[str]) -> None:
    built = made(small(nodes), asked, grad_of_input=("x",))
    notes = [caution for caution in built.training.cautions if caution.kind != "zero gradient"]
    assert notes == [Caution("note", "", f"`recompute={asked}`: {text}") for text in texts]
    assert built.training.recomputed is not None
    assert (built.training.recomputed.nodes > 0) == (nodes == CURVE)


def test_every_symbol_that_counts_as_1_is_told() -> None:
    model = small(CURVE)
    model.graph.input[0].type.tensor_type.shape.dim.add().dim_param = "M"
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_param = "M"
    del model.graph.input[0].type.tensor_type.shape.dim[1], model.graph.output[0].type.tensor_type.shape.dim[1]
    assert any("with N = 1, M = 1;" in str(caution) for caution in made(model, "budget:1B").training.cautions)


def test_a_budget_counts_unknown_sizes_as_1() -> None:
    """Of 68 bytes 16 are freed at a time."""
    done = made(small(CURVE), "budget:52B").training.recomputed
    assert done is not None and done.kept == 52


def test_one_node_runs_again() -> None:
    built = made(small("h = Mul(x, w) y = Sin(h)"), "elementwise")
    assert built.training.recomputed is not None and built.training.recomputed.nodes == 1


def test_outputs_that_are_kept_are_not_computed_again() -> None:
    """They are in memory to the end anyway."""
    for keep_outputs, nodes in ((False, 3), (True, 1)):
        done = made(small(CURVE), "elementwise", keep_outputs=keep_outputs).training.recomputed
        assert done is not None and done.nodes == nodes


def test_running_statistics_are_not_computed_again() -> None:
    """Their next values are outputs: here m2, by which the gradient is multiplied too."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 4] y)
        <float[4] scale = {1, 2, 3, 4}, float[4] b = {0, 1, 2, 3}, float[4] mean = {0, 0, 0, 0.5},
         float[4] var = {1, 1, 1, 1.5}>
        {
            n, m2, v2 = BatchNormalization <training_mode = 1> (x, scale, b, mean, var)
            k = Add(n, m2) q = Mul(k, m2) y = Sin(q)
        }
    """)
    built = made(model, "block:q", mode="train")
    assert built.training.state == {"mean": "m2", "var": "v2"}
    again = {name for node in built.model.graph.node for name in node.output if name.endswith("_recomputed")}
    assert again and "m2_recomputed" not in again


def test_a_copy_reads_copies_where_there_are_some() -> None:
    """What is left to compute again is not forgotten for one operand that is stored: a is read by no copy."""
    done = made(small("h = Mul(x, w) a = Sin(h) f = Add(a, h) y = Exp(f)"), "block:h").training.recomputed
    assert done is not None and (done.nodes, done.kept) == (3, KEPT + 16)


def test_a_value_that_is_read_twice_at_every_step_is_copied_once() -> None:
    """There are 2^28 ways through this program."""
    steps = " ".join(f"a{i + 1} = Add(a{i}, a{i})" for i in range(28))
    done = made(small(f"a0 = Mul(x, w) {steps} y = Exp(a28)"), "elementwise").training.recomputed
    assert done is not None and done.nodes == 30


def written(built: TrainingModel) -> list[onnx.NodeProto]:
    """The copies of a model, and what holds them and other nodes back."""
    return [node for node in built.model.graph.node if node.name.startswith("recompute/")]


def test_what_is_written_belongs_to_the_backward_part() -> None:
    """Copies, and what holds them and other nodes back."""
    nodes = written(made(small("h = Mul(x, w) a = Tanh(h) b = Sin(a) y = Tanh(b)"), "elementwise"))
    assert {"Tanh", "Sin", "Reshape", "Slice", "Expand"} <= {node.op_type for node in nodes}
    for node in nodes:
        assert {entry.value for entry in node.metadata_props if entry.key == ROLE} == {"backward"}


def test_what_the_backward_part_begins_with_is_kept() -> None:
    """The mean of the second loss is scaled by what is known before anything of the backward part is computed."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[n, m] x) => (float[n, m] y0, float[n, m] y1) <float[1] w = {2}>
        { z0 = Mul(x, w) y0 = Exp(z0) z1 = Mul(x, w) y1 = Sin(z1) }""")
    losses = tuple(LossSpec("mse", output=f"y{i}", label=f"label{i}") for i in range(2))
    plain = build(model, Options(losses=losses, train=("w",)))
    again = build(model, Options(losses=losses, train=("w",), recompute=RecomputeSpec("block", pattern="*ul*")))
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((3, 4)).astype(np.float32) for name in ("x", "label0", "label1")}
    one, other = (ort.InferenceSession(b.model.SerializeToString()).run(["w_grad"], feeds)[0] for b in (plain, again))
    np.testing.assert_array_equal(one, other)


def test_no_two_copies_wait_for_the_same() -> None:
    """What one has waited for is there when the next one's turn comes."""
    waited = [name for node in written(made(exported(blocks(4)), "elementwise")) if node.op_type == "Concat"
              for name in node.input]  # fmt: skip
    assert len(waited) > 20 and len(set(waited)) == len(waited)


def test_what_waits_has_the_type_that_it_had() -> None:
    built = made(exported(blocks(2)), "elementwise")
    nodes, types = written(built), built.graph.types
    zeros = {node.output[0] for node in nodes if node.op_type == "Expand"}
    held = [node for node in nodes if node.op_type == "Reshape" and node.input[1] in zeros]
    assert held and all(types[node.output[0]] == types[node.input[0]] for node in held)


def test_an_output_that_is_absent_is_absent_in_the_copy() -> None:
    model = small("h = Mul(x, w) t = Identity(h) y = Sin(t)")
    model.graph.node[1].CopyFrom(helper.make_node("LayerNormalization", ["h", "w"], ["t", "", "s"], name="norm"))
    model.graph.node[2].CopyFrom(helper.make_node("Mul", ["t", "s"], ["m"], name="times"))
    model.graph.node.append(helper.make_node("Sin", ["m"], ["y"], name="sine"))
    nodes = {node.name: list(node.output) for node in made(model, "block:h").model.graph.node}
    assert nodes["recompute/norm"] == ["t_recomputed", "", "s_recomputed"]
