"""Folders of PEFT: what they hold, and what is refused of the folders of others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from onnx import ModelProto, numpy_helper
from torch.nn import functional

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.errors import OnnxgradError
from tests.adapters.test_formats import ADAPTERS, factors, network, run
from tests.facts import raises

RNG = np.random.default_rng(0)


Arrays = dict[str, np.ndarray]


def by_torch(model: ModelProto, tensors: Arrays, x: np.ndarray, scale: float) -> np.ndarray:
    """What PEFT computes: W x + scale B A x, with its shapes, by its names."""
    stored = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in model.graph.initializer}
    given = {name.removeprefix("base_model.model."): torch.tensor(array) for name, array in tensors.items()}

    def layer(y: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        thin = functional.linear(y, given[f"{name}.lora_A.weight"])
        return functional.linear(y, weight) + scale * functional.linear(thin, given[f"{name}.lora_B.weight"])

    h = torch.tanh(layer(torch.tensor(x), stored["val_1"].T, "net.0"))
    return (layer(h, stored["last.weight"], "head.last") + stored["last.bias"]).numpy()


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


@pytest.mark.parametrize("out", ["shut", "shut/peft", "shut/deep/peft", "peft:shut/a.b"])
def test_a_folder_that_can_not_be_written_is_told_before_the_work(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shut").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "shut")
    with raises(OnnxgradError, "unwritable_file", "adapter", out.rpartition("/")[2]):
        AdapterTarget(out).check(network(), None, False)
    Path("file").touch()
    with raises(OnnxgradError, "unwritable_file", "adapter", "peft", "file"):
        AdapterTarget("file/peft").check(network(), None, False)


def changed(**entries: Any) -> Callable[[dict[str, Any], Arrays], None]:
    return lambda config, tensors: config.update(entries)


def tensor(name: str, array: np.ndarray | None) -> Callable[[dict[str, Any], Arrays], None]:
    def change(config: dict[str, Any], tensors: Arrays) -> None:
        tensors.pop(name, None)
        tensors.update({} if array is None else {name: array})

    return change


A = "base_model.model.net.0.lora_A.weight"


RANKS = ("unreadable_file", "adapter_config.json", "r", "lora_alpha")
FOLDER = ("mismatch", "peft", "net.0")


def more(entry: str) -> tuple[str, ...]:
    return ("unreadable_file", "adapter_config.json", entry)


STRANGE: dict[str, tuple[Callable[[dict[str, Any], Arrays], None], tuple[str, ...]]] = {
    "dora": (changed(use_dora=True), ("mismatch", "net.0", "peft", "use_dora", "8")),
    "of tomorrow": (changed(use_wonder={"a": 1}), more("use_wonder")),
    "pissa": (changed(init_lora_weights="pissa"), more("init_lora_weights")),
    "a bias": (changed(bias="all"), more("bias")),
    "modules to save": (changed(modules_to_save=["x"]), more("modules_to_save")),
    "another kind": (changed(peft_type="IA3"), (*more("IA3"), "LoRA")),
    "no rank": (changed(r="8"), RANKS),
    "a rank of nothing": (changed(r=0), RANKS),
    "no alpha": (changed(lora_alpha=None), RANKS),
    "a rank of many digits": (changed(r=10**400), RANKS),
    "an alpha of many digits": (changed(lora_alpha=10**400), RANKS),
    "a list": (lambda config, tensors: config.clear(), more("LoRA")),
    "infinite": (changed(lora_alpha=float("inf")), RANKS),
    "another rank": (changed(r=3), (*FOLDER, "6", "8", "LoRA", "2", "6", "8", "2")),
    "patterns that take for ever": (
        changed(rank_pattern={"(a+)+b": 2}), ("unreadable_file", "rank_pattern", "(a+)+b")),
    "of others": (changed(target_modules=["last"]), ("mismatch", "peft", "LoRA", "net.0")),
    "excluded": (changed(exclude_modules=["0"]), ("mismatch", "peft", "LoRA", "net.0")),
    "patterns of text": (changed(rank_pattern="x"), RANKS),
    "another shape": (
        tensor(A, np.zeros((2, 7), np.float32)), (*FOLDER, "6", "8", "LoRA", "2", "7", "8", "2")),
    "one factor": (tensor(A, None), ("unreadable_file", "adapter_model.safetensors", "net.0", "LoRA")),
    "another tensor": (
        tensor("base_model.model.net.0.weight", np.zeros(3)),
        ("unreadable_file", "adapter_model.safetensors", "base_model.model.net.0.weight", "F64", "LoRA")),
    "integers": (
        tensor(A, np.zeros((2, 6), np.int8)), ("unreadable_file", "adapter_model.safetensors", A, "I8", "LoRA")),
    "not a number": (tensor(A, np.full((2, 6), np.nan, np.float32)), ("not_finite", "net.0")),
    "another module": (
        tensor("base_model.model.nit.0.lora_A.weight", np.zeros((2, 6), np.float32)),
        ("unreadable_file", "adapter_model.safetensors", "nit.0", "LoRA")),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_folders_of_strangers(name: str, tmp_path: Path) -> None:
    model = network()
    weights, file = AdapterTarget(tmp_path / "peft").save(model, ADAPTERS, factors())
    config, tensors = json.loads(file.read_text()), safetensors.numpy.load_file(weights)
    change, why = STRANGE[name]
    change(config, tensors)
    file.write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, weights)
    with raises(OnnxgradError, *why):
        read_adapters(tmp_path / "peft", model)


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
