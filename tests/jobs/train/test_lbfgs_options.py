"""`onnxgrad train --optimizer lbfgs`, beside scipy's solver with PyTorch's gradients."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from onnxgrad_cli import Course, LossSpec, Options, build, run_train
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.jobs.train.lbfgs_options import check_lbfgs
from onnxgrad_cli.options import LoraSpec
from onnxgrad_cli.options.data import SampleOptions
from onnxgrad_cli.training.run.folder import load_checkpoint
from tests.cli_harness import MLP, Shell, save

optimize = pytest.importorskip("scipy.optimize", reason="the solver is scipy's")

SETTINGS = {"maxcor": 50, "ftol": 0.0, "gtol": 1e-8}
LBFGS = Options(optimizer="lbfgs")
POISSON = """import math


def poisson(op, u, x: "input"):
    residual = op.laplacian(u, x) + math.pi**2 * op.Sin(math.pi * x)
    ends = op.model(x=op.const([[-1.0], [1.0]], x))
    return residual * residual + 100 * op.sum(ends * ends, [0])
"""
DROPOUT = """<ir_version: 8, opset_import: ["": 17]> m (float[n, 4] x) => (float[n, 2] y)
<float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float r = {0.5}, bool t = {1}> { d = Dropout(x, r, t) y = MatMul(d, w) }"""
NORMALIZED = """<ir_version: 8, opset_import: ["": 17]> m (float[n, 4] x) => (float[n, 4] y)
<float[4] s = {1, 1, 1, 1}, float[4] b = {0, 0, 0, 0}, float[4] m = {0, 0, 0, 0}, float[4] v = {1, 1, 1, 1}>
{ y = BatchNormalization(x, s, b, m, v) }"""
HALF = """<ir_version: 8, opset_import: ["": 17]> m (float16[n, 4] x) => (float16[n, 2] y)
<float16[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w) }"""
QUANTIZED = """<ir_version: 8, opset_import: ["": 17]> m (float[n, 4] x) => (float[n, 2] y)
<float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, float s = {0.1}, int8 z = {0}>
{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) h = MatMul(d, w) k = QuantizeLinear(h, s, z)
  y = DequantizeLinear(k, s, z) }"""
FIXED = MLP.replace("batch", "10")


def sharp(op, y):
    return op.Sqrt(op.Abs(y)) * 1e4


def whole(op, y, label):
    return op.sum((y - label) * (y - label)) / 50.0


def logarithm(op, y, label):
    return op.Log(y - 100.0)


def held(op, y, label):
    return op.stop_gradient(y) * (y - label) * (y - label)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 4))
    np.savez("data.npz", x=np.float32(x), label=np.float32(np.stack([np.sin(x.sum(1)), x[:, 0] * x[:, 1]], 1)))
    save(MLP, Path("mlp.onnx"))
    return Shell(tmp_path, capsys)


def network(dtype: torch.dtype = torch.float64, inputs: int = 4, outputs: int = 2) -> nn.Module:
    """A network, also exported to net.onnx, and the arrays of data.npz in its type."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)
    x = torch.ones(3, inputs, dtype=dtype)
    torch.onnx.export(
        found, (x,), "net.onnx", input_names=["x"], output_names=["y"], dynamo=False,
        dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
    )  # fmt: skip
    return found


def in_type(dtype: torch.dtype, path: str = "data.npz") -> list[torch.Tensor]:
    arrays = {name: torch.tensor(array).to(dtype) for name, array in np.load(path).items()}
    np.savez("typed.npz", **{name: array.numpy() for name, array in arrays.items()})
    return list(arrays.values())


def solved(net: nn.Module, loss: Callable[[], torch.Tensor], iterations: int) -> Any:
    """Minimize with scipy and PyTorch's gradients, without onnxgrad. The network gets the last weights."""
    weights = list(net.parameters())

    def write(vector: np.ndarray) -> None:
        nn.utils.vector_to_parameters(torch.tensor(vector).to(weights[0].dtype), weights)

    def both(vector: np.ndarray) -> tuple[float, np.ndarray]:
        write(vector)
        value = loss()
        slopes = torch.autograd.grad(value, weights)
        return float(value), np.concatenate([slope.double().numpy().reshape(-1) for slope in slopes])

    begin = np.concatenate([weight.detach().double().numpy().reshape(-1) for weight in weights])
    found = optimize.minimize(both, begin, jac=True, method="L-BFGS-B", options={**SETTINGS, "maxiter": iterations})
    write(found.x)
    return found


def assert_equal(file: str, net: nn.Module, tolerance: float) -> None:
    ours = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer}
    for name, weight in net.named_parameters():
        np.testing.assert_allclose(ours[name], weight.detach(), rtol=0, atol=tolerance)


def trained(shell: Shell, *words: str, out: str = "t.onnx", model: str = "net.onnx") -> dict[str, Any]:
    arguments = ("--data", "typed.npz", "--optimizer", "lbfgs", "--epochs", "20", "--threads", "1", "-o", out)
    result = shell("train", model, *arguments, *words, "--json")
    assert result.code == 0, result.err
    return result.json


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("size", [7, 50])
@pytest.mark.parametrize("words", [(), ("--l2", "0.1"), ("--reduction", "sum")], ids=" ".join)
def test_the_weights_are_scipys(
    shell: Shell, dtype: torch.dtype, tolerance: float, size: int, words: tuple[str, ...]
) -> None:
    net = network(dtype)
    x, label = in_type(dtype)

    def loss() -> torch.Tensor:
        found = nn.functional.mse_loss(net(x), label, reduction="sum" if "sum" in words else "mean")
        return found + 0.1 * sum((weight * weight).sum() for weight in net.parameters()) if "--l2" in words else found

    found = trained(shell, "--batch-size", str(size), *words)
    reference = solved(net, loss, 20)
    assert found["steps"] == len(found["epochs"]) == reference.nit == 20
    assert_equal("t.onnx", net, tolerance)
    value = reference.fun / (50 if "sum" in words else 1)
    assert found["epochs"][-1]["loss"] == pytest.approx(value, rel=1e-6 if dtype == torch.float64 else 1e-3)


def test_a_differential_equation_is_solved_as_by_scipy(shell: Shell) -> None:
    net = network(inputs=1, outputs=1)
    Path("poisson.py").write_text(POISSON)
    rng = np.random.default_rng(0)
    np.savez("points.npz", x=rng.uniform(-1, 1, (50, 1)))
    (x,) = in_type(torch.float64, "points.npz")
    ends = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)

    def loss() -> torch.Tensor:
        points = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), points, create_graph=True)
        residual = curvature + math.pi**2 * torch.sin(math.pi * points)
        return (residual**2).mean() + 100 * (net(ends) ** 2).sum()

    trained(shell, "--loss", "poisson.py:poisson", "--batch-size", "7")
    solved(net, loss, 20)
    assert_equal("t.onnx", net, 1e-6)


def test_labels_that_do_not_count_weigh_nothing(shell: Shell) -> None:
    """The first batch has no label that counts; its loss alone would be 0 / 0."""
    net = network()
    x, _ = in_type(torch.float64)
    y = np.arange(50) % 2
    y[:9] = y[20:23] = -100
    np.savez("typed.npz", x=x.numpy(), label=y)
    trained(shell, "--loss", "cross-entropy", "--loss-option", "ignore-index=-100", "--batch-size", "7")
    solved(net, lambda: nn.functional.cross_entropy(net(x), torch.tensor(y), ignore_index=-100), 20)
    assert_equal("t.onnx", net, 1e-6)


def test_a_resumed_run_has_an_empty_history(shell: Shell) -> None:
    net = network()
    x, label = in_type(torch.float64)
    begun = trained(shell, "--max-steps", "8")
    assert begun["reason"] == "max steps"
    result = shell(
        "train", "net.onnx", "--data", "typed.npz", "--optimizer", "lbfgs", "--epochs", "20", "--threads", "1",
        "-o", "t.onnx", "--resume",
    )  # fmt: skip
    assert result.code == 0 and "empty history" in result.err, result.err
    for iterations in (8, 12):
        solved(net, lambda: nn.functional.mse_loss(net(x), label), iterations)
    assert_equal("t.onnx", net, 1e-6)
    steps = [json.loads(line) for line in Path("t.onnx.run/train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "rate" in line] == [*range(1, 21)]
    assert all(line["rate"] is None for line in steps if "rate" in line)


def test_an_interrupted_run_saves_its_last_iteration(shell: Shell) -> None:
    def interrupt(event: Any) -> None:
        if event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    arguments = ("mlp.onnx", "data.npz", "t.onnx", LBFGS, Course(epochs=6))
    found = run_train(*arguments, watch=interrupt)
    assert found.reason == "stopped" and found.steps == 3 and not Path("t.onnx").exists()
    assert load_checkpoint(Path("t.onnx.run/checkpoint.safetensors"))[1]["steps"] == 3
    again = run_train(*arguments, resume="must")
    assert again.reason == "done" and again.steps == 6 and again.epochs[:3] == found.epochs


def test_it_ends_when_it_has_converged(shell: Shell) -> None:
    save("""<ir_version: 8, opset_import: ["": 17]> g (double[n, 4] x) => (double[n, 2] y)
         <double[4, 2] w = {1, -2, 3, 4, 5, -6, 7, 8}> { y = MatMul(x, w) }""", Path("linear.onnx"))  # fmt: skip
    x, label = (tensor.numpy() for tensor in in_type(torch.float64))
    words = ("--data", "typed.npz", "--optimizer", "lbfgs", "--epochs", "200", "-o", "t.onnx")
    result = shell("train", "linear.onnx", *words, "--json")
    assert result.code == 0 and result.json["reason"] == "converged" and "gtol=1e-08" in result.err, result.err
    assert 2 < result.json["steps"] == len(result.json["epochs"]) < 200
    (found,) = onnx.load("t.onnx").graph.initializer
    np.testing.assert_allclose(numpy_helper.to_array(found), np.linalg.lstsq(x, label, rcond=None)[0], atol=1e-7)
    report = Path("t.onnx.run/report.md").read_text()
    assert "the optimizer converged" in report and "lbfgs" in report and "--learning-rate" not in report
    again = shell("train", "linear.onnx", *words, "--resume", "auto", "--json")
    assert again.code == 0 and not again.json["files"] and again.json["epochs"] == result.json["epochs"]
    minimal = shell("train", "t.onnx", *words[:-1], "m.onnx", "--json")  # begins where no step lowers the loss
    assert minimal.code == 0 and minimal.json["reason"] == "converged" and minimal.json["steps"] == 0, minimal.err
    assert minimal.json["epochs"][0]["loss"] == pytest.approx(result.json["epochs"][-1]["loss"])
    (same,) = onnx.load("m.onnx").graph.initializer
    assert same.raw_data == found.raw_data


def test_a_line_search_that_fails_keeps_the_last_iteration(shell: Shell) -> None:
    """The loss is the root of |y|: its slope grows towards the minimum, so that no step there is accepted."""
    save("""<ir_version: 8, opset_import: ["": 17]> g (double[n, 2] x) => (double[n, 1] y) <double[2, 1] w = {0.7, 0.2}>
         { y = MatMul(x, w) }""", Path("scale.onnx"))  # fmt: skip
    np.savez("one.npz", x=np.ones((1, 2)))
    said = Mock()
    options = Options(optimizer="lbfgs", losses=(sharp,))
    found = run_train("scale.onnx", "one.npz", "t.onnx", options, Course(epochs=500), tell=said)
    assert found.reason == "no lower loss", found
    assert any("no lower loss" in call.args[0] for call in said.call_args_list)
    (weight,) = onnx.load("t.onnx").graph.initializer
    loss = math.sqrt(abs(numpy_helper.to_array(weight).sum())) * 1e4
    assert found.epochs[-1]["loss"] == pytest.approx(loss) and loss <= math.sqrt(0.9) * 1e4


def test_the_best_epoch_is_written_and_patience_ends_the_run(shell: Shell) -> None:
    """With more weights than samples, the validation loss rises after some iterations."""
    network()
    x, label = (tensor.numpy() for tensor in in_type(torch.float64))
    rng = np.random.default_rng(1)
    np.savez("typed.npz", x=x[:20], label=label[:20] + rng.standard_normal((20, 2)))
    np.savez("val.npz", x=x[20:], label=label[20:])
    found = trained(shell, "--val", "val.npz", "--patience", "5", "--epochs", "400")
    losses = [epoch["val_loss"] for epoch in found["epochs"]]
    assert found["reason"] == "no better" and len(losses) == found["best"] + 5
    assert found["best"] == 1 + int(np.argmin(losses))
    judged = shell("evaluate", "t.onnx", "--loss", "mse", "--data", "val.npz", "--json")
    assert judged.json["results"]["loss"] == pytest.approx(min(losses))


def test_a_fixed_batch_size_that_can_not_be_changed(shell: Shell) -> None:
    save(FIXED, Path("fixed.onnx"))
    whole = run_train("mlp.onnx", "data.npz", "w.onnx", LBFGS, Course(epochs=5))
    parts = run_train("fixed.onnx", "data.npz", "p.onnx", LBFGS, Course(epochs=5, batch_size=10))
    np.testing.assert_allclose([e["loss"] for e in parts.epochs], [e["loss"] for e in whole.epochs], rtol=1e-4)


# -- misuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "course"),
    [
        ({}, {"learning_rate": 0.1}),
        ({}, {"schedule": "cosine"}),
        ({}, {"use_ema": True}),
        ({}, {"memory": 10**9}),
        ({"clip_norm": 1.0}, {}),
        ({"clip_value": 1.0}, {}),
        ({"accumulate": 2}, {}),
        ({"loss_scale": 8.0}, {}),
        ({"ema": 0.9}, {}),
    ],
    ids=str,
)
def test_an_option_without_a_meaning_is_named(shell: Shell, options: dict[str, Any], course: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        run_train("mlp.onnx", "data.npz", "t.onnx", Options(optimizer="lbfgs", **options), Course(**course))
    (name,) = options | course
    assert caught.value.argument == name and caught.value.code == "conflict" and "lbfgs" in caught.value.message
    assert not Path("t.onnx.run").exists()


@pytest.mark.parametrize(
    ("model", "options", "nouns"),
    [
        (DROPOUT, {}, "Dropout"),
        (NORMALIZED, {"mode": "train"}, "BatchNormalization"),
        (HALF, {}, "float16"),
        (QUANTIZED, {"quantization": "ste"}, "quantizers"),
        (MLP, {"lora": LoraSpec(2), "lora_dora": True}, "lora_dora"),
        (MLP, {"losses": (held,)}, "stop_gradient"),
        (MLP, {"optimizer_options": {"weight_decay": 0.1}}, "weight-decay"),
        (MLP, {"optimizer_options": {"maxcor": 0}}, "maxcor"),
    ],
)
def test_a_loss_that_is_no_function_of_the_weights_is_refused(
    shell: Shell, model: str, options: dict[str, Any], nouns: str
) -> None:
    save(model, Path("m.onnx"))
    data = dict(np.load("data.npz"))
    data["label"] = np.tile(data["label"], 2) if model == NORMALIZED else data["label"]
    half = np.float16 if model == HALF else np.float32
    np.savez("m.npz", **{name: array.astype(half) for name, array in data.items()})
    with pytest.raises(UsageError) as caught:
        run_train("m.onnx", "m.npz", "t.onnx", Options(optimizer="lbfgs", **options), Course(epochs=2))
    assert nouns in caught.value.message.replace("_decay", "-decay")


def test_samples_that_change_are_refused(shell: Shell) -> None:
    def noisy(batch: dict[str, np.ndarray], random: object) -> dict[str, np.ndarray]:
        return batch

    for how, name in (
        (SampleOptions(transform=noisy), "transform"),
        (SampleOptions(balance=True), "balance"),
        (SampleOptions(augment=("flip",)), "augment"),
    ):
        with pytest.raises(UsageError) as caught:
            run_train("mlp.onnx", "data.npz", "t.onnx", LBFGS, Course(samples=how))
        assert caught.value.argument == name


def test_a_loss_of_the_whole_batch_takes_one_batch(shell: Shell) -> None:
    options = Options(optimizer="lbfgs", losses=(whole,))
    with pytest.raises(UsageError) as caught:
        run_train("mlp.onnx", "data.npz", "t.onnx", options, Course(epochs=3))
    assert "batch_size=50" in (caught.value.hint or "")
    assert run_train("mlp.onnx", "data.npz", "t.onnx", options, Course(epochs=3, batch_size=50)).steps == 3


def test_losses_that_count_labels_differently_take_one_batch(shell: Shell) -> None:
    data = dict(np.load("data.npz"))
    kind = np.arange(50) % 2
    kind[:9] = -100
    np.savez("two.npz", x=data["x"], kind=kind, value=data["label"])
    losses = (LossSpec("cross-entropy", None, "kind"), LossSpec("mse", None, "value"))
    options = Options(optimizer="lbfgs", losses=losses, loss_options={"kind:ignore_index": -100})
    with pytest.raises(OnnxgradError) as caught:
        run_train("mlp.onnx", "two.npz", "t.onnx", options, Course(epochs=3, batch_size=7))
    assert "`batch_size`" in (caught.value.hint or "") and not Path("t.onnx").exists()
    assert run_train("mlp.onnx", "two.npz", "u.onnx", options, Course(epochs=3, batch_size=50)).steps == 3


def test_a_loss_that_is_not_finite_is_an_error(shell: Shell) -> None:
    with pytest.raises(OnnxgradError) as caught:
        run_train("mlp.onnx", "data.npz", "t.onnx", Options(optimizer="lbfgs", losses=(logarithm,)))
    assert caught.value.code == "not_finite" and "Log" in caught.value.message


def test_several_processes_are_refused() -> None:
    with pytest.raises(UsageError, match="one process"):
        check_lbfgs(LBFGS, Course(), Mock(world=2))


def test_without_scipy_the_error_names_the_package(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--optimizer", "lbfgs")
    assert (
        result.code == 2 and result.facts == ("missing_package", "optimizer='lbfgs'") and "'scipy>=1.13'" in result.hint
    )
    assert not list(Path().glob("*.run"))


def test_it_is_for_train_alone(shell: Shell) -> None:
    with pytest.raises(UsageError) as caught:
        build("mlp.onnx", Options(losses=(LossSpec("mse"),), optimizer="lbfgs"))
    assert caught.value.argument == "optimizer" and "onnxgrad train" in (caught.value.hint or "")
    for command in ("build", "pack", "tune"):
        result = shell(command, "mlp.onnx", "--optimizer", "lbfgs", "-o", "out")
        assert result.code == 2 and not Path("out").exists(), result.err
    listed = shell("list", "optimizers", "--json")
    (entry,) = [each for each in listed.json if each["name"] == "lbfgs"]
    assert [option["name"] for option in entry["options"]] == ["maxcor", "ftol", "gtol"]


def test_several_sets_and_weights_that_change_are_refused(shell: Shell) -> None:
    two = Options(optimizer="lbfgs", losses=(LossSpec("mse", data="a"), LossSpec("mae", data="b")))
    with pytest.raises(UsageError) as caught:
        run_train("mlp.onnx", {"a": "data.npz", "b": "data.npz"}, "t.onnx", two)
    assert caught.value.code == "conflict" and caught.value.hint is not None
    scheduled = Options(optimizer="lbfgs", losses=(LossSpec("mae", schedule="cosine"),))
    with pytest.raises(UsageError) as caught:
        run_train("mlp.onnx", "data.npz", "t.onnx", scheduled)
    assert caught.value.code == "conflict" and "mae" in caught.value.message and caught.value.hint is not None
