"""Reports against counts made by hand or by numpy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from markdown_it import MarkdownIt
from onnx import helper, numpy_helper

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.common.flags import as_cli_flags
from onnxgrad_cli.cost.training_cost import Cost, cost
from onnxgrad_cli.errors import CheckFailed, OnnxgradError, Refusal, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.record import Training
from onnxgrad_cli.report import FORMATS, File, Report, make_report, render
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
    report = make_report(error=OnnxgradError("no file 'x'", "look again"), model="x")
    assert (report.status, report.error, report.hint, report.cost) == ("failed", "no file 'x'", "look again", None)
    for kind in FORMATS:
        assert "look again" in render(report, kind)


def test_a_failed_check_names_what_failed() -> None:
    proof = Proof("failed", steps=[ProofStep("gradients", "failed", "wrong: w1", 0.1)])
    report = make_report(built=build(mlp()), error=CheckFailed("wrong"), proof=proof)
    assert report.status == "check_failed" and "(gradients)" in report.verdict


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


# -- the model describes itself ------------------------------------------------------------------------------


def test_versions_are_those_that_run() -> None:
    versions: dict[str, Any] = make_report().versions
    assert (versions["onnx"], versions["numpy"]) == (onnx.__version__, np.__version__)
    assert list(versions) == ["onnxgrad", "onnx", "onnxruntime", "numpy", "Python"]


def test_a_target_does_not_change_what_a_step_costs() -> None:
    """Its functions hide sizes from shape inference, which a product then has from its other factor."""
    counts = []
    for target in ("standard", "ort-cpu"):
        model = onnx.load(Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx")
        built = build(model, Options(losses=(LossSpec("cross-entropy"),), target=target))
        counts.append(cost(built.graph, built.training).flops_backward)
    assert abs(counts[0] - counts[1]) < 0.01 * counts[0]
