"""JSON of strangers: bounded, read in time, and no key is there twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli_harness import MLP, Shell, save

TENSOR = '"w1":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}'


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    np.savez("data.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    return Shell(tmp_path, capsys)


def write(path: Path, header: str, data: bytes = bytes(48), length: int | None = None) -> Path:
    """Write a safetensors file with this header, which claims to be of this length."""
    text = header.encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def peft(config: str = '{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["m"]}') -> Path:
    folder = Path("peft")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    return folder / "adapter_model.safetensors"


def test_many_patterns_of_an_adapter(shell: Shell) -> None:
    patterns = {f"m{i}": 1 for i in range(10_001)}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["m"], "rank_pattern": patterns}
    write(peft(json.dumps(config)), "{}", b"")
    refused = shell("export", "peft", "--model", "mlp.onnx", "-o", "out.onnx")
    assert refused.code == 1 and refused.facts == ("unreadable_file", "adapter_config.json", "10,000")


# -- other JSON -----------------------------------------------------------------------------------------------


def test_a_configuration_of_adapters(shell: Shell) -> None:
    write(peft('{"peft_type": "LORA", "r": 1, "r": 2, "lora_alpha": 1}'), "{" + TENSOR + "}")
    refused = shell("export", "peft", "--model", "mlp.onnx", "-o", "out.onnx")
    assert refused.code == 1 and refused.facts == ("unreadable_file", "adapter_config.json", "r")


def test_lines_of_data(shell: Shell) -> None:
    Path("data.jsonl").write_text('{"x": [1, 2, 3, 4], "x": [5, 6, 7, 8], "label": [1, 2]}\n')
    refused = shell("evaluate", "mlp.onnx", "--data", "data.jsonl", "--loss", "mse")
    assert refused.code == 2 and refused.facts[1:] == ("data.jsonl", "1", "x")


def test_settings_of_a_tokenizer(shell: Shell) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save("tokenizer.json")
    Path("tokenizer_config.json").write_text('{"eos_token": "a", "eos_token": "b"}')
    Path("data.jsonl").write_text('{"text": "a a"}\n')
    tokens = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "length"])
    model = onnx.load("mlp.onnx")
    model.graph.input.append(tokens)
    onnx.save(model, "text.onnx")
    refused = shell("predict", "text.onnx", "--data", "data.jsonl", "--tokenizer", "tokenizer.json", "-o", "p.npz")
    assert refused.code == 1 and refused.facts == ("unreadable_file", "tokenizer_config.json", "eos_token"), refused.err


def test_the_description_of_a_training_model(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--loss", "mse", "-o", "train.onnx").code == 0
    model = onnx.load("train.onnx")
    roles = next(entry for entry in model.metadata_props if entry.key == "onnxgrad.roles")
    roles.value = '{"inputs": {}, ' + roles.value[1:]
    onnx.save(model, "train.onnx")
    refused = shell("check", "train.onnx")
    assert refused.code == 1 and refused.facts == ("unreadable_file", "onnxgrad.roles", "inputs"), refused.err


def test_the_description_of_values(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--loss", "mse", "--weights", "inputs", "-o", "train.onnx").code == 0
    text = Path("train.json").read_text()
    Path("train.json").write_text('{"bytes": 3, ' + text[1:])
    Path("new.bin").write_bytes(bytes(4 * (12 + 3 + 6) + 4))
    refused = shell("export", "new.bin", "--model", "mlp.onnx", "--roles", "train.json", "-o", "out.onnx")
    assert refused.code == 1 and refused.facts == ("unreadable_file", "train.json", "bytes"), refused.err
