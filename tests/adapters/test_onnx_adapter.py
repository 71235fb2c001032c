"""Adapters for onnxruntime: their names and shapes, and models into which onnxruntime puts them while it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.adapters.merge import adaptable, merge
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.metadata import Adapter
from onnxgrad_cli.options import LoraSpec, Options
from tests.adapters.test_formats import ADAPTERS, factors, network
from tests.facts import raises
from tests.passes import test_adapters as floats, test_quantized_adapters as integers

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]
BY_TYPE = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 2e-5}


@pytest.fixture(autouse=True)
def quiet() -> None:
    ort.set_default_logger_severity(3)


def run(model: ModelProto, feeds: Arrays, adapter: Path | None = None, optimized: bool = True) -> np.ndarray:
    settings, options = ort.SessionOptions(), ort.RunOptions()
    if not optimized:
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if adapter is not None:
        loaded = ort.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    session = ort.InferenceSession(model.SerializeToString(), settings)
    names = [value.name for value in session.get_outputs()][:1]
    return session.run(names, feeds, options)[0]


def case(name: str) -> tuple[ModelProto, Arrays, list[Adapter], Arrays]:
    """A model of a form, its input, an adapter of its matrix, and random factors."""
    if name in floats.FORMS:
        form = floats.FORMS[name]
        model, stored = floats.model_of(form)
        feeds, weight, kind = {"x": stored["x"]}, "w", np.dtype(np.float64 if form.dtype == "double" else np.float32)
    else:
        own = integers.FORMS[name]
        model, feeds, weight, kind = integers.model_of(own), {"x": integers.X}, own.weight, np.dtype(np.float32)
    copy = ModelProto()
    copy.CopyFrom(model)
    built = build(copy, Options(lora=LoraSpec(2, 3.0), lora_target=(weight,)))
    adapters = built.training.adapters
    names = [factor for each in adapters for factor in (each.a, each.b)]
    return (
        model,
        feeds,
        adapters,
        {n: RNG.standard_normal(built.graph.initializers[n].dims).astype(kind) for n in names},
    )


@pytest.mark.parametrize("name", [*floats.FORMS, *integers.FORMS])
@pytest.mark.thinned(3)
def test_every_form_takes_an_adapter_at_run_time(name: str, tmp_path: Path) -> None:
    """Without one it computes the model's very numbers, with one what the merged model does, and it is read again."""
    model, feeds, adapters, values = case(name)
    base, file = adaptable(model, adapters, values), tmp_path / "a.onnx_adapter"
    AdapterTarget(file).save(model, adapters, values)
    merged, again = merge(model, adapters, values), merge(model, *read_adapters(file, model))
    for optimized in (True, False):
        wanted, before = (run(each, feeds, optimized=optimized) for each in (merged, model))
        bound = BY_TYPE[wanted.dtype] * np.abs(wanted).max()
        assert np.array_equal(run(base, feeds, optimized=optimized), before)
        np.testing.assert_allclose(run(base, feeds, file, optimized), wanted, rtol=0, atol=bound)
        np.testing.assert_allclose(run(again, feeds, optimized=optimized), wanted, rtol=0, atol=bound)
        assert np.abs(wanted - before).max() > 0.1 * np.abs(before).max()


def test_what_was_trained_in_full_travels_too(tmp_path: Path) -> None:
    """A weight beside the adapters is overridden by its name, and keeps its value without an adapter."""
    text = """<ir_version: 3, opset_import: ["": 17]>
    g (float[n, 4] x, float[4, 6] w, float[6] c) => (float[n, 6] y)
    <float[4, 6] w = {1, 0, 2, 0, 0, 1, 0, 1, 0, 0, 3, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 2},
     float[6] c = {1, 2, 3, 4, 5, 6}>
    { h = MatMul(x, w) y = Add(h, c) }"""
    model = parser.parse_model(text)
    adapters = [Adapter("w", "a", "b", 1, 2.0)]
    values = {"a": np.ones((4, 1), np.float32), "b": np.ones((1, 6), np.float32), "c": np.zeros(6, np.float32)}
    x = {"x": np.ones((2, 4), np.float32)}
    base = adaptable(model, adapters, values)
    assert [value.name for value in base.graph.input] == ["x", "w.lora_A.weight", "w.lora_B.weight", "c"]
    AdapterTarget(tmp_path / "a.onnx_adapter").save(model, adapters, values)
    assert np.array_equal(run(base, x), run(model, x))
    np.testing.assert_array_equal(run(base, x, tmp_path / "a.onnx_adapter"), run(merge(model, adapters, values), x))
    with raises(UsageError, "conflict", "adaptable", "d"):
        adaptable(model, adapters, {**values, "d": np.zeros(3)})


def test_modules_that_share_a_matrix(tmp_path: Path) -> None:
    """Each takes factors of its own at run time; what is read back must be one adapter."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y)
    { h = MatMul(x, w) y = MatMul(h, w) }"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal((4, 4)).astype(np.float32), "w"))
    for node, name in zip(model.graph.node, ("/one/MatMul", "/two/MatMul"), strict=True):
        node.name = name
    adapters = [Adapter("w", "a", "b", 1, 1.0)]
    values = {"a": np.ones((4, 1), np.float32), "b": np.ones((1, 4), np.float32)}
    file = tmp_path / "a.onnx_adapter"
    AdapterTarget(file).save(model, adapters, values)
    assert len(read_adapters(file, model)[0]) == 1
    parameters = ort.AdapterFormat.read_adapter(str(file)).get_parameters()
    assert sorted(parameters) == [f"{m}.lora_{f}.weight" for m in ("one", "two") for f in "AB"]
    kept = {name: ort.OrtValue.ortvalue_from_numpy(np.array(value.numpy())) for name, value in parameters.items()}
    for change in ("another", "none"):
        other = dict(kept)
        if change == "none":
            del other["two.lora_A.weight"], other["two.lora_B.weight"]
        else:
            other["two.lora_A.weight"] = ort.OrtValue.ortvalue_from_numpy(np.zeros((4, 1), np.float32))
        written = ort.AdapterFormat()
        written.set_parameters(other)
        written.export_adapter(str(file))
        with raises(OnnxgradError, "mismatch", "one", "two", "w"):
            read_adapters(file, model)


def test_an_onnx_adapter_has_the_names_and_shapes_of_others(tmp_path: Path) -> None:
    file, values = tmp_path / "a.onnx_adapter", factors()
    AdapterTarget(file).save(network(), ADAPTERS, values)
    parameters = ort.AdapterFormat.read_adapter(str(file)).get_parameters()
    assert {name: tuple(value.shape()) for name, value in parameters.items()} == {
        "net.0.lora_A.weight": (6, 2), "net.0.lora_B.weight": (2, 8),
        "head.last.lora_A.weight": (8, 2), "head.last.lora_B.weight": (2, 5),
    }  # fmt: skip
    np.testing.assert_allclose(parameters["head.last.lora_B.weight"].numpy(), values["b2"].T * 3 / 2**0.5, rtol=1e-6)
