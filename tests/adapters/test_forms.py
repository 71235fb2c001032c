"""The three forms of adapters: what they hold, that each is read as it was written, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
import torch
from onnx import ModelProto, numpy_helper, parser
from torch.nn import functional

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.adapters.own_file import adapter_bytes
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.modules import module_path
from onnxgrad_cli.metadata import Adapter
from tests.cli_harness import Shell

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


def by_torch(model: ModelProto, tensors: Arrays, x: np.ndarray, scale: float) -> np.ndarray:
    """What PEFT computes: W x + scale B A x, with its shapes, by its names."""
    stored = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in model.graph.initializer}
    given = {name.removeprefix("base_model.model."): torch.tensor(array) for name, array in tensors.items()}

    def layer(y: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        thin = functional.linear(y, given[f"{name}.lora_A.weight"])
        return functional.linear(y, weight) + scale * functional.linear(thin, given[f"{name}.lora_B.weight"])

    h = torch.tanh(layer(torch.tensor(x), stored["val_1"].T, "net.0"))
    return (layer(h, stored["last.weight"], "head.last") + stored["last.bias"]).numpy()


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    return Executor(model, fallback=False)({"x": x})["y"]


def test_a_folder_of_peft(tmp_path: Path) -> None:
    model, values, x = network(), factors(), RNG.standard_normal((3, 6)).astype(np.float32)
    files = AdapterTarget(f"{tmp_path / 'found'}/").save(model, ADAPTERS, values)
    assert [file.name for file in files] == ["adapter_model.safetensors", "adapter_config.json"]
    config = json.loads(files[1].read_text())
    assert {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "use_rslora": True, "bias": "none"}.items() <= config.items()
    assert config["target_modules"] == ["head.last", "net.0"]
    tensors = safetensors.numpy.load_file(files[0])
    assert {name: array.shape for name, array in tensors.items()} == {
        "base_model.model.net.0.lora_A.weight": (2, 6), "base_model.model.net.0.lora_B.weight": (8, 2),
        "base_model.model.head.last.lora_A.weight": (2, 8), "base_model.model.head.last.lora_B.weight": (5, 2),
    }  # fmt: skip
    merged = run(merge(model, ADAPTERS, values), x)
    np.testing.assert_allclose(merged, by_torch(model, tensors, x, 3 / 2**0.5), rtol=1e-4, atol=1e-4)
    adapters, again = read_adapters(tmp_path / "found", model)
    kinds = {(each.weight, each.rank, each.alpha, each.scaling) for each in adapters}
    assert kinds == {(name, 2, 3.0, "rslora") for name in ("val_1", "last.weight")}
    assert np.array_equal(run(merge(model, adapters, again), x), merged)


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


@pytest.mark.parametrize("out", ["shut", "shut/peft", "shut/deep/peft", "peft:shut/a.b"])
def test_a_folder_that_can_not_be_written_is_told_before_the_work(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shut").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "shut")
    with pytest.raises(OnnxgradError, match=r"`adapter`: 'shut.*' can't be (created|written to): permission denied"):
        AdapterTarget(out).check(network(), None, False)
    Path("file").touch()
    with pytest.raises(OnnxgradError, match=r"'file/peft' is not a folder: '.*file' is a file"):
        AdapterTarget("file/peft").check(network(), None, False)


def test_an_onnx_adapter_has_the_names_and_shapes_of_others(tmp_path: Path) -> None:
    file, values = tmp_path / "a.onnx_adapter", factors()
    AdapterTarget(file).save(network(), ADAPTERS, values)
    parameters = ort.AdapterFormat.read_adapter(str(file)).get_parameters()
    assert {name: tuple(value.shape()) for name, value in parameters.items()} == {
        "net.0.lora_A.weight": (6, 2), "net.0.lora_B.weight": (2, 8),
        "head.last.lora_A.weight": (8, 2), "head.last.lora_B.weight": (2, 5),
    }  # fmt: skip
    np.testing.assert_allclose(parameters["head.last.lora_B.weight"].numpy(), values["b2"].T * 3 / 2**0.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/layers.0/q_proj/MatMul", "layers.0.q_proj"), ("/layers.0/mlp/mlp.0/MatMul", "layers.0.mlp.0"),
        ("/net/net.0/net.0.1/Gemm", "net.0.1"), ("/layer1/layer1.0/conv1/Conv", "layer1.0.conv1"), ("MatMul_3", ""),
    ],
)  # fmt: skip
def test_modules_that_the_older_exporter_names(name: str, path: str) -> None:
    """As PyTorch writes them: a Sequential stands before its children, whose names begin with its own."""
    assert module_path(onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name=name)) == path


# -- what is refused --------------------------------------------------------------------------------------------------


def test_modules_that_nobody_knows(tmp_path: Path) -> None:
    model = network()
    model.graph.node[0].name = "MatMul_3"
    with pytest.raises(UsageError) as error:
        AdapterTarget(tmp_path / "found").save(model, ADAPTERS, factors())
    assert error.value.details == ("val_1: neither names nor metadata say which module reads it",)
    assert "write an .onnx_adapter" in (error.value.hint or "") and not list(tmp_path.iterdir())
    model.graph.node[0].name = "/head/last/MatMul"
    with pytest.raises(UsageError) as error:
        AdapterTarget(tmp_path / "found").save(model, ADAPTERS, factors())
    assert any("'head.last' also has another matrix" in line for line in error.value.details)
    model.graph.node[0].name, model.graph.initializer[0].name = "/net/MatMul", "net.w"
    model.graph.node[0].input[1] = "net.w"
    own = {name: array for name, array in factors().items() if name in ("a1", "b1")}
    with pytest.raises(UsageError) as error:
        AdapterTarget(tmp_path / "found").save(model, [Adapter("net.w", "a1", "b1", 2, 2.0)], own)
    assert error.value.details[0] == "net.w: it is the parameter 'w' of 'net', not a layer of its own"
    with pytest.raises(UsageError, match=r"can't hold 'last.bias', which was trained in full"):
        AdapterTarget(tmp_path / "found").save(network(), ADAPTERS, {**factors(), "last.bias": np.zeros(5, np.float32)})


def changed(**entries: Any) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, tensors: config.update(entries)


def tensor(name: str, array: np.ndarray | None) -> Callable[[dict[str, Any], Arrays], None]:
    def change(config: dict[str, Any], tensors: Arrays) -> None:
        tensors.pop(name, None)
        tensors.update({} if array is None else {name: array})

    return change


A = "base_model.model.net.0.lora_A.weight"
STRANGE: dict[str, tuple[Callable[[dict[str, Any], Arrays], None], str]] = {
    "dora": (changed(use_dora=True), "the magnitudes of 'net.0' in "),
    "of tomorrow": (changed(use_wonder={"a": 1}), "describes more than two LoRA matrices for each weight: use_wonder"),
    "pissa": (changed(init_lora_weights="pissa"), "init_lora_weights"),
    "a bias": (changed(bias="all"), "more than two LoRA matrices for each weight: bias"),
    "modules to save": (changed(modules_to_save=["x"]), "modules_to_save"),
    "another kind": (changed(peft_type="IA3"), "does not describe LoRA but 'IA3'"),
    "no rank": (changed(r="8"), "has no valid rank 'r' or 'lora_alpha'"),
    "a rank of nothing": (changed(r=0), "has no valid rank 'r' or 'lora_alpha'"),
    "no alpha": (changed(lora_alpha=None), "has no valid rank 'r' or 'lora_alpha'"),
    "a rank of many digits": (changed(r=10**400), "has no valid rank 'r' or 'lora_alpha'"),
    "an alpha of many digits": (changed(lora_alpha=10**400), "has no valid rank 'r' or 'lora_alpha'"),
    "a list": (lambda config, tensors: config.clear(), "does not describe LoRA but None"),
    "infinite": (changed(lora_alpha=float("inf")), "has no valid rank 'r' or 'lora_alpha'"),
    "another rank": (changed(r=3), "but its LoRA matrices of rank 3 are [2, 6] and [8, 2]"),
    "patterns that take for ever": (changed(rank_pattern={"(a+)+b": 2}), "a pattern that is not a module's name"),
    "of others": (changed(target_modules=["last"]), "its configuration gives this module no adapter"),
    "excluded": (changed(exclude_modules=["0"]), "its configuration gives this module no adapter"),
    "patterns of text": (changed(rank_pattern="x"), "has no valid rank 'r' or 'lora_alpha'"),
    "another shape": (tensor(A, np.zeros((2, 7), np.float32)), "'net.0' maps 6 values to 8"),
    "one factor": (tensor(A, None), "'net.0' lacks a LoRA matrix"),
    "another tensor": (
        tensor("base_model.model.net.0.weight", np.zeros(3)), "not a floating-point LoRA matrix of a layer",
    ),
    "integers": (tensor(A, np.zeros((2, 6), np.int8)), "of I8, which is not a floating-point LoRA matrix"),
    "not a number": (tensor(A, np.full((2, 6), np.nan, np.float32)), "values that are not finite"),
    "another module": (
        tensor("base_model.model.nit.0.lora_A.weight", np.zeros((2, 6), np.float32)), "'nit.0' lacks a LoRA matrix"),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_folders_of_strangers(name: str, tmp_path: Path) -> None:
    model = network()
    weights, file = AdapterTarget(f"peft:{tmp_path}").save(model, ADAPTERS, factors())
    config, tensors = json.loads(file.read_text()), safetensors.numpy.load_file(weights)
    change, why = STRANGE[name]
    change(config, tensors)
    file.write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, weights)
    with pytest.raises(OnnxgradError) as error:
        read_adapters(tmp_path, model)
    assert why in error.value.message


@pytest.mark.parametrize("pattern", ["last", "la.t", r"head\.last", "^head.last$"])
def test_patterns_and_bfloat16(tmp_path: Path, pattern: str) -> None:
    """A pattern is the end of a module's path, its dots any character; numbers of two bytes are widened."""
    model, x = network(), RNG.standard_normal((3, 6)).astype(np.float32)
    weights, file = AdapterTarget(f"peft:{tmp_path}").save(model, ADAPTERS, factors())
    config = json.loads(file.read_text()) | {"alpha_pattern": {"t": 5, pattern: 7}, "use_rslora": False}
    file.write_text(json.dumps(config))
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in safetensors.numpy.load_file(weights).items()}
    safetensors.numpy.save_file(tensors, weights)
    adapters, values = read_adapters(tmp_path, model)
    assert {each.weight: each.alpha for each in adapters} == {"val_1": 3, "last.weight": 7}
    wide = {name: array.astype(np.float32) for name, array in tensors.items()}
    for name in ("A", "B"):
        key = f"base_model.model.head.last.lora_{name}.weight"
        wide[key] = wide[key] * np.float32(7 / 3 if name == "B" else 1)
    found = run(merge(model, adapters, values), x)
    np.testing.assert_allclose(found, by_torch(model, wide, x, 3 / 2), rtol=1e-4, atol=1e-4)


def test_modules_of_which_there_are_two(tmp_path: Path) -> None:
    """No adapter is given to one of two matrices by chance."""
    model = network()
    AdapterTarget(f"peft:{tmp_path}").save(model, ADAPTERS, factors())
    model.graph.node[0].name = "/head/last/MatMul"
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes().replace(b"net.0", b"NET.0"))
    with pytest.raises(OnnxgradError, match=r"an adapter of '(NET.0|head.last)', but the model has no such module"):
        read_adapters(tmp_path, model)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    weights, _ = AdapterTarget(f"peft:{tmp_path}").save(network(), ADAPTERS, factors())
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(OnnxgradError, match="is a pickle, which can run code, so it is not read"):
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
        with pytest.raises(OnnxgradError, match="is not an adapter of onnxruntime, or is damaged"):
            read_adapters(file, model)
    for _ in range(100):
        broken = bytearray(data)
        for place in rng.integers(8, len(data), 4):
            broken[place] = rng.integers(256)
        file.write_bytes(broken)
        try:
            read_adapters(file, model)
        except OnnxgradError as error:
            assert "a.onnx_adapter" in error.message or "not finite" in error.message


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    model = network()
    for name in ("a.onnx_adapter", "a.safetensors"):
        (tmp_path / name).write_bytes(b"precious" * 1000)
        with pytest.raises(UsageError, match="exists, and onnxgrad did not write it"):
            AdapterTarget(tmp_path / name).check(model, None, False)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="exists, and onnxgrad did not write it"):
        AdapterTarget(tmp_path).check(model, None, False)
    with pytest.raises(UsageError, match=r"the ending of 'a.bin' is not a known format"):
        AdapterTarget("a.bin")
    with pytest.raises(OnnxgradError, match=r"is a folder without the adapter_config.json of PEFT"):
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
    for source, out in (("found", "b.onnx_adapter"), ("b.onnx_adapter", "c.safetensors"), ("c.safetensors", "peft:d")):
        told = shell("export", source, "--model", "net.onnx", "--adapter", out, "--json")
        assert told.code == 0, told.err
        assert not any(name.endswith(".onnx") for name in told.json["files"])
        for again in (("export", source, "--model", "net.onnx"), (*TRAIN, "--adapter-from", source, "-o", "new.onnx")):
            refused = shell(*again, "--adapter", source, "--force")
            assert refused.code == 2 and "is an input, which is never overwritten" in refused.err
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
    assert refused.code == 1 and "belongs to another model" in refused.err
    assert shell("export", "r", "--model", "net.onnx", "-o", "two.onnx").code == 0
    onnx.save(network(), "apart.onnx", save_as_external_data=True, location="apart.bin", size_threshold=0)
    elsewhere = shell("export", "r", "--model", "apart.onnx", "-o", "four.onnx")
    assert elsewhere.code == 0, elsewhere.err
    for source in ("a.safetensors", "a.onnx_adapter"):
        for model in ("net.onnx", "other.onnx"):
            told = shell("train", model, *TRAIN[2:], "--adapter-from", source, "--epochs", "1", "-o", "three.onnx",
                         "--run", f"run-{source}-{model[:3]}", "--force")  # fmt: skip
            assert told.code == 0 and ("were trained on another model" in told.err) == (model == "other.onnx"), told.err


def test_a_file_without_adapters(shell: Shell) -> None:
    Path("none.safetensors").write_bytes(adapter_bytes([], {"net.0.bias": np.zeros(1, np.float32)}))
    refused = shell(*TRAIN, "--adapter-from", "none.safetensors")
    assert refused.code == 2 and "--adapter-from: there are no adapters in it" in refused.err, refused.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("export", "run/checkpoint.safetensors", "--model", "net.onnx", "--adaptable", "--merge"), "--merge can't be"),
        (("export", "found", "--model", "net.onnx", "--test-data", "data.npz"), "--test-data requires --merge"),
        ((*TRAIN, "--adapter", "found"), "--adapter: no adapters are trained"),
        ((*TRAIN, "--lora", "2", "--adapter", "a.bin"), "--adapter: the ending of 'a.bin'"),
        ((*TRAIN, "--lora", "2", "--train", "last.bias", "--adapter", "found"), "can't hold 'last.bias'"),
        ((*TRAIN, "--lora-dropout", "0.5"), "--lora-dropout requires adapters"),
        ((*TRAIN, "--lora-scaling", "rslora"), "--lora-scaling requires adapters"),
        ((*TRAIN, "--lora", "3", "--adapter-from", "given"), "--adapter-from: the adapters have the rank 2"),
        ((*TRAIN, "--lora", "2", "--lora-target", "val_1", "--adapter-from", "given"), "does not adapt it"),
        ((*TRAIN, "--adapter-from", "missing"), "'missing' can't be read"),
        (("export", "missing.onnx_adapter", "--model", "net.onnx"), "'missing.onnx_adapter' can't be read"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(words: tuple[str, ...], why: str, shell: Shell) -> None:
    """It is told before the first step, and nothing is written."""
    AdapterTarget("given").save(network(), ADAPTERS, factors())
    before = shell.files()
    refused = shell(*words)
    assert refused.code in (1, 2) and why in refused.err + refused.out, refused.err
    assert shell.files() == before
