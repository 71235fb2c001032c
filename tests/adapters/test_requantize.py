"""Adapters rounded into matrices of integers, as onnxruntime's own kernels read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxgrad_cli.adapters.merge import merge, requantized
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import Adapter
from tests.cli_harness import Shell
from tests.facts import raises
from tests.passes.test_quantized_adapters import FORMS, RANK, K, N, few_bits, language_model, model_of

RNG = np.random.default_rng(0)
EYE = np.eye(K, dtype=np.float32)


def product(model: ModelProto, form: str) -> np.ndarray:
    """The matrix [K, N] as onnxruntime reads it."""
    return (Executor(model, fallback=False)({"x": EYE})["y"] - FORMS[form].bias) / FORMS[form].scale


def adapter(model: ModelProto, form: str, size: float) -> tuple[Adapter, dict[str, np.ndarray]]:
    """A random adapter of the form's matrix, as a training has it."""
    dims = next(tensor.dims for tensor in model.graph.initializer if tensor.name == "q")
    rows = (K, N) if list(dims[:2]) == [K, N] and "bits" not in form.split() else (N, K)
    names = ("a", "b") if rows == (K, N) else ("b", "a")
    shapes = dict(zip(names, ((rows[0], RANK), (RANK, rows[1])), strict=True))
    return Adapter("q", "a", "b", RANK, 2.0 * RANK), {
        name: (RNG.standard_normal(shape) * size).astype(np.float32) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_what_is_lost_is_told(form: str) -> None:
    """The operators stay, and by the kernels' own reading the sums are as far away as is said, and no bias matters."""
    model = model_of(FORMS[form])
    one, values = adapter(model, form, 0.3)
    found, lost = requantized(model, [one], values)
    assert [node.op_type for node in found.graph.node] == [node.op_type for node in model.graph.node]
    types = {tensor.name: tensor.data_type for tensor in found.graph.initializer}
    assert types == {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    wanted, before = product(merge(model, [one], values), form), product(model, form)
    error = np.linalg.norm(product(found, form) - wanted) / np.linalg.norm(wanted - before)
    assert lost == {"q": pytest.approx(error, rel=1e-2, abs=1e-5)}
    assert lost["q"] < (0.9 if form.startswith("2") else 0.4)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_lost_of_nothing(form: str) -> None:
    """An adapter that adds zeros leaves each integer and each scale as it was."""
    model = model_of(FORMS[form])
    one, values = adapter(model, form, 0.0)
    found, lost = requantized(model, [one], values)
    assert lost == {"q": 0}
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for tensor in found.graph.initializer:
        assert np.array_equal(numpy_helper.to_array(tensor), kept[tensor.name]), tensor.name


def test_scales_that_others_read_stay() -> None:
    form = few_bits(4, 16)
    model = model_of(form)
    model.graph.node.append(helper.make_node("Identity", ["s"], ["scales"]))
    model.graph.output.append(helper.make_tensor_value_info("scales", 1, None))
    one, values = adapter(model, "4 bits", 1.0)
    found, _ = requantized(model, [one], values)
    run = Executor(found, fallback=False)({"x": EYE})
    assert np.array_equal(run["scales"], form.stored["s"])
    assert found.graph.node[0].input[2] != "s"


@pytest.mark.parametrize("second", [["x", "q", "t"], ["x", "q", "s", "z"]])
def test_a_matrix_that_two_products_read_otherwise_is_refused(second: list[str]) -> None:
    """New integers would fit one of them alone."""
    form = few_bits(4, 16)
    model = model_of(form)
    node = model.graph.node.add()
    node.CopyFrom(model.graph.node[0])
    node.input[:], node.output[:], node.name = second, ["other"], "other"
    zeros = np.zeros((N, K // 16 // 2), np.uint8)
    stored = {"t": 2 * form.stored["s"], "z": zeros.reshape(-1)}
    model.graph.initializer.extend(numpy_helper.from_array(stored[name], name) for name in second if name in stored)
    model.graph.output.append(helper.make_tensor_value_info("other", 1, ["n", N]))
    one, values = adapter(model, "4 bits", 1.0)
    with raises(UsageError, "conflict", "merge", "q"):
        requantized(model, [one], values)
    node.input[:] = model.graph.node[0].input
    found, _ = requantized(model, [one], values)
    run = Executor(found, fallback=False)({"x": EYE})
    np.testing.assert_array_equal(run["other"], run["y"])


@pytest.mark.parametrize(
    ("keep_mode", "derived", "random"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_the_mode_is_that_of_inference_unless_it_is_kept_or_derivatives_hold_to_it(
    keep_mode: bool, derived: bool, random: bool
) -> None:
    """A Dropout that leaves out half of all numbers, in training mode."""
    model = model_of(few_bits(4, 16))
    stored = {"half": np.array(0.5, np.float32), "on": np.array(True)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    model.graph.node[0].output[0] = "whole"
    model.graph.node.append(helper.make_node("Dropout", ["whole", "half", "on"], ["y"]))
    if derived:
        model.metadata_props.add(key="onnxgrad.tensors", value="{}")
    one, values = adapter(model, "4 bits", 0.3)
    found, _ = requantized(model, [one], values, keep_mode=keep_mode)
    assert bool(np.mean(Executor(found, fallback=False)({"x": EYE})["y"] == 0) > 0.3) == random


def test_rows_that_are_looked_up() -> None:
    model = language_model()
    model.graph.node.append(helper.make_node("MatMul", ["m", "turned"], ["again"]))
    model.graph.node.insert(1, helper.make_node("Transpose", ["floats"], ["turned"], perm=[1, 0]))
    one = Adapter("table", "a", "b", 2, 2.0)
    with raises(UsageError, "conflict", "merge", "table", "x"):
        requantized(model, [one], {"a": np.ones((2, K), np.float32), "b": np.ones((12, 2), np.float32)})


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It tells what each output loses, on data drawn and given."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    onnx.save(model_of(FORMS["4 bits"]), "m.onnx")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, K)).astype(np.float32)
    np.savez("data.npz", x=x, label=np.ones((16, N), np.float32))
    np.savez("test.npz", x=x[:4])
    words = ("--lora", "3", "--epochs", "5", "--learning-rate", "0.05", "--threads", "1", "--adapter", "a.safetensors")
    done = shell("train", "m.onnx", "--data", "data.npz", *words, "-o", "beside.onnx")
    assert done.code == 0, done.err
    for more, kind in (((), "random"), (("--test-data", "test.npz"), "given")):
        told = shell("export", "a.safetensors", "--model", "m.onnx", "--merge", "-o", "merged.onnx", "--force", *more)
        assert told.code == 0, told.err
        assert "'q'" in told.err
        assert f" {kind} " in told.err
    runs = [Executor(onnx.load(name), fallback=False)({"x": x[:4]})["y"] for name in ("merged.onnx", "beside.onnx")]
    off = np.linalg.norm(runs[0] - runs[1]) / np.linalg.norm(runs[1])
    assert f"'y' by {off:.2%}" in told.err
    assert [node.op_type for node in onnx.load("merged.onnx").graph.node] == ["MatMulNBits"]
