"""What every command prints with --json, held against the schema that is in the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from onnxgrad_cli.cli import cli
from onnxgrad_cli.cli.terminal.document import STATUSES, document
from tests.cli_harness import MLP, UNKNOWN_OPS, Shell, save
from tools.schema import FILE

SCHEMA = json.loads(FILE.read_text())
VALIDATOR = Draft202012Validator(SCHEMA)

BUILT = "mlp.train.onnx"

GOOD: dict[str, tuple[str, ...]] = {
    "build": ("mlp.onnx", "--no-verify", "--no-report", "--optimizer", "sgd"),
    "inspect": ("mlp.onnx",),
    "check": (BUILT,),
    "train": ("mlp.onnx", "--data", "d.npz", "--epochs", "1", "-o", "t.onnx"),
    "evaluate": ("t.onnx", "--data", "d.npz"),
    "predict": ("t.onnx", "--data", "d.npz", "-o", "p.npz"),
    "pack": (BUILT, "--data", "d.npz", "-o", "site"),
    "export": ("t.onnx.run", "--model", "mlp.onnx", "-o", "e.onnx"),
    "tune": ("mlp.onnx", "--repeat", "1"),
    "expand": ("mlp.onnx",),
    "derive": ("mlp.onnx", "--no-verify"),
    "explain": ("mlp.onnx", "--data", "d.npz", "--no-verify", "-o", "a.npz"),
    "attack": ("mlp.onnx", "--data", "d.npz", "--no-verify", "-o", "f.npz"),
    "list": ("operators", "relu"),
    "view": ("mlp.onnx",),
}
"""A command line of each command that comes to something, in the order in which they need each other."""


def validated(document: dict[str, Any]) -> dict[str, Any]:
    VALIDATOR.validate(document)
    return document


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_values_are_single_words() -> None:
    statuses = SCHEMA["properties"]["status"]["enum"]
    verdicts = SCHEMA["$defs"]["Proof"]["properties"]["verdict"]["enum"]
    assert {"check_failed", "not_proved"} <= {*statuses, *verdicts}
    assert not any(" " in value for value in (*statuses, *verdicts))


def test_a_report_has_values_and_text(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--no-verify", "--json").json
    assert result["verdict"] == "Built, not proved: no proof was requested."
    result = shell("derive", "mlp.onnx", "-o", "d.onnx", "--no-verify")
    assert "proof   not proved" in result.out
    assert shell("derive", "mlp.onnx", "-o", "d.onnx", "--no-verify", "--json").json["proof"]["verdict"] == "not_proved"


def test_every_command_prints_a_document(shell: Shell) -> None:
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.zeros((4, 2), np.float32))
    for name, arguments in GOOD.items():
        result = shell(name, *arguments, "--json")
        found = validated(result.document)
        assert (found["command"], found["status"], found["exit_code"]) == (name, "done", 0), (name, result.err)
        assert found["result"] and found["error"] is None, name


@pytest.mark.parametrize("name", list(cli.commands))
def test_every_failing_command_prints_a_document(name: str, shell: Shell) -> None:
    result = shell(name, "gone", "--jsonn", "--json")
    found = validated(result.document)
    assert (found["command"], found["status"], found["exit_code"], result.code) == (name, "usage", 2, 2)
    assert found["result"] is None and "--jsonn" in found["error"]["message"] and found["error"]["hint"]


@pytest.mark.parametrize(
    ("command", "code", "argument"),
    [
        ("build gone.onnx --loss mse", "missing_file", None),
        ("build mlp.onnx --loss mse -o mine.onnx", "file_exists", None),
        ("build mlp.onnx --loss msee", "unknown_name", None),
        ("build mlp.onnx --loss mse --clip-norm -1", "wrong_value", "--clip-norm"),
        ("build mlp.onnx --loss mse --ema 0.9", "missing_value", "--ema"),
        ("build mlp.onnx --loss mse --train nothing", "unknown_name", "--train"),
        ("build mlp.onnx --loss mse --report r.doc", "wrong_value", "--report"),
        ("build mlp.onnx --loss mse --optimizer sgd --training-info --yield keep", "conflict", "--training-info"),
        ("train mlp.onnx --data gone.npz", "missing_file", None),
        ("train mlp.onnx --data broken.npz --loss mse", "unreadable_file", None),
        ("train mlp.onnx --data d.npz --loss mse --optimizer sgd --lr 1e38 --epochs 3", "not_finite", None),
        ("view mlp.onnx -o picture", "wrong_value", "--out"),
        ("build mlp.onnx --jsonn", "unknown_name", None),
    ],
)
def test_an_error_names_its_kind_and_the_option(command: str, code: str, argument: str | None, shell: Shell) -> None:
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.zeros((4, 2), np.float32))
    Path("broken.npz").write_bytes(b"PK")
    Path("mine.onnx").write_bytes(Path("mlp.onnx").read_bytes())
    found = validated(shell(*command.split(), "--json").document)
    assert (found["error"]["code"], found["error"]["argument"]) == (code, argument), found["error"]


def test_a_refusal_names_nodes(shell: Shell) -> None:
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    for name in ("build", "inspect"):
        result = shell(name, "unknown.onnx", "--json")
        found = validated(result.document)
        assert (found["status"], found["exit_code"], result.code) == ("refused", 3, 3)
        assert {refusal["op_type"] for refusal in found["error"]["refusals"]} == {"my.ops::Twirl", "my.ops::Swirl"}
        assert found["result"]["status"] == "refused", "the report is there too"


def test_a_check_that_fails(shell: Shell) -> None:
    shell("build", "mlp.onnx", "--no-verify")
    model = onnx.load(BUILT)
    (node,) = [node for node in model.graph.node if "w2_grad" in node.output]
    node.output[0] = "unscaled"
    model.graph.node.append(onnx.helper.make_node("Add", ["unscaled", "unscaled"], ["w2_grad"]))
    onnx.save(model, BUILT)
    found = validated(shell("check", BUILT, "--json").document)
    assert (found["status"], found["exit_code"], found["result"]["verdict"]) == ("check_failed", 4, "failed")
    assert found["error"]["message"].startswith("failed: ")


def test_warnings_are_there(shell: Shell) -> None:
    text = MLP.replace("s = Sigmoid(k)", "s, mask = Dropout(k, ratio, training)").replace(
        "float[3] b1", "float ratio = {0.5}, bool training = {1}, float[3] b1"
    )
    save(text, Path("dropout.onnx"))
    found = validated(shell("inspect", "dropout.onnx", "--json").document)
    assert any("Dropout" in text for text in found["warnings"]), found["result"]["cautions"]
    assert validated(shell("inspect", "mlp.onnx", "--json").document)["warnings"] == []


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"status": "refused"}, {"result": [1]}, {"error": {"message": ""}}, {"warnings": None}, {"x": 1}],
)
def test_another_shape_is_none(change: dict[str, Any]) -> None:
    good = document("list", 0, [{"name": "prepare"}], None, [])
    validated(good)
    with pytest.raises(ValidationError):
        validated({**good, **change})


def test_every_status_has_its_word() -> None:
    assert STATUSES.keys() == {0, 1, 2, 3, 4, 130}


def test_what_is_not_asked_for_is_silent(shell: Shell) -> None:
    for arguments in (("build", "mlp.onnx", "--no-verify"), ("check", BUILT), ("derive", "mlp.onnx", "--no-verify")):
        assert shell(*arguments, "-q").out == "", arguments
    assert shell("list", "passes", "-q").out
