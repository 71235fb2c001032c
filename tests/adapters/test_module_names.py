"""Folders of PEFT for models of onnxruntime-genai's builder: transformers' modules have other names, or are several.

What an adapter adds to a matrix is computed here from the file alone, as PEFT does: scale B A.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import ModelProto

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.files.reading import load_model
from onnxgrad_cli.metadata import Adapter
from tests.facts import raises
from tests.genai_form import HEADS, INNER, KEYS, SIZE, WIDE, decoder

Arrays = dict[str, np.ndarray]
LAYER = "model.layers.0"
OUTPUTS = {
    f"{LAYER}.attn.qkv_proj": (HEADS + 2 * KEYS) * SIZE,
    f"{LAYER}.mlp.gate_proj": INNER,
    f"{LAYER}.mlp.up_proj": INNER,
}
QKV, GATE, UP = OUTPUTS
RANKS = {QKV: 2, GATE: 3, UP: 4}


def read(tmp_path: Path, kind: str) -> ModelProto:
    """A model as it is read from a folder that says of what kind it is."""
    model = decoder(words=12, layers=1)
    model.producer_name = "onnxruntime-genai"
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"type": kind}}))
    return load_model(tmp_path / "model.onnx")[0]


def adapters(modules: list[str], scaling: str = "lora", dora: bool = False) -> tuple[list[Adapter], Arrays]:
    """Random adapters of products, each of its own rank and alpha."""
    rng, found, values = np.random.default_rng(0), [], {}
    for module in modules:
        rank, out = RANKS[module], OUTPUTS[module]
        own = {"a": (WIDE, rank), "b": (rank, out)} | ({"m": (out,)} if dora else {})
        values |= {f"{module}.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in own.items()}
        names = [f"{module}.{name}" for name in own]
        magnitude = names[2] if dora else ""
        weight = f"{module}.MatMul.weight_Q4"
        found.append(Adapter(weight, names[0], names[1], rank, rank + 1.0, scaling, magnitude))
    return found, values


def added(found: list[Adapter], values: Arrays) -> Arrays:
    """What each adapter adds to its matrix of [out, in]; factors are [in, rank] and [rank, out], or both transposed."""
    products = {}
    for each in found:
        a, b = values[each.a], values[each.b]
        products[each.weight] = each.scale * ((a @ b).T if a.shape[1] == each.rank else b @ a)
    return products


def by_peft(folder: Path) -> Arrays:
    """What a folder adds to each module's matrix of [out, in], as PEFT reads it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    found = {}
    for module in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{module}.lora_{kind}.weight"] for kind in "AB")
        exact = "^" + module.replace(".", r"\.")
        rank, alpha = (
            config[f"{k}_pattern"].get(exact, config[d]) for k, d in (("rank", "r"), ("alpha", "lora_alpha"))
        )
        assert len(a) == rank
        found[module] = alpha / (rank**0.5 if config["use_rslora"] else rank) * (b @ a)
    return found


@pytest.mark.parametrize("scaling", ["lora", "rslora"])
def test_modules_that_are_one_in_transformers(scaling: str, tmp_path: Path) -> None:
    """Phi-3 has one matrix for queries, keys and values, as the file has, and one for gate and up, as it has not."""
    model, (found, values) = read(tmp_path, "phi3"), adapters([*OUTPUTS], scaling)
    AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    theirs, own = by_peft(tmp_path / "p"), added(found, values)
    qkv, gate, up = own.values()
    assert theirs.keys() == {f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.mlp.gate_up_proj"}
    np.testing.assert_allclose(theirs[f"{LAYER}.self_attn.qkv_proj"], qkv, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(theirs[f"{LAYER}.mlp.gate_up_proj"], np.concatenate([gate, up]), rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "p/adapter_config.json").read_text())
    assert {config["r"], *config["rank_pattern"].values()} == {2, 7}  # queries, keys and values share a factor

    again, stored = read_adapters(tmp_path / "p", model)
    back = added(again, stored)
    assert back.keys() == own.keys()
    for weight, wanted in own.items():
        np.testing.assert_allclose(back[weight], wanted, rtol=1e-5, atol=1e-5)


def test_a_part_without_an_adapter(tmp_path: Path) -> None:
    model, (found, values) = read(tmp_path, "phi3"), adapters([UP])
    AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    (theirs,), (up,) = by_peft(tmp_path / "p").values(), added(found, values).values()
    assert not theirs[:INNER].any()
    np.testing.assert_allclose(theirs[INNER:], up, rtol=1e-5, atol=1e-5)


def test_directions_of_a_part_alone(tmp_path: Path) -> None:
    model, (found, values) = read(tmp_path, "phi3"), adapters([UP], dora=True)
    with raises(
        UsageError, "conflict", "adapter", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.gate_proj", "DoRA"
    ):
        AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    found, values = adapters([GATE, UP], dora=True)
    AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    tensors = safetensors.numpy.load_file(tmp_path / "p/adapter_model.safetensors")
    lengths = tensors[f"base_model.model.{LAYER}.mlp.gate_up_proj.lora_magnitude_vector"]
    assert np.array_equal(lengths, np.concatenate([values[f"{GATE}.m"], values[f"{UP}.m"]]))


def test_a_module_of_another_name(tmp_path: Path) -> None:
    model = read(tmp_path, "phi")
    product = f"{LAYER}.attn.o_proj"
    own = {"a": (HEADS * SIZE, 2), "b": (2, WIDE)}
    values = {name: np.random.default_rng(0).standard_normal(shape).astype(np.float32) for name, shape in own.items()}
    found = [Adapter(f"{product}.MatMul.weight_Q4", "a", "b", 2, 2.0)]
    AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    assert by_peft(tmp_path / "p").keys() == {f"{LAYER}.self_attn.dense"}
    back = added(*read_adapters(tmp_path / "p", model))
    assert back.keys() == {found[0].weight}
    np.testing.assert_allclose(back[found[0].weight], added(found, values)[found[0].weight], rtol=1e-5, atol=1e-5)


def test_a_kind_whose_names_are_not_known(tmp_path: Path) -> None:
    model, (found, values) = read(tmp_path, "chatglm"), adapters([UP])
    with raises(UsageError, "conflict", "adapter", "chatglm"):
        AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    assert not (tmp_path / "p").exists()


def test_factors_that_do_not_fit_all_parts(tmp_path: Path) -> None:
    model, (found, values) = read(tmp_path, "phi3"), adapters([GATE, UP])
    AdapterTarget(f"peft:{tmp_path / 'p'}").save(model, found, values)
    file = tmp_path / "p/adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    key = f"base_model.model.{LAYER}.mlp.gate_up_proj.lora_B.weight"
    longer, single = np.concatenate([tensors[key], tensors[key][:1]]), tensors[key][0, 0].reshape(())
    for broken, part, shape in (
        (longer, "up_proj", ["97", "7"]), (tensors[key][:-1], "up_proj", ["95", "7"]), (single, "gate_proj", ["1"])
    ):  # fmt: skip
        safetensors.numpy.save_file(tensors | {key: np.ascontiguousarray(broken)}, file)
        name = f"{LAYER}.mlp.{part}"
        with raises(OnnxgradError, "mismatch", "p", name, "64", "96", "LoRA", "7", "64", *shape):
            read_adapters(tmp_path / "p", model)


@pytest.mark.parametrize(
    "text", ["", "[", '{"model": []}', '{"model": {"type": ["phi3"]}}', '{"model": {"type": "\\u0000"}}']
)
def test_a_file_that_says_nothing(text: str, tmp_path: Path) -> None:
    read(tmp_path, "phi3")
    (tmp_path / "genai_config.json").write_text(text)
    assert not load_model(tmp_path / "model.onnx")[0].metadata_props
