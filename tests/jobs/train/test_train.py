"""`onnxgrad train`: from a model and a file of data to a better model, and what becomes of a run that is cut off."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onnxgrad_cli import Options, Trainer, build
from onnxgrad_cli.adapters.formats import AdapterTarget
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.run.folder import LOG, load_checkpoint, run_folder
from tests.cli_harness import MLP, Shell, save, save_mlp_and_data
from tests.facts import raises

ROOT = Path(__file__).parents[3]
DIGITS = str(ROOT / "sample_models" / "digits.npz")
ON_DIGITS = (
    "--loss", "cross-entropy", "--data", DIGITS, "--prefix", "train_", "--label", "y",
    "--val", DIGITS, "--val-prefix", "test_", "--threads", "1",
)  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save_mlp_and_data()
    return Shell(tmp_path, capsys)


def answers(model: str | Path, **feeds: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(model).run(None, feeds)[0]


def test_digits_learn(shell: Shell) -> None:
    model = str(ROOT / "sample_models" / "digits_cnn.onnx")
    arguments = ("--mode", "train", "--epochs", "5", "--schedule", "one-cycle", "--learning-rate", "0.01")
    result = shell("train", model, *ON_DIGITS, *arguments, "-o", "digits.onnx", "--json")
    assert result.code == 0, result.err
    digits = np.load(DIGITS)
    accuracy = np.mean(answers("digits.onnx", x=digits["test_x"]).argmax(1) == digits["test_y"])
    assert accuracy > 0.97
    epochs, best = result.json["epochs"], result.json["best"]
    assert best == 1 + min(range(5), key=lambda i: epochs[i]["val_loss"])
    np.testing.assert_allclose(epochs[best - 1]["val_accuracy"], accuracy)
    before, after = onnx.load(model), onnx.load("digits.onnx")
    assert [node.SerializeToString() for node in before.graph.node] == [n.SerializeToString() for n in after.graph.node]
    assert before.opset_import == after.opset_import and before.graph.input == after.graph.input


def test_without_shuffling_samples_are_taken_in_their_order(shell: Shell) -> None:
    """Plain gradient descent on x W, beside PyTorch."""
    save("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 2] y)
         <float[4, 2] w = {1, -2, 3, 4, 5, -6, 7, 8}> { y = MatMul(x, w) }""", Path("linear.onnx"))  # fmt: skip
    data = np.load("data.npz")
    arguments = ("--data", "data.npz", "--no-shuffle", "--batch-size", "5", "--optimizer", "sgd", "--lr", "0.1")
    done = shell("train", "linear.onnx", *arguments, "--epochs", "1", "--threads", "1", "-o", "t.onnx")
    assert done.code == 0, done.err
    w = torch.tensor([[1.0, -2], [3, 4], [5, -6], [7, 8]], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for start in range(0, 50, 5):
        x, label = (torch.tensor(data[name][start : start + 5]) for name in ("x", "label"))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(x @ w, label).backward()
        optimizer.step()
    (found,) = onnx.load("t.onnx").graph.initializer
    np.testing.assert_allclose(numpy_helper.to_array(found), w.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("words", "watched"), [((), "val_loss"), (("--metric", "accuracy"), "val_accuracy")])
def test_the_best_epoch_is_chosen_by_the_loss_unless_a_metric_is_named(
    shell: Shell, words: tuple[str, ...], watched: str
) -> None:
    np.savez("data.npz", x=np.load("data.npz")["x"], label=np.arange(50) % 2)
    arguments = ("--loss", "cross-entropy", "--data", "data.npz", "--val", "data.npz", "--epochs", "2")
    result = shell("train", "mlp.onnx", *arguments, *words, "--threads", "1", "-o", "t.onnx", "--json")
    assert result.code == 0, result.err
    assert load_checkpoint(Path("t.onnx.run/checkpoint.safetensors"))[1]["watched"] == watched


@pytest.mark.slow
def test_a_regression_ends_where_least_squares_do(shell: Shell) -> None:
    model = str(ROOT / "sample_models" / "linear_regression.onnx")
    data = np.load(ROOT / "sample_models" / "linear_regression.npz")
    x_name = onnx.load(model).graph.input[0].name
    x, y = data["x"], data["y"]
    np.savez("line.npz", **{x_name: x, "label": y})
    arguments = ("--epochs", "300", "--batch-size", "64", "--learning-rate", "0.05", "--schedule", "cosine")
    result = shell("train", model, "--data", "line.npz", *arguments, "--threads", "1", "-o", "line.onnx")
    assert result.code == 0, result.err
    design = np.concatenate([x, np.ones((len(x), 1))], 1)
    wanted = design @ np.linalg.lstsq(design, y.reshape(len(x), -1), rcond=None)[0]
    np.testing.assert_allclose(answers("line.onnx", **{x_name: x}), wanted, atol=2e-2)


def test_one_epoch_is_that_of_pytorch(shell: Shell) -> None:
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--optimizer", "sgd", "--epochs", "1", "--batch-size",
                   "8", "--learning-rate", "0.001", "--threads", "1", "-o", "trained.onnx")  # fmt: skip
    assert result.code == 0, result.err
    tensors = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in onnx.load("mlp.onnx").graph.initializer}
    weights = [tensors[name].requires_grad_() for name in ("w1", "b1", "w2")]
    data = np.load("data.npz")
    order = np.random.Generator(np.random.PCG64((0, 0))).permutation(50)
    for start in range(0, 50, 8):
        batch = order[start : start + 8]
        x, y = (torch.tensor(np.float32(data[name][batch])) for name in ("x", "label"))
        loss = torch.mean((torch.sigmoid(x @ weights[0] + weights[1]) @ weights[2] - y) ** 2)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.001 * gradient
    found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("trained.onnx").graph.initializer}
    for name, weight in zip(("w1", "b1", "w2"), weights, strict=True):
        np.testing.assert_allclose(found[name], weight.detach(), atol=1e-5)


def test_the_log_has_a_line_a_step(shell: Shell) -> None:
    shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "2", "--batch-size", "20", "-o", "t.onnx")
    lines = [json.loads(line) for line in (Path("t.onnx.run") / LOG).read_text().splitlines()]
    steps = [line for line in lines if "rate" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    epochs = [line for line in lines if "rate" not in line]
    sizes = np.array([20, 20, 10])
    np.testing.assert_allclose(epochs[0]["loss"], np.dot([s["loss"] for s in steps[:3]], sizes) / 50, rtol=1e-9)


def test_what_is_no_number_is_null(shell: Shell) -> None:
    """r2 of a single sample is not defined, and JSON knows no NaN."""
    arrays = dict(np.load("data.npz"))
    np.savez("one.npz", **{name: array[:1] for name, array in arrays.items()})
    result = shell(
        "train", "mlp.onnx", "--data", "data.npz", "--val", "one.npz", "--epochs", "1", "--run", "r", "--json"
    )
    assert result.code == 0, result.err
    lines = Path("r", LOG).read_text().splitlines()
    for text in (result.out, lines[-1]):
        assert "NaN" not in text and '"val_r2": null' in text


def test_early_stopping_keeps_the_best(shell: Shell) -> None:
    arguments = ("--epochs", "50", "--patience", "2", "--learning-rate", "5", "--optimizer", "sgd", "--batch-size", "8")
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--val", "data.npz", *arguments, "--threads", "1",
                   "-o", "t.onnx", "--json")  # fmt: skip
    if result.code == 1:
        assert "learning rate" in result.err
        return
    found = result.json
    assert found["reason"] == "no better" and len(found["epochs"]) == found["best"] + 2
    data = np.load("data.npz")
    loss = np.mean((answers("t.onnx", x=data["x"]) - data["label"]) ** 2)
    np.testing.assert_allclose(loss, found["epochs"][found["best"] - 1]["val_loss"], rtol=1e-4)


@pytest.mark.parametrize(
    ("metrics", "by", "better"),
    [((), "val_loss", min), (("accuracy",), "val_accuracy", max), (("top-k", "accuracy"), "val_top-k", max)],
)
def test_the_first_metric_that_is_named_says_which_epoch_is_best_else_the_loss(
    shell: Shell, metrics: tuple[str, ...], by: str, better: Callable[..., float]
) -> None:
    """By accuracy, as measured unasked for, another epoch would be the best; of equal ones the first is."""
    model = str(ROOT / "sample_models" / "digits_mlp.onnx")
    named = [word for name in metrics for word in ("--metric", name)]
    more = ("--epochs", "4", "--learning-rate", "0.05", "--init", "he", *named)
    result = shell("train", model, *ON_DIGITS, *more, "-o", "t.onnx", "--json")
    assert result.code == 0, result.err
    values = [epoch[by] for epoch in result.json["epochs"]]
    assert result.json["by"] == by and result.json["best"] == 1 + values.index(better(values))
    report = Path("t.onnx.run/report.md").read_text()
    assert (
        f"the weights of epoch {result.json['best']} of 4, the best by its {by.replace('val_', 'validation ')}"
        in report
    )


def test_a_measure_that_is_no_number_chooses_no_epoch(shell: Shell) -> None:
    """The area under the curve of labels that are all of one class: the last epoch is taken, and that is told."""
    np.savez("one.npz", x=np.load("data.npz")["x"], label=np.zeros(50, np.int64))
    on = ("--loss", "cross-entropy", "--data", "one.npz", "--val", "one.npz", "--metric", "auc", "--threads", "1")
    result = shell("train", "mlp.onnx", *on, "--epochs", "2", "-o", "t.onnx", "--json")
    assert result.code == 0 and (result.json["best"], result.json["by"]) == (2, "")
    assert "caution: the validation auc was not finite in any epoch, so the weights of the last" in result.err
    assert "the model has the weights of epoch 2 of 2, the last." in Path("t.onnx.run/report.md").read_text()
    loss = shell("evaluate", "t.onnx", *on[:4], "--json").json["results"]["loss"]
    assert loss == pytest.approx(result.json["epochs"][1]["val_loss"], rel=1e-5)


def test_the_rule_is_in_the_help_and_in_what_is_shown(shell: Shell) -> None:
    told = " ".join(shell("train", "--help-all").out.split())
    assert "the first one decides which epoch is best. [default: depends on the loss]" in told
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "--threads", "1")
    assert "best by validation loss" in shell(*arguments, "--val", "data.npz", "-o", "a.onnx").out
    assert "the last one" in shell(*arguments, "-o", "b.onnx").out


def test_another_rule_of_the_best_epoch_is_another_run(shell: Shell) -> None:
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--val", "data.npz", "--run", "r", "-o", "t.onnx")
    assert shell(*arguments, "--epochs", "1").code == 0
    refused = shell(*arguments, "--epochs", "2", "--metric", "rmse", "--metric", "r2", "--resume")
    assert refused.code == 2 and refused.facts[1:] == ("val_loss", "val_rmse")


def test_more_threads_than_a_machine_can_use_are_refused(shell: Shell) -> None:
    start = time.monotonic()
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--threads", "100000", "-o", "t.onnx")
    assert result.code == 2 and result.facts[:2] == ("wrong_value", "threads=100000")
    with raises(UsageError, "wrong_value", "threads=100000", str(os.cpu_count())):
        Trainer(build("mlp.onnx", Options(optimizer="sgd")), threads=100_000)
    assert time.monotonic() - start < 10


def test_lora_is_merged(shell: Shell) -> None:
    arguments = ("--lora", "1", "--epochs", "3", "--learning-rate", "0.05", "--threads", "1")
    result = shell("train", "mlp.onnx", "--data", "data.npz", *arguments, "-o", "t.onnx")
    assert result.code == 0, result.err
    before, after = ({t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(f).graph.initializer}
                     for f in ("mlp.onnx", "t.onnx"))  # fmt: skip
    assert before.keys() == after.keys()
    assert np.linalg.matrix_rank(after["w1"] - before["w1"], tol=1e-4) == 1
    np.testing.assert_array_equal(before["b1"], after["b1"])


def test_an_adapter_alone_is_enough(shell: Shell) -> None:
    arguments = ("--lora", "1", "--train", "b1", "--epochs", "2", "--adapter", "small.safetensors")
    result = shell("train", "mlp.onnx", "--data", "data.npz", *arguments, "-o", "t.onnx")
    assert result.code == 0, result.err
    assert shell("export", "small.safetensors", "--model", "mlp.onnx", "-o", "again.onnx").code == 0
    assert Path("again.onnx").read_bytes() == Path("t.onnx").read_bytes()
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--adapter", "x.safetensors", "-o", "u.onnx")
    assert result.code == 2 and result.facts == ("missing_value", "adapter")


def test_a_model_and_its_adapter_are_written_together(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    def made(*what: Any) -> list[Path]:
        monkeypatch.setattr("os.fsync", full)  # the checkpoints are written by now
        return original(*what)

    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--lora", "1", "--epochs", "1", "-q")
    arguments = (*arguments, "--adapter", "a.safetensors")
    assert shell(*arguments, "-o", "t.onnx").code == 0
    before = {name: Path(name).read_bytes() for name in ("t.onnx", "a.safetensors")}
    original = AdapterTarget.stage
    monkeypatch.setattr(AdapterTarget, "stage", made)
    result = shell(*arguments, "--seed", "1", "-o", "t.onnx", "--run", "other")
    assert result.code == 1 and result.facts == ("unwritable_file", "a.safetensors")
    assert {name: Path(name).read_bytes() for name in before} == before


def test_the_same_run_writes_the_same_adapter(shell: Shell) -> None:
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--lora", "1", "--epochs", "1", "-q")
    names = [f"{i}.safetensors" for i in range(6)]
    for name in names:
        assert shell(*arguments, "-o", f"{name}.onnx", "--adapter", name).code == 0
    assert len({Path(name).read_bytes() for name in names}) == 1


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("--learning-rate", "0.5"), "a learning rate of 0.5, constant, before a learning rate of 0.001, constant"),
        (("--schedule", "cosine"), "0.001, cosine over "),
        ((), ""),
    ],
)
def test_a_run_that_goes_on_with_other_rates_says_so(shell: Shell, other: tuple[str, ...], told: str) -> None:
    run = ("train", "mlp.onnx", "--data", "data.npz", "-o", "t.onnx")
    assert shell(*run, "--epochs", "1").code == 0
    result = shell(*run, "--epochs", "2", "--resume", *other)
    assert result.code == 0 and told in result.err, result.err
    assert (", before " in result.err) == bool(other)
    noted = [
        line for line in map(json.loads, Path("t.onnx.run/train.jsonl").read_text().splitlines()) if "rates" in line
    ]
    assert [told in f"{line['rates']}, before {line['before']}" for line in noted] == [True] * bool(other)


def test_a_checkpoint_becomes_a_model(shell: Shell) -> None:
    shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "2", "-o", "t.onnx")
    result = shell("export", "t.onnx.run/checkpoint.safetensors", "--model", "mlp.onnx", "-o", "again.onnx")
    assert result.code == 0, result.err
    assert Path("again.onnx").read_bytes() == Path("t.onnx").read_bytes()
    save(MLP.replace("w1", "other"), Path("other.onnx"))
    result = shell("export", "t.onnx.run/checkpoint.safetensors", "--model", "other.onnx", "-o", "no.onnx")
    assert result.code == 1 and result.facts == ("mismatch", "checkpoint.safetensors") and not Path("no.onnx").exists()
    result = shell("export", "data.npz", "--model", "mlp.onnx", "-o", "no.onnx")
    assert result.code == 1 and result.facts == ("unreadable_file", "data.npz", "193,340,853,072", "25,000,000")


DECODER = """
<ir_version: 8, opset_import: ["": 17]>
decoder (int64[batch, places] tokens) => (float[batch, places, 5] logits)
<float[5, 5] table = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}>
{ logits = Gather(table, tokens) }
"""


def test_a_language_model_learns_what_follows(shell: Shell) -> None:
    """Each token is one more than the one before it; padding, labelled -100, is never learnt."""
    onnx.save(onnx.parser.parse_model(DECODER), "decoder.onnx")
    tokens = (np.arange(40)[:, None] + np.arange(6)) % 4
    tokens[::2, 4:] = 4
    np.savez("text.npz", tokens=tokens, label=np.where(tokens == 4, -100, tokens))
    command = ("train", "decoder.onnx", "--loss", "causal-lm", "--data", "text.npz", "--val", "text.npz")
    result = shell(*command, "--epochs", "30", "--learning-rate", "0.1", "-o", "taught.onnx", "--json")
    assert result.code == 0, result.err
    assert result.json["epochs"][-1]["val_loss"] < 0.05
    logits = answers("taught.onnx", tokens=np.arange(5)[None])
    assert logits[0, :4].argmax(1).tolist() == [1, 2, 3, 0]
    refused = shell(*command, "--metric", "accuracy:class-axis=-1")
    assert refused.code == 2 and refused.facts == ("conflict", "metrics", "accuracy:class-axis=-1")


def test_sequences_of_different_lengths(shell: Shell) -> None:
    """The loss of the validation is PyTorch's mean over all tokens of all batches, however these were cut."""
    onnx.save(onnx.parser.parse_model(DECODER), "decoder.onnx")
    rng = np.random.default_rng(0)
    rows = [[at % 4 for at in range(start, start + int(rng.integers(2, 9)))] for start in range(31)]
    Path("text.jsonl").write_text("".join(json.dumps({"tokens": row, "id": 7}) + "\n" for row in rows))
    command = ("train", "decoder.onnx", "--loss", "causal-lm", "--data", "text.jsonl", "--val", "text.jsonl")
    more = ("--batch-size", "4", "--accumulate", "2", "--epochs", "3", "--learning-rate", "0.1")
    result = shell(*command, *more, "-o", "taught.onnx", "--json")
    assert result.code == 0, result.err
    (table,) = (onnx.numpy_helper.to_array(t) for t in onnx.load("taught.onnx").graph.initializer)
    logits = torch.cat([torch.tensor(table[row[:-1]]) for row in rows])
    following = torch.tensor([token for row in rows for token in row[1:]])
    wanted = torch.nn.functional.cross_entropy(logits, following)
    np.testing.assert_allclose(result.json["epochs"][-1]["val_loss"], wanted, rtol=1e-5)
    packed = shell(*command, *more, "--pack", "--max-length", "16", "-o", "packed.onnx")
    assert packed.code == 0 and "31 samples" in packed.err


PICTURES = """
<ir_version: 8, opset_import: ["": 17]>
pictures (float[batch, 1, 3, 5] x) => (float[batch, 2] y)
<float[15, 2] w = {1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5}>
{ f = Flatten(x)  y = MatMul(f, w) }
"""


def test_bytes_that_are_fed_as_they_are_have_a_caution_with_the_option_that_scales(shell: Shell) -> None:
    save(PICTURES, Path("p.onnx"))
    rng = np.random.default_rng(0)
    pixels, label = rng.integers(0, 256, (20, 1, 3, 5)).astype(np.uint8), rng.random((20, 2)).astype(np.float32)
    np.savez("bytes.npz", x=pixels, label=label)
    np.savez("flags.npz", x=pixels // 128, label=label)
    np.savez("floats.npz", x=pixels.astype(np.float32) / np.float32(255), label=label)
    command = ("train", "p.onnx", "--epochs", "1", "--threads", "1", "--force", "-o", "t.onnx")
    low, high = pixels.min(), pixels.max()
    told = f"caution: 'x' gets unscaled bytes from {low} to {high}: --normalize x:0/1 divides them by 255"
    for more in (command, ("evaluate", "p.onnx", "--loss", "mse"), ("predict", "p.onnx", "-o", "p.npz")):
        result = shell(*more, "--data", "bytes.npz")
        assert result.code == 0 and told in result.err, result.err
        assert "unscaled bytes" not in shell(*more, "--data", "flags.npz", *["--force"] * (more[0] == "predict")).err
    assert "unscaled bytes" not in shell(*command, "--data", "bytes.npz", "--normalize", "x:none").err
    scaled = shell(*command, "--data", "bytes.npz", "--normalize", "x:0/1")
    assert scaled.code == 0 and "unscaled bytes" not in scaled.err, scaled.err
    weights = onnx.load("t.onnx").graph.initializer
    assert "unscaled bytes" not in shell("evaluate", "t.onnx", "--loss", "mse", "--data", "bytes.npz").err
    assert shell(*command, "--data", "floats.npz").code == 0
    assert onnx.load("t.onnx").graph.initializer == weights


def test_flattened_pictures_of_bytes_have_this_caution_too(shell: Shell) -> None:
    save(PICTURES.replace("[batch, 1, 3, 5]", "[batch, 15]"), Path("p.onnx"))
    rng = np.random.default_rng(0)
    pixels, label = rng.integers(0, 256, (20, 15)).astype(np.uint8), rng.random((20, 2)).astype(np.float32)
    np.savez("bytes.npz", x=pixels, label=label)
    np.savez("counts.npz", x=pixels // 2, label=label)
    np.savez("floats.npz", x=pixels.astype(np.float32) / np.float32(255), label=label)
    command = ("train", "p.onnx", "--epochs", "1", "--threads", "1", "--force", "-o", "t.onnx")
    told = shell(*command, "--data", "bytes.npz").err
    assert all(word in told for word in ("'x'", "0 to 255", "--normalize x:0/255"))
    for data, more in (("counts.npz", ()), ("bytes.npz", ("--normalize", "x:none")), ("floats.npz", ())):
        assert "unscaled bytes" not in shell(*command, "--data", data, *more).err
    wanted = onnx.load("t.onnx").graph.initializer
    scaled = shell(*command, "--data", "bytes.npz", "--normalize", "x:0/255")
    assert scaled.code == 0 and "unscaled bytes" not in scaled.err, scaled.err
    for found, expected in zip(onnx.load("t.onnx").graph.initializer, wanted, strict=True):
        np.testing.assert_allclose(*map(numpy_helper.to_array, (found, expected)), rtol=1e-6)


def test_each_epoch_and_each_unused_array_is_printed_once(shell: Shell) -> None:
    """In a pipe, and with one file for training and validation."""
    arrays = dict(np.load("data.npz"))
    prefixed = {f"{use}_{name}": array for use in ("train", "test") for name, array in arrays.items()}
    np.savez("both.npz", **prefixed, extra=arrays["x"], train_extra=arrays["x"])
    np.savez("one.npz", **arrays, extra=arrays["x"])
    prefixes = ("--prefix", "train_", "--val-prefix", "test_")
    for name, extra, more in (("both.npz", "train_extra", prefixes), ("one.npz", "extra", ())):
        arguments = ("--data", name, "--val", name, *more, "--epochs", "3", "--force")
        result = shell("train", "mlp.onnx", *arguments, "-o", "t.onnx")
        assert result.code == 0, result.err
        lines = (result.out + result.err).splitlines()
        for epoch in (1, 2):
            assert sum(line.startswith((f"epoch {epoch}", f"{epoch} ")) for line in lines) == 1, lines
        ignored = [line for line in lines if "not model inputs" in line]
        assert ignored == [f"ignoring arrays of '{name}' that are not model inputs: {extra}"], lines
        assert not any("onnxgrad train" in line for line in lines), "the command line is not repeated"


# -- what is told before the first step, and what ends a run -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--data", "gone.npz"), 1, "gone.npz"),
        (("--data", "data.npz", "--label", "y"), 2, "'y'"),
        (("--data", "data.npz", "--batch-size", "0"), 2, "batch-size"),
        (("--data", "data.npz", "--patience", "3"), 2, "add --val"),
        (("--data", "data.npz", "--schedule", "plateau"), 2, "add --val"),
        (("--data", "data.npz", "--schedule", "cosin"), 2, "did you mean cosine"),
        (("--data", "data.npz", "--provider", "quantum"), 2, "no provider 'quantum'"),
        (("--data", "data.npz", "--val", "data.npz", "--metric", "acuracy"), 2, "did you mean accuracy"),
        (("--data", "data.npz", "--val", "data.npz", "--metric", "top-k"), 2, "top-k can't compare predictions"),
        (("--data", "data.npz", "--val", "data.npz", "--metric", "mae", "--metric", "mae"), 2, "have the name 'mae'"),
        (("--data", "data.npz", "--resume"), 1, "contains no checkpoint"),
        (("--data", "data.npz", "-o", "mlp.onnx"), 2, "never overwritten"),
        (("--data", "data.npz", "--optimizer", "adm"), 2, "did you mean adam"),
        (
            ("--data", "data.npz", "--lora", "2", "--adapter", "a.safetensors", "-o", "a.safetensors"),
            2,
            "would be written twice",
        ),
    ],
)
@pytest.mark.thinned(2)
def test_refused_before_the_first_step(shell: Shell, arguments: tuple[str, ...], code: int, words: str) -> None:
    result = shell("train", "mlp.onnx", *arguments)
    assert result.code == code and words in result.err, result.err
    assert not list(Path().glob("*trained*.onnx")) and not list(Path().glob("*/train.jsonl"))


@pytest.mark.slow
def test_no_file_of_a_run_is_an_output(shell: Shell) -> None:
    """What a run leaves in its folder tells their names, so that a new one is not forgotten."""
    pytest.importorskip("tensorboardX")
    options = ("--val", "data.npz", "--metric", "mae", "--schedule", "linear", "--log", "csv", "--log", "tensorboard")
    command = ("train", "mlp.onnx", "--data", "data.npz", "--normalize", "x:auto", *options)
    assert shell(*command, "--run", "run").code == 0
    names = sorted(path.name for path in Path("run").iterdir())
    assert {"checkpoint.safetensors", "train.csv", "preprocessing.json", "report.html", "rate.svg"} < set(names)
    Path("new").mkdir()
    Path("link").symlink_to("new")
    adapter = ("--lora", "1", "--adapter", "new/best.safetensors")
    page = ("--picture", "new/report.html")
    for more in (*(("-o", f"link/{name}") for name in names), adapter, page):
        result = shell(*command, "--run", "new", *more)
        assert result.code == 2 and result.facts == ("conflict", Path(more[-1]).name), (more, result.err)
        assert not list(Path("new").iterdir())
    assert shell(*command, "--run", "new", "-o", "new/model.onnx").code == 0


def test_the_folder_of_a_run_is_called_by_the_name_that_was_typed(shell: Shell) -> None:
    Path("far").mkdir()
    Path("link.onnx").symlink_to("far/model.onnx")
    command = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "-o", "link.onnx")
    assert shell(*command).code == 0
    assert Path("link.onnx.run/report.md").is_file()
    assert [path.name for path in Path("far").iterdir()] == ["model.onnx"] and Path("link.onnx").is_symlink()
    assert shell(*command, "--epochs", "2", "--resume").code == 0


def test_a_loss_that_is_no_number_names_step_and_samples(shell: Shell) -> None:
    shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "--run", "run", "-o", "t.onnx")
    values, progress = load_checkpoint(Path("run/checkpoint.safetensors"))
    arguments = ("--optimizer", "sgd", "--learning-rate", "1e30", "--epochs", "3", "--run", "wild", "-o", "u.onnx")
    result = shell("train", "mlp.onnx", "--data", "data.npz", *arguments)
    assert result.code == 1 and result.facts[:2] == ("not_finite", "2") and result.facts[-1] == "Mul_out"
    assert not Path("u.onnx").exists()
    assert progress["steps"] == 2 and np.isfinite(values["w1"]).all()


def test_a_misspelt_file_is_reported_before_the_run_of_the_correct_one(shell: Shell) -> None:
    arguments = ("--data", "data.npz", "--epochs", "1", "-o", "t.onnx")
    assert shell("train", "mlp.onnx", *arguments).code == 0
    for command, name in (
        (("mpl.onnx", *arguments), "mpl.onnx"),
        (("mlp.onnx", "--data", "date.npz", "-o", "t.onnx"), "date.npz"),
    ):
        result = shell("train", *command)
        assert result.code == 1 and f"'{name}'" in result.err and result.facts[0] == "missing_file"


def test_a_folder_holds_one_run(shell: Shell) -> None:
    assert shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "-o", "t.onnx").code == 0
    Path("broken.onnx").write_text("no model")
    result = shell("train", "broken.onnx", "--data", "data.npz", "--epochs", "1", "-o", "t.onnx")
    assert result.code == 2 and result.facts == ("file_exists", "t.onnx.run"), "it is found before the model is read"
    assert "`force=True`" in result.hint and "`resume`" in result.hint
    arguments = ("--epochs", "2", "--batch-size", "8", "--resume", "-o", "t.onnx")
    result = shell("train", "mlp.onnx", "--data", "data.npz", *arguments)
    assert result.code == 2 and result.facts[1:] == ("32", "8")


def test_force_replaces_a_run_and_nothing_else(shell: Shell) -> None:
    """The second run has no validation, no table and other weights: nothing of the first one may stay."""
    command = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "2", "--threads", "1")
    first = ("--val", "data.npz", "--metric", "mae", "--log", "csv", "--normalize", "x:auto", "--freeze", "w1")
    assert shell(*command, *first, "-o", "t.onnx").code == 0
    folder = Path("t.onnx.run")
    names = {path.name for path in folder.iterdir()}
    assert {"best.safetensors", "metric-1.svg", "preprocessing.json", "train.csv"} <= names
    for name in ("notes.txt", "metric-1.backup.svg", "tensorboard/notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    Path(folder, "tensorboard", "events.out.tfevents.1").touch()
    rerun = (*command, "--learning-rate", "0.01", "-o", "t.onnx")
    assert shell(*rerun).code == 2
    assert shell(*rerun, "--force").code == 0
    fresh = shell(*rerun[:-1], "fresh.onnx")
    assert fresh.code == 0, fresh.err
    assert Path("t.onnx").read_bytes() == Path("fresh.onnx").read_bytes()
    mine = {"notes.txt", "metric-1.backup.svg", "tensorboard"}
    assert {path.name for path in folder.iterdir()} == {path.name for path in Path("fresh.onnx.run").iterdir()} | mine
    assert [path.name for path in Path(folder, "tensorboard").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("name", ["report.md", "checkpoint.safetensors", "train.jsonl"])
def test_no_file_that_a_user_has_made_is_replaced(shell: Shell, name: str, force: tuple[str, ...]) -> None:
    Path("docs").mkdir()
    Path("docs", name).write_text("mine")
    for _ in range(2):
        result = shell("train", "mlp.onnx", "--data", "data.npz", "--run", "docs", *force, "-o", "t.onnx")
        assert result.code == 2 and result.facts[1:] == ("run", name), result.err
        assert [path.name for path in Path("docs").iterdir()] == [name] and Path("docs", name).read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--schedule", "cosin"), "did you mean cosine"),
        (("--data", "gone.npz"), "gone.npz"),
        (("--data", "t.onnx.run/train.csv", "--map", "loss=label"), ""),
        (("--lora", "1", "--adapter-from", "t.onnx.run/checkpoint.safetensors"), ""),
    ],
)
def test_force_keeps_the_run_until_the_new_one_begins(shell: Shell, more: tuple[str, ...], words: str) -> None:
    command = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "--log", "csv", "-o", "t.onnx")
    assert shell(*command).code == 0
    before = shell.files()
    result = shell(*command, "--force", *more)
    assert result.code in (1, 2) and words in result.err, result.err
    assert shell.files() == before


def test_the_model_and_the_run_need_two_names(shell: Shell) -> None:
    Path("broken.onnx").write_text("no model")
    result = shell("train", "broken.onnx", "--data", "data.npz", "--run", "t.onnx", "-o", "t.onnx")
    assert result.code == 2 and result.facts == ("conflict", "t.onnx"), "it is found before the model is read"


@pytest.mark.parametrize("more", [(), ("--freeze", "w1"), ("--lora", "1")])
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.thinned(3)
def test_a_run_does_not_continue_with_another_models_weights(
    shell: Shell, external: bool, more: tuple[str, ...]
) -> None:
    """The graphs are equal, and external data have the same name. The same model may move to another folder."""
    command = ("--data", "data.npz", "--resume", "auto", "-o", "t.onnx", *more)
    first, other = onnx.load("mlp.onnx"), onnx.load("mlp.onnx")
    for tensor in other.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, tensor.name))
    for name, model in (("first", first), ("other", other)):
        Path(name).mkdir()
        onnx.save(model, f"{name}/m.onnx", save_as_external_data=external, size_threshold=0, location="m.bin")
    assert shell("train", "first/m.onnx", *command, "--epochs", "1").code == 0
    before = shell.files()
    result = shell("train", "other/m.onnx", *command, "--epochs", "2")
    assert result.code == 2 and "the run was started with another model" in result.err, result.err
    assert shell.files() == before
    Path("first").rename("moved")
    assert shell("train", "moved/m.onnx", *command, "--epochs", "2").code == 0


def test_force_does_not_replace_a_run_that_it_reads(shell: Shell) -> None:
    """Adapters lie in the folder under the name of a checkpoint."""
    command = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "-o", "t.onnx")
    assert shell(*command, "--lora", "1", "--adapter", "a.safetensors").code == 0
    Path("a.safetensors").rename("t.onnx.run/best.safetensors")
    before = shell.files()
    result = shell(*command, "--adapter-from", "t.onnx.run/best.safetensors", "--force")
    assert result.code == 2 and result.facts == ("conflict", "best.safetensors"), result.err
    assert shell.files() == before


def test_resume_auto_begins_continues_and_then_does_nothing(shell: Shell) -> None:
    command = ("train", "mlp.onnx", "--data", "data.npz", "--val", "0.2", "--resume", "auto", "--threads", "1")
    assert shell(*command, "--epochs", "4", "-o", "whole.onnx").code == 0
    assert shell(*command, "--epochs", "2", "-o", "t.onnx").code == 0
    assert shell(*command, "--epochs", "4", "-o", "t.onnx").code == 0
    assert Path("t.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    before, times = shell.files(), {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.name != "lock"}
    again = shell(*command, "--epochs", "4", "-o", "t.onnx", "--json")
    assert again.code == 0 and shell.files() == before and "epoch 1" not in again.err and "'t.onnx.run'" in again.err
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert again.json["files"] == [] and len(again.json["epochs"]) == 4
    Path("t.onnx").unlink()
    assert shell(*command, "--epochs", "4", "-o", "t.onnx", "--json").json["files"]
    assert Path("t.onnx").read_bytes() == Path("whole.onnx").read_bytes()


@pytest.mark.parametrize("more", [("--max-steps", "3"), ("--val", "data.npz", "--patience", "1")])
def test_a_run_that_ended_early_is_finished_too(shell: Shell, more: tuple[str, ...]) -> None:
    command = ("train", "mlp.onnx", "--data", "data.npz", "--learning-rate", "3", "--epochs", "30", *more)
    assert shell(*command, "-o", "t.onnx").code == 0
    before = shell.files()
    again = shell(*command, "-o", "t.onnx", "--resume", "auto", "--json")
    assert again.code == 0 and again.json["files"] == [] and "'t.onnx.run'" in again.err, again.err
    assert shell.files() == before


@pytest.mark.parametrize(
    ("begun", "more", "changed"),
    [
        (("--optimizer", "sgd"), (), ["--optimizer was sgd, now adam"]),
        (("--freeze", "w1"), (), ["--freeze was w1, now not set"]),
        (("--lora", "2"), ("--lora", "2:8"), ["--lora was 2, now 2:8"]),
        ((), ("--val", "data.npz"), ["--val was not set, now data.npz"]),
        (
            ("--val", "data.npz", "--metric", "mae"),
            ("--val", "data.npz", "--metric", "r2", "--learning-rate", "0.5"),
            ["--metric was mae, now r2"],
        ),
        (
            ("--optimizer-option", "weight-decay=0.1", "--seed", "1"),
            ("--clip-norm", "1", "--lora-dora", "--lora", "1"),
            [
                "--clip-norm was not set, now 1",
                "--lora was not set, now 1",
                "--lora-dora was off, now on",
                "--optimizer-option was weight-decay=0.1, now not set",
                "--seed was 1, now 0",
            ],
        ),
    ],
)
def test_a_run_goes_on_as_it_was_begun(
    shell: Shell, begun: tuple[str, ...], more: tuple[str, ...], changed: list[str]
) -> None:
    assert shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", *begun, "-o", "t.onnx").code == 0
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "2", *more, "-o", "t.onnx", "--resume")
    assert result.code == 2, result.err
    assert [line.strip() for line in result.err.splitlines() if line.startswith("  ")] == changed, result.err


def test_data_for_validation_that_a_fixed_batch_leaves_out(shell: Shell) -> None:
    save(MLP.replace("batch", "8"), Path("eight.onnx"))
    arrays = dict(np.load("data.npz"))
    np.savez("few.npz", **{name: array[:5] for name, array in arrays.items()})
    arguments = ("train", "eight.onnx", "--data", "data.npz", "--batch-size", "8", "--epochs", "1", "-o", "t.onnx")
    result = shell(*arguments, "--val", "few.npz")
    assert result.code == 2 and result.facts == ("no_data", "few.npz", "5", "8") and not Path("t.onnx.run").exists()
    result = shell(*arguments, "--val", "data.npz")
    assert result.code == 0 and "2 samples of 'data.npz'" in result.err, result.err


BRANCHES = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x, bool c) => (float[n, 2] y) {
  y = If(c) <then_branch = a () => (float[n, 2] p) <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { p = MatMul(x, w) },
             else_branch = b () => (float[n, 2] q) <float[4, 2] w = {8, 7, 6, 5, 4, 3, 2, 1}> { q = MatMul(x, w) }>
}"""
FLOATS = """<ir_version: 8, opset_import: ["": 17]>
g (float[n, 2] x) => (float[n, 2] y) { b = Constant <value_floats = [1.0, 2.0]> () y = Mul(x, b) }"""


@pytest.mark.parametrize(("text", "name"), [(BRANCHES, "w_1"), (FLOATS, "b")])
def test_weights_that_can_not_be_written_back_are_told_before(shell: Shell, text: str, name: str) -> None:
    save(text, Path("odd.onnx"))
    x = np.ones((8, 4 if "If" in text else 2), np.float32)
    np.savez("odd.npz", x=x, c=np.array(True), label=x[:, :2])
    result = shell("train", "odd.onnx", "--data", "odd.npz", "-o", "t.onnx")
    assert result.code == 2 and result.facts[1:] == (name,), result.err
    assert not Path("t.onnx.run").exists()


# -- cut off -------------------------------------------------------------------------------------------------------

LONG = ("--mode", "train", "--epochs", "6", "--save-every", "5", "--schedule", "cosine", "--optimizer", "adamw")


def begin(folder: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    model = str(ROOT / "sample_models" / "digits_cnn.onnx")
    command = (sys.executable, "-m", "onnxgrad_cli", "train", model, *ON_DIGITS, *LONG, "-o", out, *more)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> int:
    _, err = process.communicate(timeout=300)
    assert process.returncode in (0, 130, -signal.SIGKILL), err.decode()
    return process.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of a run that nobody cut off."""
    folder = tmp_path_factory.mktemp("whole")
    assert finish(begin(folder, "whole.onnx")) == 0
    return (folder / "whole.onnx").read_bytes()


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    log = folder / "cut.onnx.run" / LOG
    while process.poll() is None and (not log.exists() or len(log.read_bytes().splitlines()) < count):
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.long)])
def test_killed_again_and_again_resume_auto_ends_bit_for_bit(whole: bytes, tmp_path: Path, kills: int) -> None:
    """Half of the kills come at any moment of a process, half after a step: the steps are a small part of the time."""
    rng, steps = np.random.default_rng(kills), 0
    for number in range(kills):
        process = begin(tmp_path, "cut.onnx", "--resume", "auto")
        if number % 2:
            time.sleep(rng.random() * 2)
        else:
            wait_for_steps(tmp_path, steps + int(rng.integers(1, 2 * 260 // kills)), process)
        process.kill()
        finish(process)
        log = tmp_path / "cut.onnx.run" / LOG
        steps = len(log.read_bytes().splitlines()) if log.exists() else 0
    assert finish(begin(tmp_path, "cut.onnx", "--resume", "auto")) == 0
    assert (tmp_path / "cut.onnx").read_bytes() == whole
    assert not list((tmp_path / "cut.onnx.run").glob(".*"))  # nor is anything half-written left there


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to be asked with")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_first(whole: bytes, tmp_path: Path, number: signal.Signals) -> None:
    process = begin(tmp_path, "cut.onnx")
    wait_for_steps(tmp_path, 48, process)
    process.send_signal(number)
    assert finish(process) == 130
    assert not (tmp_path / "cut.onnx").exists()
    steps = load_checkpoint(tmp_path / "cut.onnx.run" / "checkpoint.safetensors")[1]["steps"]
    lines = (tmp_path / "cut.onnx.run" / LOG).read_text().splitlines()
    assert steps == max(json.loads(line)["step"] for line in lines)  # no step is lost
    assert finish(begin(tmp_path, "cut.onnx", "--resume", "auto")) == 0
    assert (tmp_path / "cut.onnx").read_bytes() == whole


def test_what_a_killed_run_had_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    unfinished = tmp_path / ".checkpoint.safetensors.0123456789abcdef.onnxgrad.tmp"
    theirs = {tmp_path / name for name in (".x.tmp", ".notes.4711.tmp", "checkpoint.tmp")}
    for file in (unfinished, *theirs):
        file.write_bytes(b"half")
    with run_folder(tmp_path):
        assert set(tmp_path.iterdir()) == theirs | {tmp_path / "lock"}


def test_two_runs_in_one_folder_are_refused(shell: Shell) -> None:
    with run_folder(Path("held")):
        result = shell("train", "mlp.onnx", "--data", "data.npz", "--run", "held", "-o", "t.onnx")
    assert result.code == 2 and result.facts[1:] == ("run", "held")
    assert shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "--run", "held", "-o", "t.onnx").code == 0


def test_without_validation_the_run_keeps_the_weights_that_are_written(shell: Shell) -> None:
    """The loss grows from the second epoch on: no earlier epoch is kept in place of the last one."""
    run = ("train", "mlp.onnx", "--data", "data.npz", "--optimizer", "sgd", "--learning-rate", "10", "-o", "t.onnx")
    assert shell(*run, "--epochs", "1").code == 0
    assert shell(*run, "--epochs", "3", "--resume").code == 0
    steps = [json.loads(line) for line in Path("t.onnx.run/train.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in steps if "rate" not in line]
    assert len(losses) == 3 and min(losses) < losses[-1], losses
    assert shell("export", "t.onnx.run", "--model", "mlp.onnx", "-o", "e.onnx").code == 0
    assert onnx.load("e.onnx").graph == onnx.load("t.onnx").graph


@pytest.mark.parametrize("name", ["report.md", "report.html", "page.html"])
def test_what_a_run_ends_with_is_written_together(shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A disk that is full at a report or the picture leaves no model without them, and no half of anything."""
    opened = Path.open

    def full(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name.startswith(f".{name}.") and self.suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, *arguments, **more)

    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "2", "--picture", "page.html", "-o", "t.onnx")
    monkeypatch.setattr(Path, "open", full)
    result = shell(*arguments)
    assert result.code == 1 and result.facts == ("unwritable_file", name), result.err
    assert not Path("t.onnx").exists() and not Path("page.html").exists()
    assert {path.name for path in Path("t.onnx.run").iterdir()} == {
        "checkpoint.safetensors", "lock", "train.jsonl",
    }  # fmt: skip
    monkeypatch.undo()
    monkeypatch.chdir(shell.folder)
    assert shell(*arguments, "--resume").code == 0, "the steps are not lost"


def test_an_exported_model_and_its_adapter_are_written_together(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell("train", "mlp.onnx", "--data", "data.npz", "--lora", "1", "--epochs", "1", "-o", "t.onnx").code == 0

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", full)
    before = shell.files()
    result = shell("export", "t.onnx.run", "--model", "mlp.onnx", "--adapter", "a.safetensors", "-o", "e.onnx")
    assert result.code == 1 and result.facts == ("unwritable_file", "a.safetensors")
    assert shell.files() == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint(shell: Shell, share: float) -> None:
    """The limit on a file's size is met in the middle of a write, as the end of a disk is: of the log or the save."""
    import resource

    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--threads", "1", "--save-every", "1")
    assert shell(*arguments, "--epochs", "6", "-o", "whole.onnx").code == 0
    assert shell(*arguments, "--epochs", "2", "-o", "t.onnx").code == 0
    before, (soft, hard) = shell.files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = int(share * len(before["t.onnx.run/checkpoint.safetensors"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        full = shell(*arguments, "--epochs", "6", "-o", "t.onnx", "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.code == 1 and full.facts[-1] == ("checkpoint.safetensors" if share else "train.jsonl"), full.err
    assert not share or ("step 5:" in full.err and "continue with --resume: 't.onnx.run' has" in full.err), full.err
    after = shell.files()
    assert after.keys() == before.keys()  # nothing half-written
    for name, data in before.items():
        assert after[name] == data or (share and name == "t.onnx.run/train.jsonl" and after[name].startswith(data))
    assert shell(*arguments, "--epochs", "6", "-o", "t.onnx", "--resume").code == 0
    assert Path("t.onnx").read_bytes() == Path("whole.onnx").read_bytes()


def test_a_disk_without_room_is_refused_before_the_first_step(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints hold 21 weights and two moments of each, twice while one replaces the other."""
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "-o", "t.onnx")
    free = 2 * 3 * 4 * (12 + 3 + 6) + Path("mlp.onnx").stat().st_size
    monkeypatch.setattr("shutil.disk_usage", lambda _: Mock(free=free - 1))
    refused = shell(*arguments)
    assert refused.code == 1 and f"{free - 1:,} are free" in refused.err, refused.err
    assert refused.facts[:2] == ("unwritable_file", ".") and "`run`" in refused.hint
    assert not Path("t.onnx").exists() and not Path("t.onnx.run/train.jsonl").exists()
    assert shell(*arguments, "--val", "0.2").facts[:2] == ("unwritable_file", "t.onnx.run")
    monkeypatch.setattr("shutil.disk_usage", lambda _: Mock(free=free + 100))
    assert shell(*arguments, "--run", "again").code == 0
    assert shell(*arguments, "--val", "0.2").facts[:2] == ("unwritable_file", "t.onnx.run"), "best.safetensors"


@pytest.mark.parametrize("other", ["--loss=mae", "--optimizer-option=weight-decay=0.5", "--accumulate=2"])
def test_a_run_goes_on_with_what_it_was_begun_with(shell: Shell, other: str) -> None:
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--batch-size", "10", "--threads", "1", "-o", "t.onnx")
    assert shell(*arguments, "--epochs", "1").code == 0
    refused = shell(*arguments, "--epochs", "2", "--resume", other)
    assert refused.code == 2 and other.split("=")[0] in refused.err
    assert shell(*arguments, "--epochs", "2", "--resume").code == 0


def test_batches_that_fill_no_step_are_named(shell: Shell) -> None:
    """45 batches are 6 groups of 7, and 3 batches that change no weight."""
    arguments = ("--epochs", "1", "--batch-size", "2", "--accumulate", "7", "--threads", "1", "--no-shuffle")
    data = np.load("data.npz")
    samples = {name: np.concatenate([data[name], data[name][:40]]) for name in data.files}
    np.savez("all.npz", **samples)
    np.savez("used.npz", **{name: array[:84] for name, array in samples.items()})
    whole = shell("train", "mlp.onnx", "--data", "all.npz", *arguments, "-o", "all.onnx")
    used = shell("train", "mlp.onnx", "--data", "used.npz", *arguments, "-o", "used.onnx")
    assert all(word in whole.err for word in ("3 of 45 batches", " 7 batches"))
    assert used.code == 0 and " batches" not in used.err
    assert list(onnx.load("all.onnx").graph.initializer) == list(onnx.load("used.onnx").graph.initializer)


BY_ITS_BATCH = """<ir_version: 8, opset_import: ["": 17]> net (float[n, 4] x) => (float[n, 2] y)
<float[4] scale = {1, 2, 0.5, 1.5}, float[4] shift = {0.1, 0.2, 0.3, 0.4}, float[4, 2] w = {1, 2, 3, -4, 5, 6, 7, 8}>
{ m = ReduceMean <axes = [0], keepdims = 0> (x)  k = ReduceMean <axes = [0]> (x)  d = Sub(x, k)  s = Mul(d, d)
  v = ReduceMean <axes = [0], keepdims = 0> (s)  b = BatchNormalization(x, scale, shift, m, v)  y = MatMul(b, w) }"""
BY_HAND = BY_ITS_BATCH.replace("b = BatchNormalization(x, scale, shift, m, v)", "b = Div(d, v)").replace(
    "float[4] scale = {1, 2, 0.5, 1.5}, float[4] shift = {0.1, 0.2, 0.3, 0.4}, ", ""
)


def alone(model: str, x: np.ndarray) -> np.ndarray:
    return np.concatenate([answers(model, x=x[i : i + 1]) for i in range(len(x))])


IN_TRAINING = BY_ITS_BATCH.replace("b = BatchNormalization", "b, c, e = BatchNormalization <training_mode = 1>")
"""As PyTorch's older exporter writes it; the text before is as the newer one does."""


@pytest.mark.parametrize(("text", "mode"), [(BY_ITS_BATCH, "train"), (IN_TRAINING, "keep"), (IN_TRAINING, "train")])
def test_a_normalization_by_its_own_batch_learns_running_statistics(shell: Shell, text: str, mode: str) -> None:
    save(text, Path("net.onnx"))
    x = (np.random.default_rng(1).standard_normal((64, 4)) * 3 + 1).astype(np.float32)
    np.savez("x.npz", x=x, label=x[:, :2])
    given = ("--data", "x.npz", "--epochs", "3", "--batch-size", "64", "--mode", mode, "-o", "out.onnx")
    result = shell("train", "net.onnx", *given)
    assert result.code == 0, result.err
    assert "own batch" not in result.err
    np.testing.assert_allclose(answers("out.onnx", x=x), alone("out.onnx", x), rtol=1e-6)
    model = onnx.load("out.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["BatchNormalization", "MatMul"]
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    moved = 1 - 0.9**3  # of the way from 0 and 1 to the statistics of all samples
    np.testing.assert_allclose(stored["b/running_mean"], moved * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stored["b/running_var"], 1 - moved + moved * x.var(0), rtol=1e-5)
    assert shell("export", "out.onnx.run/checkpoint.safetensors", "--model", "net.onnx", "-o", "back.onnx").code == 0
    np.testing.assert_array_equal(answers("back.onnx", x=x), answers("out.onnx", x=x))


@pytest.mark.parametrize(
    ("text", "node", "option"),
    [(BY_ITS_BATCH, "BatchNormalization_b", "--mode train learns running statistics"), (BY_HAND, "Sub_d", "")],
)
def test_a_model_that_normalizes_by_its_own_batch_is_no_inference_model(
    shell: Shell, text: str, node: str, option: str
) -> None:
    save(text, Path("net.onnx"))
    result = shell("train", "net.onnx", "--data", "data.npz", "--epochs", "1", "-o", "out.onnx")
    assert result.code == 0, result.err
    x = np.load("data.npz")["x"]
    assert (
        np.abs(answers("out.onnx", x=x) - alone("out.onnx", x)).max() > 0.1
        or not np.isfinite(alone("out.onnx", x)).all()
    )
    for told in (result.err, Path("out.onnx.run/report.md").read_text().replace("`", "'")):
        assert f"'{node}'" in told and "inference model" in told and option in told.replace("'", "")


@pytest.mark.parametrize(
    "text",
    [
        BY_HAND.replace("axes = [0]", "axes = [1]").replace("keepdims = 0", "keepdims = 1"),
        BY_HAND.replace("n, 4", "1, 4"),
    ],
)
def test_a_normalization_of_a_sample_alone_is_one_of_inference(shell: Shell, text: str) -> None:
    save(text, Path("net.onnx"))
    result = shell("build", "net.onnx", "--loss", "mse", "-o", "out.onnx", "--no-verify")
    assert result.code == 0 and "own batch" not in result.err, result.err


def test_running_statistics_of_momentum_1_are_named(shell: Shell) -> None:
    text = BY_ITS_BATCH.replace("scale, shift, m, v)", "scale, shift, mean, var)").replace(
        "float[4] scale", "float[4] mean = {0, 0, 0, 0}, float[4] var = {1, 1, 1, 1}, float[4] scale"
    )
    save(
        text.replace("b = BatchN", "b, c, e = BatchN").replace("tion(x", "tion <training_mode = 1, momentum = 1.0> (x"),
        Path("net.onnx"),
    )
    result = shell("train", "net.onnx", "--data", "data.npz", "--epochs", "1", "-o", "out.onnx")
    assert result.code == 0, result.err
    assert "'BatchNormalization_b' is 1," in result.err
    save(text, Path("usual.onnx"))
    assert "momentum" not in shell("train", "usual.onnx", "--data", "data.npz", "--epochs", "1", "--mode", "train").err


SCALED = '''
def scaled(op, prediction, label, *, factor: float = 1.0):
    """The squared error times a factor."""
    return (prediction - label) * (prediction - label) * factor
'''


@pytest.mark.parametrize(
    "options",
    [
        ("--loss", "scaled.py:scaled", "--loss-option", "factor=2.5"),
        ("--loss", "huber::label:0.5", "--loss", "mae::label", "--loss-option", "delta=0.5", "--l2", "0.01"),
        ("--loss", "mse", "--train", "*2", "--optimizer", "adamw", "--optimizer-option", "weight-decay=0.1"),
        ("--loss", "mse", "--lora", "2:4", "--lora-dora", "--optimizer", "adamw", "--clip-norm", "1.5"),
        ("--loss", "mse", "--optimizer", "adamw", "--group", "w1:lr=0.5", "--dim", "batch=5", "--mode", "train"),
    ],
)
def test_the_next_command_of_a_build_trains_what_it_has_built(shell: Shell, options: tuple[str, ...]) -> None:
    Path("scaled.py").write_text(SCALED)
    report = shell("build", "mlp.onnx", *options, "-o", "built.onnx", "--json").json
    (text,) = (step["text"] for step in report["next"] if step["text"].startswith("onnxgrad train"))
    words = shlex.split(text.replace("--data DATA", "--data data.npz"))[1:]
    more = ("--epochs", "2", "--batch-size", "5", "--threads", "1", "--json")
    found = shell(*words, *more, "-o", "next.onnx")
    own = shell("train", "mlp.onnx", *options, "--data", "data.npz", *more, "-o", "own.onnx")
    assert (found.code, own.code) == (0, 0), found.err
    assert Path("next.onnx").read_bytes() == Path("own.onnx").read_bytes()
