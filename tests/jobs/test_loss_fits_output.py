"""Losses that do not fit the output of a model are reported by each command that computes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.cli_harness import Shell, save

RAN = ("--epochs", "1", "--threads", "1")


def net(head: str, classes: int = 3) -> None:
    """Write a layer with a head to net.onnx, with names as PyTorch's older exporter gives them."""
    w = np.random.default_rng(0).standard_normal((classes, 4)).astype(np.float32)
    layer = helper.make_node("Gemm", ["input.1", "w", "b"], ["input.3"], transB=1)
    axis = {"axis": 1} if "Softmax" in head else {}
    graph = helper.make_graph(
        [layer, helper.make_node(head, ["input.3"], ["output.1"], **axis)],
        "net",
        [helper.make_tensor_value_info("input.1", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("output.1", TensorProto.FLOAT, ["batch", classes])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.zeros(classes, np.float32), "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "net.onnx")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(1).standard_normal((60, 4)).astype(np.float32)
    np.savez("data.npz", **{"input.1": x, "label": x[:, :3].argmax(1)})
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_softmax_before_cross_entropy_is_reported_once(shell: Shell, command: str) -> None:
    net("Softmax")
    more = (*RAN, "-o", "t.onnx", "--val", "0.2") if command == "train" else ()
    result = shell(command, "net.onnx", "--data", "data.npz", "--loss", "cross-entropy", *more)
    text = "warning: output 'output.1' is computed by Softmax, which the loss cross-entropy does not expect; use log"
    assert result.code == 0 and result.err.count(text) == 1, result.err
    if command == "train":
        assert result.err.index(text) < result.err.index("epoch")
    right = shell(command, "net.onnx", "--data", "data.npz", "--loss", "log", *more, *("--force",) * bool(more))
    assert right.code == 0 and "warning: " not in right.err


def test_the_caution_is_a_warning_in_json(shell: Shell) -> None:
    net("Softmax")
    result = shell("evaluate", "net.onnx", "--data", "data.npz", "--loss", "cross-entropy", "--json")
    assert result.code == 0 and "is computed by Softmax" in json.loads(result.out)["warnings"][0]


def test_a_training_reports_untrained_parameters_but_no_kinks(shell: Shell) -> None:
    save("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y)
         <float[4] a = {1, 2, 3, 4}, float[4] b = {1, 2, 3, 4}>
         { h = Mul(x, a) r = Relu(h) k = Mul(x, b) s = Sign(k) y = Add(r, s) }""", Path("net.onnx"))  # fmt: skip
    x = np.random.default_rng(1).standard_normal((20, 4)).astype(np.float32)
    np.savez("data.npz", x=x, label=x)
    result = shell("train", "net.onnx", "--data", "data.npz", *RAN, "-o", "t.onnx")
    assert result.code == 0, result.err
    assert "warning: 4 of 8 float parameters (50%) stay untrained" in result.err and "Relu" not in result.err


LOSSES = """
def pairs(op, p, label):
    return op.unsqueeze(p, [0]) - op.unsqueeze(label, [1])

def slope(op, p, x: "input input.1"):
    return op.grad(p, x) * op.grad(p, x)
"""


@pytest.mark.parametrize(
    ("command", "loss", "words"),
    [
        ("train", "pairs", "one for each pair of samples"),
        ("evaluate", "pairs", "one for each pair of samples"),
        ("train", "slope", "the gradient of 'b' is zero"),
    ],
)
def test_a_loss_that_is_likely_wrong_is_reported(shell: Shell, command: str, loss: str, words: str) -> None:
    net("Identity")
    Path("losses.py").write_text(LOSSES)
    x = np.ones((20, 4), np.float32)
    np.savez("data.npz", **{"input.1": x, "label": x[:, :3]})
    more = (*RAN, "-o", "t.onnx") if command == "train" else ()
    result = shell(command, "net.onnx", "--data", "data.npz", "--loss", f"losses.py:{loss}", *more)
    assert result.code == 0 and words in result.err, result.err


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("head", "loss"),
    [("Softmax", "log"), ("LogSoftmax", "nll"), ("Tanh", "cross-entropy"), ("Sigmoid", "bce")],
)
def test_class_numbers_without_a_loss_get_the_loss_for_the_head(
    shell: Shell, command: str, head: str, loss: str
) -> None:
    net(head)
    more = (*RAN, "-o", "t.onnx") if command == "train" else ()
    asked = (command, "net.onnx", "--data", "data.npz", *more)
    result = shell(*asked)
    assert result.code == 2 and result.facts[1:] == ("data.npz", "label", "60", "3"), result.err
    assert f"--loss {loss}\n" in result.err, result.err
    if head == "Sigmoid":
        assert "numpy.eye(N)[array]" in result.err
        arrays = dict(np.load("data.npz"))
        np.savez("data.npz", **{**arrays, "label": np.eye(3)[arrays["label"]]})
    result = shell(*asked, "--loss", loss)
    assert result.code == 0 and "warning: " not in result.err, result.err


@pytest.mark.parametrize("loss", ["log", "cross-entropy"])
def test_the_loss_in_the_hint_trains_as_in_pytorch(shell: Shell, loss: str) -> None:
    """One epoch of SGD on a Softmax, beside PyTorch on the input of the Softmax: log is its cross-entropy."""
    net("Softmax")
    more = ("--optimizer", "sgd", "--lr", "0.5", "--batch-size", "60", *RAN, "-o", "t.onnx")
    result = shell("train", "net.onnx", "--data", "data.npz", "--loss", loss, *more)
    assert result.code == 0, result.err
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(f).graph.initializer} for f in ("net.onnx", "t.onnx")
    )
    data = np.load("data.npz")
    w = torch.tensor(before["w"], requires_grad=True)
    torch.nn.functional.cross_entropy(torch.tensor(data["input.1"]) @ w.T, torch.tensor(data["label"])).backward()
    step = (w - 0.5 * w.grad).detach().numpy()
    assert np.allclose(after["w"], step, atol=1e-5) == (loss == "log")


@pytest.mark.parametrize("command", ["build", "train", "evaluate"])
@pytest.mark.parametrize(("head", "loss"), [("Sigmoid", "bce"), ("Tanh", "bce-logits")])
def test_classes_of_one_column_are_refused(shell: Shell, command: str, head: str, loss: str) -> None:
    net(head, classes=1)
    x = np.load("data.npz")["input.1"]
    np.savez("data.npz", **{"input.1": x, "label": (x[:, :1] > 0).astype(int)})
    data = () if command == "build" else ("--data", "data.npz")
    more = (*RAN, "-o", "t.onnx") if command == "train" else ()
    result = shell(command, "net.onnx", "--loss", "cross-entropy", *data, *more)
    assert result.code == 2 and result.facts == ("wrong_shape", "2", "1", "output.1", "1", "1")
    assert f"losses={loss!r}`" in result.hint
    result = shell(command, "net.onnx", "--loss", loss, *data, *more)
    assert result.code == 0 and "zero" not in result.err + result.out, result.err


@pytest.mark.parametrize(
    ("head", "words"), [("Softmax", "a Sigmoid instead of the Softmax"), ("LogSoftmax", "instead of the LogSoftmax")]
)
def test_a_softmax_over_one_column_is_refused(shell: Shell, head: str, words: str) -> None:
    net(head, classes=1)
    for loss in ("cross-entropy", "soft-cross-entropy", "log", "nll"):
        result = shell("build", "net.onnx", "--loss", loss)
        assert result.code == 2 and words in result.err, result.err


def test_one_class_on_the_second_axis_names_the_last(shell: Shell) -> None:
    save("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 1, 4] x) => (float[n, 1, 4] y)
         <float[4] a = {1, 2, 3, 4}> { y = Mul(x, a) }""", Path("net.onnx"))  # fmt: skip
    result = shell("build", "net.onnx", "--loss", "cross-entropy")
    assert result.code == 2 and "with --loss-option class-axis=-1\n" in result.err, result.err
    assert shell("build", "net.onnx", "--loss", "cross-entropy", "--loss-option", "class-axis=-1").code == 0


@pytest.mark.parametrize("command", ["build", "train", "evaluate"])
@pytest.mark.parametrize(("head", "loss"), [("Softmax", "log"), ("LogSoftmax", "nll"), ("Sigmoid", "bce")])
def test_the_default_loss_of_a_classifier_is_reported(shell: Shell, command: str, head: str, loss: str) -> None:
    net(head)
    x = np.load("data.npz")["input.1"]
    np.savez("data.npz", **{"input.1": x, "label": np.eye(3)[x[:, :3].argmax(1)]})
    data = () if command == "build" else ("--data", "data.npz")
    more = (*RAN, "-o", "t.onnx") if command == "train" else ()
    result = shell(command, "net.onnx", *data, *more)
    text = f"is computed by {head}, and the loss is mse, the default; a classifier trains better with --loss {loss}"
    assert result.code == 0 and (result.err + result.out).count(text) == 1, result.err
    result = shell(command, "net.onnx", *data, *more, "--loss", "mse", *("--force",) * (command == "train"))
    assert result.code == 0 and "warning" not in result.err + result.out, "a loss that was chosen is not questioned"


def with_labels(labels: np.ndarray) -> None:
    np.savez("data.npz", **{"input.1": np.load("data.npz")["input.1"], "label": labels})


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_class_numbers_from_1_are_to_be_counted_from_0(shell: Shell, command: str) -> None:
    net("Tanh")
    labels = np.arange(60) % 3
    more = (*RAN, "-o", "t.onnx", "--force") if command == "train" else ()
    asked = (command, "net.onnx", "--data", "data.npz", "--loss", "cross-entropy", *more)
    ignoring = np.where(np.arange(60) == 7, -100, labels + 1)
    for wrong in (labels + 1, ignoring):
        with_labels(wrong)
        result = shell(*asked)
        assert result.code == 2, result.err
        assert (
            result.facts[1:] == ("data.npz", "label", "3", "2", "0", "0", "2", "-100", "3") and "1 to 3" in result.hint
        )
    with_labels(labels)
    assert shell(*asked).code == 0
    for wrong in (labels + 2, labels * 2):  # other mistakes keep the other hint
        with_labels(wrong)
        result = shell(*asked)
        assert result.code == 2 and "pass --classes N" in result.err, result.err


def test_a_label_of_minus_1_can_be_ignored(shell: Shell) -> None:
    net("Tanh")
    labels = np.arange(60) % 3
    asked = ("evaluate", "net.onnx", "--data", "data.npz", "--loss", "cross-entropy")
    with_labels(np.where(labels == 1, -1, labels))
    result = shell(*asked)
    assert result.code == 2, result.err
    words = "if -1 marks samples to ignore, save -100 for it or set --loss-option ignore-index=-1; "
    assert words in result.err, result.err
    ignored = shell(*asked, "--loss-option", "ignore-index=-1", "--json").json["results"]
    with_labels(np.where(labels == 1, -100, labels))
    assert shell(*asked, "--json").json["results"] == ignored
    session = onnxruntime.InferenceSession("net.onnx")
    outputs = session.run(None, {"input.1": np.load("data.npz")["input.1"]})[0]
    torchs = torch.nn.functional.cross_entropy(torch.tensor(outputs), torch.tensor(np.load("data.npz")["label"]))
    assert ignored["loss"] == pytest.approx(torchs.item(), rel=1e-5)
