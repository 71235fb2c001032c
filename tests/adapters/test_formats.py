"""The three forms of adapters: what they hold, that each is read as it was written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.adapters.own_file import adapter_bytes
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.metadata import Adapter
from tests.cli_harness import Shell
from tests.facts import facts, raises

RNG = np.random.default_rng(0)
Arrays = dict[str, np.ndarray]

SCOPES = "pkg.torch.onnx.name_scopes"


def network() -> ModelProto:
    """Two layers, as PyTorch's two exporters write them: one named by its node, the other by metadata."""
    text = """<ir_version: 10, opset_import: ["": 18]> g (float[n, 6] x) => (float[n, 5] y)
    { h = MatMul(x, val_1) t = Tanh(h) y = Gemm<transB = 1>(t, last.weight, last.bias) }"""
    model = parser.parse_model(text.replace("last.", "last_"))
    first, _, last = model.graph.node
    first.name = "/net/net.0/MatMul"
    last.input[1], last.input[2] = "last.weight", "last.bias"
    last.metadata_props.add(key=SCOPES, value="['', 'head', 'head.last', 'linear']")
    for name, shape in {"val_1": (6, 8), "last.weight": (5, 8), "last.bias": (5,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name))
    return model


ADAPTERS = [Adapter("val_1", "a1", "b1", 2, 3.0, "rslora"), Adapter("last.weight", "a2", "b2", 2, 3.0, "rslora")]
SHAPES = {"a1": (6, 2), "b1": (2, 8), "a2": (2, 8), "b2": (5, 2)}


def factors() -> Arrays:
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    return Executor(model, fallback=False)({"x": x})["y"]


@pytest.mark.parametrize("out", ["a.safetensors", "a.onnx_adapter", "folder", "peft:a.b", "safetensors:a.bin"])
def test_what_is_written_is_read_and_written_over(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, values, x = network(), factors(), RNG.standard_normal((3, 6)).astype(np.float32)
    for _ in range(2):  # what is ours is replaced
        target = AdapterTarget(out)
        target.check(model, None, False)
        target.save(model, ADAPTERS, values)
    found = run(merge(model, *read_adapters(target.path, model)), x)
    np.testing.assert_allclose(found, run(merge(model, ADAPTERS, values), x), rtol=1e-5, atol=1e-5)
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".tmp", ".lock")]


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    weights, _ = AdapterTarget(f"peft:{tmp_path}").save(network(), ADAPTERS, factors())
    weights.rename(tmp_path / "adapter_model.bin")
    with raises(OnnxgradError, "unreadable_file", "adapter_model.bin"):
        read_adapters(tmp_path, network())


def test_damaged_files(tmp_path: Path) -> None:
    """Whatever bytes are cut or changed: the same adapter, or an error of ours that says what is wrong."""
    model = network()
    file = tmp_path / "a.onnx_adapter"
    AdapterTarget(file).save(model, ADAPTERS, factors())
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for end in (8, 40, len(data) // 2):
        file.write_bytes(data[:end])
        with pytest.raises(OnnxgradError) as cut:
            read_adapters(file, model)
        assert facts(cut.value)[:2] == ("unreadable_file", "a.onnx_adapter")
    for _ in range(100):
        broken = bytearray(data)
        for place in rng.integers(8, len(data), 4):
            broken[place] = rng.integers(256)
        file.write_bytes(broken)
        try:
            read_adapters(file, model)
        except OnnxgradError as error:
            assert error.code == "not_finite" or "a.onnx_adapter" in error.message


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    model = network()
    for name in ("a.onnx_adapter", "a.safetensors"):
        (tmp_path / name).write_bytes(b"precious" * 1000)
        with raises(UsageError, "file_exists", name):
            AdapterTarget(tmp_path / name).check(model, None, False)
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises(UsageError, "file_exists", "adapter_config.json"):
        AdapterTarget(tmp_path).check(model, None, False)
    with raises(UsageError, "wrong_value", "adapter", "a.bin"):
        AdapterTarget("a.bin")
    with raises(OnnxgradError, "missing_file", tmp_path.parent.name, "adapter_config"):
        read_adapters(tmp_path.parent, model)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "net.onnx")
    np.savez("data.npz", x=RNG.standard_normal((32, 6)).astype(np.float32), label=np.ones((32, 5), np.float32))
    return Shell(tmp_path, capsys)


TRAIN = ("train", "net.onnx", "--data", "data.npz", "--learning-rate", "0.05", "--threads", "1", "--json")


def test_the_command(shell: Shell) -> None:
    """Train, turn the adapter into the other forms, go on from each of them, and write what takes it at run time."""
    how = ("--lora", "2:4", "--lora-scaling", "rslora", "--lora-dropout", "0.1", "--epochs", "8")
    done = shell(*TRAIN, *how, "--adapter", "found", "-o", "one.onnx")
    assert done.code == 0, done.err
    assert "found/adapter_config.json" in "".join(done.json["files"])
    assert json.loads(Path("found/adapter_config.json").read_text())["use_rslora"]
    assert not any(node.op_type == "Dropout" for node in onnx.load("one.onnx").graph.node)
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    wanted = run(onnx.load("one.onnx"), x)
    read = {"found": "adapter_model.safetensors", "b.onnx_adapter": "b.onnx_adapter", "c.safetensors": "c.safetensors"}
    for source, out in (("found", "b.onnx_adapter"), ("b.onnx_adapter", "c.safetensors"), ("c.safetensors", "peft:d")):
        told = shell("export", source, "--model", "net.onnx", "--adapter", out, "--json")
        assert told.code == 0, told.err
        assert not any(name.endswith(".onnx") for name in told.json["files"])
        for again in (("export", source, "--model", "net.onnx"), (*TRAIN, "--adapter-from", source, "-o", "new.onnx")):
            refused = shell(*again, "--adapter", source, "--force")
            assert refused.code == 2 and refused.facts == ("conflict", read[source])
        assert shell("export", source, "--model", "net.onnx", "-o", "again.onnx", "--force").code == 0
        np.testing.assert_allclose(run(onnx.load("again.onnx"), x), wanted, rtol=1e-5, atol=1e-5)
        if source == "c.safetensors":
            continue
        told = shell(*TRAIN, "--adapter-from", source, "--epochs", "1", "--batch-size", "32", "-o", "two.onnx",
                     "--run", f"run-{out}")  # fmt: skip
        assert told.code == 0, told.err
        data = np.load("data.npz")
        loss = np.mean((run(onnx.load("one.onnx"), data["x"]) - data["label"]) ** 2)
        assert told.json["epochs"][0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert shell("export", "found", "--model", "net.onnx", "--adaptable", "-o", "base.onnx").code == 0
    overridable = {value.name for value in onnx.load("base.onnx").graph.input} - {"x"}
    assert overridable == {f"{module}.lora_{kind}.weight" for module in ("net.0", "head.last") for kind in "AB"}


def test_another_model_than_the_one_that_was_trained(shell: Shell) -> None:
    """Of equal shapes and names, and with other weights where adapters leave them as they are."""
    other = network()
    (first, *_) = other.graph.initializer
    first.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(first) * 2, first.name))
    onnx.save(other, "other.onnx")
    done = shell(*TRAIN, "--lora", "2", "--epochs", "1", "--adapter", "a.safetensors", "-o", "one.onnx", "--run", "r")
    assert done.code == 0, done.err
    assert shell("export", "a.safetensors", "--model", "net.onnx", "--adapter", "a.onnx_adapter").code == 0
    refused = shell("export", "r", "--model", "other.onnx", "-o", "no.onnx")
    assert refused.code == 1 and refused.facts == ("mismatch", "checkpoint.safetensors")
    assert shell("export", "r", "--model", "net.onnx", "-o", "two.onnx").code == 0
    onnx.save(network(), "apart.onnx", save_as_external_data=True, location="apart.bin", size_threshold=0)
    elsewhere = shell("export", "r", "--model", "apart.onnx", "-o", "four.onnx")
    assert elsewhere.code == 0, elsewhere.err
    for source in ("a.safetensors", "a.onnx_adapter"):
        for model in ("net.onnx", "other.onnx"):
            told = shell("train", model, *TRAIN[2:], "--adapter-from", source, "--epochs", "1", "-o", "three.onnx",
                         "--run", f"run-{source}-{model[:3]}", "--force")  # fmt: skip
            assert told.code == 0 and ("caution: " in told.err) == (model == "other.onnx"), told.err


def test_a_file_without_adapters(shell: Shell) -> None:
    Path("none.safetensors").write_bytes(adapter_bytes([], {"net.0.bias": np.zeros(1, np.float32)}))
    refused = shell(*TRAIN, "--adapter-from", "none.safetensors")
    assert refused.code == 2 and refused.facts == ("no_data", "adapter_from")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("export", "run", "--model", "net.onnx", "--adaptable", "--merge"), ("conflict", "merge", "adaptable")),
        (("export", "found", "--model", "net.onnx", "--test-data", "data.npz"), ("conflict", "test_data", "merge")),
        ((*TRAIN, "--adapter", "found"), ("missing_value", "adapter")),
        ((*TRAIN, "--lora", "2", "--adapter", "a.bin"), ("wrong_value", "adapter", "a.bin")),
        ((*TRAIN, "--lora", "2", "--train", "last.bias", "--adapter", "found"), ("conflict", "adapter", "last.bias")),
        ((*TRAIN, "--lora-dropout", "0.5"), ("missing_value", "lora_dropout")),
        ((*TRAIN, "--lora-scaling", "rslora"), ("missing_value", "lora_scaling")),
        ((*TRAIN, "--lora", "3", "--adapter-from", "given"), ("conflict", "adapter_from", "2", "3")),
        (
            (*TRAIN, "--lora", "2", "--lora-target", "val_1", "--adapter-from", "given"),
            ("conflict", "adapter_from", "last.weight"),
        ),
        ((*TRAIN, "--adapter-from", "missing"), ("unreadable_file", "missing")),
        (("export", "missing.onnx_adapter", "--model", "net.onnx"), ("unreadable_file", "missing.onnx_adapter")),
    ],
)  # fmt: skip
def test_what_does_not_go_together(words: tuple[str, ...], why: tuple[str, ...], shell: Shell) -> None:
    """It is told before the first step, and nothing is written."""
    AdapterTarget("given").save(network(), ADAPTERS, factors())
    before = shell.files()
    refused = shell(*words)
    assert refused.facts == why
    assert shell.files() == before
