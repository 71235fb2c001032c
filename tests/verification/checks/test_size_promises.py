"""A symbol on several axes is believed where the model does not run without, and dropped where it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.compat.artifacts import generate_artifacts
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.jobs.derive import run_derive
from onnxgrad_cli.jobs.inspect import inspect
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.declarations import UNTESTED, repeated, taken_to_be_equal
from onnxgrad_cli.report import Report
from onnxgrad_cli.verification.checks.size_promises import keep_promises
from tests.passes.prepare.test_declarations import RNG, SIZES, Declared, network, twin
from tests.passes.prepare.test_runtime_shape_probe import squeezed


def built(model: ModelProto, tmp_path: Path, **asked: bool) -> tuple[ModelProto, Report]:
    source, target = tmp_path / "model.onnx", tmp_path / "train.onnx"
    onnx.save(model, source)
    report = run_build(source, target, no_report=True, force=True, **asked)
    assert report.status == "built", report.verdict
    return onnx.load(target), report


def notes(report: Report) -> list[tuple[str, str]]:
    return [(caution.subject, caution.text) for caution in report.cautions if caution.kind == "note"]


@pytest.mark.parametrize("x", [["n", 3, "s", "s"], ["s", 3, "s", "w"], ["s", 3, "s", "s"]])
def test_one_name_for_two_sizes_is_dropped(x: Declared, tmp_path: Path) -> None:
    model, report = built(network(x, [None, 2]), tmp_path)
    assert "s" in dict(notes(report))
    assert "s" not in (shape_of(model.graph.input[0].type) or ())
    run = Executor(model, fallback=False)
    for batch, height, width in SIZES:
        data = np.float32(RNG.standard_normal((batch, 3, height, width)))
        label = np.float32(RNG.standard_normal((batch, 2)))
        got = run({"x": data, "label": label})
        for name, gradient in twin(data, label).items():
            np.testing.assert_allclose(got[f"{name}_grad"], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


TWO = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, k, 3] a, float[n, m, 3] b, float[n] idle) => (float[n, k, 3] y)
<float[3] w = {1, 2, 3}, int64[1] one = {1}> {
  t = Tanh(a) m = ReduceMean<axes = [1], keepdims = 0>(b) i = Unsqueeze(m, one) s = Add(t, i) y = Mul(s, w)
}"""


def test_what_the_model_needs_is_kept_and_costs_no_word(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(TWO.replace(", float[n] idle", ""))
    tested, report = built(model, tmp_path)
    assert not any("'n'" in text for _, text in notes(report))
    assert tested == built(model, tmp_path, verify=False)[0]


@pytest.mark.parametrize("batch", [-1, "-1", "?"])
@pytest.mark.thinned(3)
def test_no_cost_is_negative(batch: int | str, tmp_path: Path) -> None:
    report = built(network([batch, 3, "?", "?"], [batch, 2]), tmp_path)[1]
    assert report.cost is not None
    assert min(report.cost.flops_forward, report.cost.flops_backward, report.cost.kept_bytes) > 0
    assert report.proof is not None and report.proof.status == "passed"


def test_an_index_into_what_is_longer_is_no_sign() -> None:
    """A mask of more samples than there are is cut, one of fewer is not filled: the sizes are equal, as declared."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 3] a, float[n, 3] mask) => (float[n, 3] y) <int64[1] o = {0}, int64 z = {0}, int64 i = {1}> {
      s = Shape(a) k = Gather(s, o) e = Squeeze(k) r = Range(z, e, i) m = Gather(mask, r) y = Mul(a, m) }"""
    promises = keep_promises(onnx.parser.parse_model(text), None, True, {})
    assert promises.kept == ("n",) and not promises.broken and not promises.untested


def test_an_axis_alone_is_freed() -> None:
    model = onnx.parser.parse_model(TWO)
    promises = keep_promises(model, None, True, {})
    assert promises.broken == {"n": (("idle", 0),)}
    assert [shape_of(value.type) for value in model.graph.input] == [("n", "k", 3), ("n", "m", 3), ("?",)]


def test_a_derivative_does_not_believe_it_either(tmp_path: Path) -> None:
    source, target, told = tmp_path / "model.onnx", tmp_path / "vjp.onnx", list[str]()
    onnx.save(network(["n", 3, "s", "s"], ["n", 2]), source)
    run_derive(source, target, tell=lambda text, level: None if level else told.append(text))
    assert len(told) == 1 and "'s'" in told[0] and "several sizes" in told[0]
    run, forward = Executor(onnx.load(target), fallback=False), Executor(onnx.load(source), fallback=False)
    for batch, height, width in SIZES:
        data = np.float32(RNG.standard_normal((batch, 3, height, width)))
        label = np.float32(RNG.standard_normal((batch, 2)))
        cotangent = np.float32(2 * (forward({"x": data})["y"] - label) / label.size)
        got = run({"x": data, "y_grad": cotangent})
        for name, gradient in twin(data, label).items():
            np.testing.assert_allclose(got[f"{name}_grad"], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


def test_artifacts_do_not_believe_it_either(tmp_path: Path) -> None:
    generate_artifacts(network(["n", 3, "s", "s"], ["n", 2]), loss="mse", artifact_directory=tmp_path)
    for name in ("training_model.onnx", "eval_model.onnx"):
        assert "s" not in (shape_of(onnx.load(tmp_path / name).graph.input[0].type) or ())


def test_what_would_be_built_is_said(tmp_path: Path) -> None:
    assert "s" in dict(notes(inspect(network(["n", 3, "s", "s"], ["n", 2]))))


def test_a_build_in_memory_tells_what_it_believes() -> None:
    """It does not run the model; what stands on one axis alone it needs not believe."""
    model = network(["n", 3, "s", "s"], ["n", 2])
    cautions = build(model).training.cautions
    assert [caution.text for caution in cautions if caution.kind == "note"] == [taken_to_be_equal(["s"], UNTESTED).text]
    for told in (Options(dims={"s": 9}), Options(shapes={"x": (2, 3, 9, 9)})):
        assert taken_to_be_equal(["s"], UNTESTED) not in build(model, told).training.cautions


def test_what_is_not_tested_is_told(tmp_path: Path) -> None:
    _, report = built(network(["n", 3, "s", "s"], [None, 2]), tmp_path, verify=False)
    assert taken_to_be_equal(["s"], UNTESTED) in report.cautions


def test_a_model_that_runs_on_no_drawn_data_keeps_its_symbols() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, n] a) => (float[n, n] y) <int64[2] k = {11, 13}> { b = Reshape(a, k) y = Transpose(b) }"""
    promises = keep_promises(onnx.parser.parse_model(text), None, True, {})
    assert promises.kept == ("n",) and "not run" in promises.untested


def test_the_symbols_of_a_decoder_are_tested() -> None:
    """A mask is as long as the past and what is new together, and 'unused' is as long as it likes."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[b, s, 4] x, float[b, "past_s + s"] mask, float[b, past_s, 4] past, float[s] unused) => (float[b, t, 4] y)
    <int64[1] last = {-1}> {
      all = Concat<axis = 1>(past, x) e = Unsqueeze(mask, last) m = Mul(all, e) y = Tanh(m) }"""
    promises = keep_promises(onnx.parser.parse_model(text), None, True, {})
    assert promises.kept == ("b",) and promises.broken == {"s": (("x", 1), ("unused", 0))} and not promises.untested


def test_one_symbol_on_one_axis_is_no_question() -> None:
    assert not repeated(network(["n", 3, "h", "w"]), {})
    assert not repeated(network(["n", 3, "s", "s"]), {"s": (8,)})
    assert not repeated(network(["n", 3, "s", "s"]), {"x": (1, 3, 8, 8)})


def test_a_shape_that_a_run_contradicts_is_no_build(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "train.onnx"
    model = squeezed()
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None, 2]))
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["n", 5, 3]))
    onnx.save(model, source)
    report = run_build(source, target, Options(infer_by_run=False), no_report=True)
    assert report.status == "check_failed" and "'h'" in str(report.error) and "[2, 8, 3]" in str(report.error)
    assert not target.exists()
    inspected = inspect(source, Options(infer_by_run=False))
    assert inspected.status == "check_failed" and inspected.error == report.error, "what a build would do"
    assert run_build(source, target, no_report=True).status == "built"


def test_a_size_that_is_given_is_no_question(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "train.onnx"
    onnx.save(network(["n", 3, "s", "s"], ["n", 2]), source)
    report = run_build(source, target, Options(dims={"s": 9}), no_report=True)
    assert report.status == "built" and "'s'" not in notes(report)


def test_sizes_of_an_empty_past_say_nothing() -> None:
    """Where the past has no entries its batch may be any: that is no reason to forget that all batches are one."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[batch, past_length, width] past, float[batch, length, 4] x) => (float[batch, total, 4] y)
    { y = Concat<axis = 1>(past, x) }
    """)
    promises = keep_promises(model, None, True, {})
    assert promises.kept == ("batch",) and not promises.broken
