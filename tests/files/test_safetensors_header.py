"""Headers of safetensors files are bounded and read in time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_hostile_headers import TENSOR, peft, write
from tests.cli_harness import MLP, Shell, save

TWICE = "{" + TENSOR + "," + TENSOR + "}"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    np.savez("data.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        (TWICE, None, "the key 'w1' occurs twice"),
        ('{"__metadata__":{"progress":"{}","progress":"{}"},' + TENSOR + "}", None, "'progress' occurs twice"),
        ("{" + TENSOR + "}" + " " * 25_000_000, None, "at most 25,000,000 are read"),
        ("{" + TENSOR + "}", 2**63, "at most 25,000,000 are read"),
        ("{" + TENSOR + "}", 1000, "it ends within its header"),
        ("[]", None, "its header is not a JSON object"),
        ('{"__metadata__":3}', None, "its header is not a JSON object"),
    ],
)
def test_headers(shell: Shell, header: str, length: int | None, message: str) -> None:
    """Each reader refuses the header: of data, a checkpoint, adapters, a folder of PEFT."""
    write(Path("w.safetensors"), header, length=length)
    write(peft(), header, length=length)
    for arguments in (
        ("evaluate", "mlp.onnx", "--data", "w.safetensors", "--loss", "mse"),
        ("export", "w.safetensors", "--model", "mlp.onnx", "-o", "out.onnx"),
        ("export", "peft", "--model", "mlp.onnx", "-o", "out.onnx"),
        ("train", "mlp.onnx", "--data", "data.npz", "--adapter-from", "w.safetensors", "-o", "out.onnx"),
    ):
        refused = shell(*arguments)
        assert refused.code in (1, 2) and message in refused.err, refused.err
        assert "Traceback" not in refused.err and not Path("out.onnx").exists()


@pytest.mark.slow
def test_many_arrays_of_16_bits(shell: Shell) -> None:
    """The time grows with the number of names and not with its square, which took 30 s of the processor here."""
    names = [f"layers.weight.{i}" for i in range(30_000)]
    header: dict[str, object] = {name: {"dtype": "U16", "shape": [0], "data_offsets": [0, 0]} for name in names}
    header["__metadata__"] = {"progress": "{}", "bfloat16": json.dumps(names)}
    write(Path("many.safetensors"), json.dumps(header), b"")
    start = time.process_time()
    refused = shell("export", "many.safetensors", "--model", "mlp.onnx", "-o", "out.onnx")
    assert refused.code == 1 and "is not a valid checkpoint" in refused.err
    assert time.process_time() - start < 8


@pytest.mark.slow
def test_many_modules_of_an_adapter(shell: Shell) -> None:
    """So it is for the modules that a configuration lists: 30,000 of 30,000 took minutes."""
    listed = [f"n{i}" for i in range(30_000)]
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": listed}
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    keys = (f"base_model.model.m{i}.lora_{kind}.weight" for i in range(30_000) for kind in "AB")
    write(peft(json.dumps(config)), json.dumps(dict.fromkeys(keys, entry)), b"")
    start = time.process_time()
    refused = shell("export", "peft", "--model", "mlp.onnx", "-o", "out.onnx")
    assert refused.code == 1 and "but its configuration gives this module no adapter" in refused.err
    assert time.process_time() - start < 8
