"""`onnxgrad check`: right gradients pass, wrong ones fail, and what can't be proved is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli_harness import Result, Shell


@pytest.mark.parametrize(("weights", "why"), [("nan", "the weight 'w1'"), ("-100", "all gradients are zero")])
def test_check_of_what_can_not_be_proved(shell: Shell, weights: str, why: str) -> None:
    """A weight that is no number, and a Relu that lets nothing through: the exit code says that nothing is proved."""
    model = onnx.load("mlp.onnx")
    model.graph.node[2].op_type = "Relu"
    name = "w1" if weights == "nan" else "b1"
    for tensor in model.graph.initializer:
        if tensor.name == name:
            values = np.full_like(onnx.numpy_helper.to_array(tensor), float(weights))
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, "odd.onnx")
    assert shell("build", "odd.onnx").code == 0
    result = shell("check", "odd.train.onnx")
    assert result.code == 4 and "not proved: " in result.err and why in result.err, result.err
    assert shell("check", "odd.train.onnx", "--json").json["verdict"] == "not_proved"
    assert shell("build", "odd.onnx", "--verify", "-o", "other.onnx").code == 4 and not Path("other.onnx").exists()


def test_check(shell: Shell) -> None:
    shell("build", "mlp.onnx", "--label", "t", "--no-verify")
    result = shell("check", "mlp.train.onnx", "--dim", "batch=3")
    assert result.code == 0, result.err
    assert all(line.startswith("passed") for line in result.out.splitlines())
    assert "x [3, 4]" in result.out and result.err.startswith("proved | ")
    np.savez("d.npz", x=np.ones((6, 4), np.float32), t=np.ones((6, 2), np.float32))
    found = shell("check", "mlp.train.onnx", "--data", "d.npz", "--json").json
    assert found["status"] == "passed" and "x [6, 4]" in json.dumps(found)


def test_check_on_labels_that_are_none(shell: Shell) -> None:
    """A class that does not exist is told; labels that are all left out prove nothing, and that is told too."""
    shell(
        "build", "mlp.onnx", "--label", "t", "--loss", "cross-entropy", "--loss-option", "ignore-index=1", "--no-verify"
    )

    def checked(*labels: int) -> Result:
        np.savez("d.npz", t=np.array(labels))
        return shell("check", "mlp.train.onnx", "--data", "d.npz")

    assert checked(0, 1).code == 0
    for label in (2, -1):
        result = checked(0, label)
        assert result.code == 2 and f"'t' is {label} in sample 1" in result.err
    result = checked(1, 1)
    assert result.facts == ("check_failed", "loss") and "passed |" not in result.err


def test_check_finds_a_wrong_gradient(shell: Shell) -> None:
    shell("build", "mlp.onnx", "--label", "t")
    model = onnx.load("mlp.train.onnx")
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            if name == "w1_grad":
                node.output[position] = "half"
    tensor = onnx.numpy_helper.from_array(np.float32(2), "two")
    model.graph.initializer.append(tensor)
    model.graph.node.append(onnx.helper.make_node("Mul", ["half", "two"], ["w1_grad"], name="wrong"))
    onnx.save(model, "mlp.train.onnx")
    result = shell("check", "mlp.train.onnx")
    assert result.code == 4 and "w1" in result.out and result.err.startswith("failed | ")
