"""Adapters find the matrices of their modules, and are refused where a module is unknown or ambiguous."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.adapters.formats import AdapterTarget, read_adapters
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.metadata import Adapter
from tests.adapters.test_formats import ADAPTERS, factors, network
from tests.facts import raises

NAMES = re.compile("'([^']+)'")


def test_modules_that_nobody_knows(tmp_path: Path) -> None:
    model = network()
    model.graph.node[0].name = "MatMul_3"
    with pytest.raises(UsageError) as error:
        AdapterTarget(tmp_path / "found").save(model, ADAPTERS, factors())
    assert [line.split(": ")[0] for line in error.value.details] == ["val_1"]
    assert ".onnx_adapter" in (error.value.hint or "") and not list(tmp_path.iterdir())
    model.graph.node[0].name = "/head/last/MatMul"
    with pytest.raises(UsageError) as error:
        AdapterTarget(tmp_path / "found").save(model, ADAPTERS, factors())
    assert any("'head.last'" in line for line in error.value.details)
    model.graph.node[0].name, model.graph.initializer[0].name = "/net/MatMul", "net.w"
    model.graph.node[0].input[1] = "net.w"
    own = {name: array for name, array in factors().items() if name in ("a1", "b1")}
    with pytest.raises(UsageError) as error:
        AdapterTarget(tmp_path / "found").save(model, [Adapter("net.w", "a1", "b1", 2, 2.0)], own)
    assert NAMES.findall(error.value.details[0]) == ["w", "net"]
    with raises(UsageError, "conflict", "adapter", "last.bias"):
        AdapterTarget(tmp_path / "found").save(network(), ADAPTERS, {**factors(), "last.bias": np.zeros(5, np.float32)})


def test_modules_of_which_there_are_two(tmp_path: Path) -> None:
    """No adapter is given to one of two matrices by chance."""
    model = network()
    AdapterTarget(f"peft:{tmp_path}").save(model, ADAPTERS, factors())
    model.graph.node[0].name = "/head/last/MatMul"
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes().replace(b"net.0", b"NET.0"))
    with raises(OnnxgradError, "unknown_name", tmp_path.name, "NET.0"):
        read_adapters(tmp_path, model)
