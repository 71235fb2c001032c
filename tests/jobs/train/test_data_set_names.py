"""Several data sets, each with losses of its own, in one training: against PyTorch, and as a user would meet it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from onnxgrad_cli.data import Batches, Data, seed_of
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.train import run_train
from onnxgrad_cli.jobs.train.set_up import SEVERAL_SETS
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.train import Course
from onnxgrad_cli.training.distributed.communicator import Alone
from tests.cli_harness import Shell
from tests.facts import raises

PDE = """
def burgers(op, u, x: "input", t: "input"):
    u_x, u_t = op.grad(u, x, t)
    residual = u_t + u * u_x - 0.1 * op.grad(u_x, x)
    return residual * residual

def edges(op, u, t: "input", value: "label u"):
    ends = op.model(x=op.Mul(t, op.const(0.5, t)))
    return (ends - value) * (ends - value) + u * u
"""

SIZES = {"interior": 40, "boundary": 7}
TRAIN = (
    "train", "u.onnx", "--data", "interior=a.npz", "--data", "boundary=b.npz", "--loss", "interior=pde.py:burgers",
    "--loss", "boundary=mse:u:u:10", "--threads", "1",
)  # fmt: skip


class Net(nn.Module):
    """u(x, t), a smooth network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        found: Tensor = self.net(torch.cat([x, t], 1))
        return found


def export(net: nn.Module, file: str = "u.onnx") -> None:
    axes = {name: {0: "n"} for name in ("x", "t", "u")}
    example = (torch.zeros(3, 1), torch.zeros(3, 1))
    torch.onnx.export(
        net, example, file, input_names=["x", "t"], output_names=["u"], dynamo=False, dynamic_axes=axes,
    )  # fmt: skip


def points(seed: int, count: int, *names: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(-1, 1, (count, 1)).astype(np.float32) for name in names}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    Path("pde.py").write_text(PDE)
    export(Net())
    np.savez("a.npz", **points(1, SIZES["interior"], "x", "t"))  # type: ignore[arg-type]
    np.savez("b.npz", **points(2, SIZES["boundary"], "x", "t", "u"))  # type: ignore[arg-type]
    return Shell(tmp_path, capsys)


def weights(file: str) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer}


def residual(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """The mean squared error of u_t + u u_x = 0.1 u_xx."""
    x, t = x.requires_grad_(), t.requires_grad_()
    u = net(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    found: Tensor = ((u_t + u * u_x - 0.1 * u_xx) ** 2).mean()
    return found


def batches(size: int, seed: int) -> dict[str, Batches]:
    """The order of the samples of each set."""
    data = {name: Data(Path(), {}, {}, count, {}) for name, count in SIZES.items()}
    return {
        name: Batches(each, min(size, len(each)), seed_of(seed, position))
        for position, (name, each) in enumerate(data.items())
    }


def of_torch(
    optimizer: torch.optim.Optimizer, net: nn.Module, steps: int, size: int, accumulate: int = 1,
    shares: Callable[[int], tuple[float, float]] = lambda step: (1, 10),
) -> None:  # fmt: skip
    """Train in PyTorch on batches of both sets. `shares` returns the weights of both losses in a step."""
    sets = {"interior": np.load("a.npz"), "boundary": np.load("b.npz")}
    order = batches(size, seed=3)
    for step in range(steps):
        rows = {name: each.at(step).indices for name, each in order.items()}
        (x, t), (bx, bt, bu) = (
            [torch.from_numpy(sets[name][key][rows[name]]) for key in keys]
            for name, keys in (("interior", "xt"), ("boundary", "xtu"))
        )
        inside, edge = shares(step)
        loss = inside * residual(net, x, t) + edge * ((net(bx, bt) - bu) ** 2).mean()
        (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


OPTIMIZERS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "sgd": ((), lambda each: torch.optim.SGD(each, lr=0.01)),
    "adamw": (
        ("--optimizer-option", "weight-decay=0.01"),
        lambda each: torch.optim.AdamW(each, lr=0.01, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize(
    ("optimizer", "size", "accumulate"),
    [("sgd", 16, 1), ("adamw", 16, 1), ("sgd", 4, 1), ("sgd", 16, 2)],
    ids=["sgd", "adamw", "batches that divide both sets", "accumulated"],
)
def test_a_training_on_two_sets_equals_pytorch(shell: Shell, optimizer: str, size: int, accumulate: int) -> None:
    """Twenty steps: the second set is cycled, and shuffled on its own."""
    more, make = OPTIMIZERS[optimizer]
    result = shell(
        *TRAIN, "--max-steps", "20", "--epochs", "99", "--batch-size", str(size), "--lr", "0.01", "--seed", "3",
        "--optimizer", optimizer, *more, "--accumulate", str(accumulate), "-o", "trained.onnx",
    )  # fmt: skip
    assert result.code == 0, result.err
    torch.manual_seed(0)
    net = Net()
    of_torch(make(net.parameters()), net, 20, size, accumulate)
    found = weights("trained.onnx")
    assert sorted(found) == sorted(dict(net.named_parameters()))
    for name, value in net.named_parameters():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=1e-6)


def test_a_weight_with_a_schedule_equals_pytorch(shell: Shell) -> None:
    """The weight of the loss at the boundary falls along a cosine, and that of the equation rises over 8 steps."""
    losses = ("--loss", "interior=pde.py:burgers:::1@constant:warmup=8", "--loss", "boundary=mse:u:u:10@cosine")
    result = shell(
        *TRAIN[:6], *losses, "--threads", "1", "--max-steps", "20", "--epochs", "99", "--batch-size", "16", "--lr",
        "0.01", "--seed", "3", "--optimizer", "sgd", "-o", "trained.onnx",
    )  # fmt: skip
    assert result.code == 0, result.err
    torch.manual_seed(0)
    net = Net()

    def shares(step: int) -> tuple[float, float]:
        return min(0.01 + 0.99 * step / 8, 1), 5 * (1 + math.cos(math.pi * step / 20))

    of_torch(torch.optim.SGD(net.parameters(), lr=0.01), net, 20, 16, shares=shares)
    found = weights("trained.onnx")
    for name, value in net.named_parameters():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=1e-6)


def test_a_validation_uses_the_weight_without_its_schedule(shell: Shell) -> None:
    run = ("train", "u.onnx", "--data", "b.npz", "--val", "b.npz", "--map", "u=w", "--loss", "mse::w:4@cosine",
           "--threads", "1", "--epochs", "4", "--batch-size", "3", "--seed", "5")  # fmt: skip
    result = shell(*run, "-o", "t.onnx", "--json")
    assert result.code == 0, result.err
    torch.manual_seed(0)
    net = Net()
    trained = weights("t.onnx")
    net.load_state_dict({name: torch.from_numpy(trained[name].copy()) for name in net.state_dict()})
    x, t, u = (torch.from_numpy(np.load("b.npz")[name]) for name in ("x", "t", "u"))
    found = result.json
    expected = float(4 * ((net(x, t) - u) ** 2).mean())
    assert found["epochs"][found["best"] - 1]["val_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("weight", "noun"),
    [
        ("10@cosin", "'cosin'"),
        ("-1@cosine", "-1"),
        ("x@cosine", "'x'"),
        ("10@plateau", "'plateau'"),
        ("10@cosine:warmup=x", "warmup"),
        ("10:cosine", "too many parts"),
    ],
)
@pytest.mark.parametrize("command", ["build", "train"])
def test_wrong_schedules_of_a_weight_are_refused(shell: Shell, command: str, weight: str, noun: str) -> None:
    data = ("--data", "b.npz", "--map", "u=w") if command == "train" else ()
    result = shell(command, "u.onnx", "--loss", f"mse::w:{weight}", *data, "-o", "t.onnx")
    assert result.code == 2, result.err
    assert noun in result.err
    assert not Path("t.onnx").exists()


def test_a_weight_with_a_schedule_is_an_input(shell: Shell) -> None:
    assert shell("build", "u.onnx", "--loss", "mse::w:3@cosine", "-o", "t.onnx").code == 0
    assert shell("check", "t.onnx", "--original", "u.onnx").code == 0
    import onnxruntime

    session = onnxruntime.InferenceSession("t.onnx", providers=["CPUExecutionProvider"])
    feeds = points(4, 6, "x", "t", "w")
    once, twice = (session.run(["loss"], {**feeds, "mse.weight": np.array(weight, np.float32)})[0] for weight in (1, 2))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)


def test_the_gradients_on_two_sets_equal_pytorch(shell: Shell) -> None:
    """A build: a Python loss with a second derivative and mse, and `op.model`, inputs and labels of the own set."""
    losses = ("--loss", "interior=pde.py:burgers", "--loss", "boundary=pde.py:edges:u::3")
    result = shell("build", "u.onnx", *losses, "--verify", "--json", "-o", "train.onnx")
    assert result.code == 0, result.err
    assert result.json["proof"]["verdict"] == "proved"
    sets = {value["name"]: value["of"] for value in result.json["inputs"] if value["role"] != "weight"}
    assert sets == {"x": "interior", "t": "interior"} | dict.fromkeys(
        ("boundary.x", "boundary.t", "boundary.value"), "boundary"
    )
    assert any("--data interior=DATA --data boundary=DATA" in step["text"] for step in result.json["next"])
    model = onnx.load("train.onnx")
    assert [value.name for value in model.graph.input][:5] == ["x", "t", "boundary.x", "boundary.t", "boundary.value"]
    import onnxruntime

    session = onnxruntime.InferenceSession("train.onnx", providers=["CPUExecutionProvider"])
    a, b = points(5, 11, "x", "t"), points(6, 4, "x", "t", "value")
    feeds = {**a, **{f"boundary.{name}": array for name, array in b.items()}}
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, feeds), strict=True))
    torch.manual_seed(0)
    net = Net()
    x, t, bx, bt, value = map(torch.from_numpy, (*a.values(), *b.values()))
    edges = (net(bt * 0.5, bt) - value) ** 2 + net(bx, bt) ** 2
    loss = residual(net, x, t) + 3 * edges.mean()
    loss.backward()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(found["loss"], loss.detach().numpy(), rtol=1e-5)
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(found[f"{name}_grad"], parameter.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_names_of_sets_and_derivatives_can_be_identifiers(shell: Shell) -> None:
    losses = ("--loss", "interior=pde.py:burgers", "--loss", "boundary=mse:u:u:10@cosine")
    result = shell("build", "u.onnx", *losses, "--identifiers", "--verify", "--json", "-o", "t.onnx")
    assert result.code == 0, result.err
    assert result.json["proof"]["verdict"] == "proved"
    added = [value.name for value in onnx.load("t.onnx").graph.input if "boundary" in value.name]
    assert added == ["boundary_x", "boundary_t", "boundary_u", "boundary_mse_weight"]


def test_a_wrong_copy_of_the_model_fails_the_check(shell: Shell) -> None:
    """Gradients of a copy whose inputs are swapped still match differences of its loss."""
    losses = ("--loss", "a=mse", "--loss", "b=mse")
    assert shell("build", "u.onnx", *losses, "-o", "train.onnx").code == 0
    assert shell("check", "train.onnx", "--original", "u.onnx").code == 0
    model = onnx.load("train.onnx")
    (first,) = (node for node in model.graph.node if node.op_type == "Concat" and "b.x" in node.input)
    first.input[:] = first.input[::-1]
    onnx.save(model, "wrong.onnx")
    result = shell("check", "wrong.onnx", "--original", "u.onnx")
    assert result.code == 4
    assert "'b'" in result.err + result.out


@pytest.mark.parametrize("weight", ["10", "10@step:every=3"])
def test_a_resumed_run_equals_an_undisturbed_run_byte_for_byte(shell: Shell, weight: str) -> None:
    losses = ("--loss", "interior=pde.py:burgers", "--loss", f"boundary=mse:u:u:{weight}")
    run = (*TRAIN[:6], *losses, "--threads", "1", "--epochs", "4", "--batch-size", "9", "--seed", "5")
    assert shell(*run, "-o", "whole.onnx").code == 0
    assert shell(*run, "--max-steps", "7", "-o", "parts.onnx").code == 0
    result = shell(*run, "--resume", "-o", "parts.onnx")
    assert result.code == 0, result.err
    assert "step 7\n" in result.err
    assert Path("parts.onnx").read_bytes() == Path("whole.onnx").read_bytes()


@pytest.mark.parametrize(("file", "named"), [("b.npz", "'boundary' training"), ("a.npz", "training")])
def test_a_run_is_not_resumed_on_other_data(shell: Shell, file: str, named: str) -> None:
    run = (*TRAIN, "--batch-size", "9", "-o", "t.onnx")
    assert shell(*run, "--epochs", "2").code == 0
    np.savez(file, **{name: array + 1 for name, array in np.load(file).items()})
    result = shell(*run, "--epochs", "3", "--resume")
    assert result.code == 2
    assert f"other {named} data" in result.err
    assert "--new-data" in result.err
    assert shell(*run, "--epochs", "3", "--resume", "--new-data").code == 0


def test_the_same_data_twice_are_the_doubled_loss(shell: Shell) -> None:
    """Both sets in whole batches, so that their order does not matter."""
    steps = ("--epochs", "5", "--batch-size", "7", "--no-shuffle", "--optimizer", "sgd", "--lr", "0.01")
    twice = ("--data", "one=b.npz", "--data", "two=b.npz", "--loss", "one=mse::w", "--loss", "two=mse::w")
    assert shell("train", "u.onnx", *twice, "--map", "u=w", *steps, "-o", "twice.onnx").code == 0
    once = ("--data", "b.npz", "--loss", "mse::w:2", "--map", "u=w")
    assert shell("train", "u.onnx", *once, *steps, "-o", "once.onnx").code == 0
    expected = weights("once.onnx")
    for name, array in weights("twice.onnx").items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("val", "losses"), [("boundary=v.npz", "boundary"), ("v.npz", "interior")])
def test_validation_evaluates_the_losses_of_one_set(shell: Shell, val: str, losses: str) -> None:
    np.savez("v.npz", **points(8, 13, "x", "t", "u"))  # type: ignore[arg-type]
    result = shell(*TRAIN, "--val", val, "--epochs", "3", "--json", "-o", "t.onnx")
    assert result.code == 0, result.err
    found = result.json
    torch.manual_seed(0)
    net = Net()
    trained = weights("t.onnx")
    net.load_state_dict({name: torch.from_numpy(trained[name].copy()) for name in net.state_dict()})
    x, t, u = map(torch.from_numpy, np.load("v.npz").values())
    expected = {"boundary": 10 * ((net(x, t) - u) ** 2).mean(), "interior": residual(net, x, t)}[losses]
    assert found["epochs"][found["best"] - 1]["val_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert ("val_rmse" in found["epochs"][0]) == (losses == "boundary")


def test_a_fraction_of_the_first_set_is_held_out(shell: Shell) -> None:
    result = shell(*TRAIN, "--val", "0.25", "--epochs", "1", "-o", "t.onnx")
    assert result.code == 0, result.err
    assert "10 of 40 samples" in result.err
    refused = shell(*TRAIN, "--val", "boundary=0.25", "--epochs", "1", "-o", "t2.onnx")
    assert refused.code == 2
    assert "interior" in refused.err


def test_the_trained_model_is_evaluated_with_the_losses_of_one_set(shell: Shell) -> None:
    assert shell(*TRAIN, "--epochs", "1", "-o", "t.onnx").code == 0
    plain = shell("evaluate", "t.onnx", "--loss", "pde.py:burgers", "--data", "a.npz", "--json")
    named = shell("evaluate", "t.onnx", "--loss", "interior=pde.py:burgers", "--data", "a.npz", "--json")
    assert plain.code == named.code == 0
    assert plain.json["results"] == named.json["results"]
    both = shell("evaluate", "t.onnx", *TRAIN[6:10], "--data", "a.npz")
    assert both.code == 2
    assert both.facts[1:] == ("losses",) and "interior" in both.err


def test_a_labelled_and_an_unlabelled_set(shell: Shell) -> None:
    """Semi-supervised training: labels for some samples only."""
    Path("consistency.py").write_text(
        'def consistent(op, u, x: "input"):\n    other = op.model(x=-x)\n    return (u - other) * (u - other)\n'
    )
    result = shell(
        "train", "u.onnx", "--data", "labelled=b.npz", "--data", "free=a.npz", "--loss", "labelled=mse::y", "--loss",
        "free=consistency.py:consistent", "--map", "u=y", "--epochs", "3", "-o", "t.onnx",
    )  # fmt: skip
    assert result.code == 0, result.err


MISUSE = {
    "unknown set": (("--loss", "bondary=mse::y"), "bondary"),
    "a loss without a set": (("--loss", "mse::y"), "has no data set"),
    "a set without a loss": (("--data", "edge=b.npz"), "'edge'"),
    "two sets of one name": (("--data", "boundary=a.npz"), "'boundary'"),
    "data without a name": (("--data", "a.npz"), "'a.npz' has no name"),
    "validation of an unknown set": (("--val", "edge=b.npz"), "'edge'"),
    "balanced classes": (("--balance",), "--balance"),
    "sample weights": (("--sample-weight", "w"), "--sample-weight"),
    "a setting of nothing": (("--loss-option", "edge:delta=1"), "'edge'"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_by_name(shell: Shell, case: str) -> None:
    more, noun = MISUSE[case]
    result = shell(*TRAIN, *more, "-o", "t.onnx")
    assert result.code == 2, result.err
    assert noun in result.err
    assert not Path("t.onnx").exists()


def test_names_of_losses_and_data_must_both_be_there(shell: Shell) -> None:
    unnamed = shell("train", "u.onnx", "--data", "b.npz", "--loss", "boundary=mse::y", "-o", "t.onnx")
    assert unnamed.code == 2
    assert "--data boundary=DATA" in unnamed.err
    default = shell("train", "u.onnx", "--data", "boundary=b.npz", "-o", "t.onnx")
    assert default.code == 2
    assert "--loss boundary=mse" in default.err


def test_from_python_data_sets_are_a_map(shell: Shell) -> None:
    losses = (LossSpec("mse", label="u", data="one"), LossSpec("mae", label="u", data="two", weight=0.5))
    with raises(UsageError, "unknown_name", "val", "three"):
        run_train("u.onnx", {"one": "b.npz", "two": "b.npz"}, "t.onnx", Options(losses=losses), val={"three": "b.npz"})
    found = run_train("u.onnx", {"one": "b.npz", "two": "b.npz"}, "t.onnx", Options(losses=losses), Course(epochs=2))
    assert found.steps == 2
    with pytest.raises(UsageError, match="'a b'"):
        run_train("u.onnx", {"a b": "b.npz"}, "t2.onnx", Options(losses=losses))
    with pytest.raises(UsageError, match="empty"):
        run_train("u.onnx", {}, "t2.onnx", Options(losses=losses))
    with pytest.raises(UsageError, match=r"'a\.b'"):
        LossSpec("mse", data="a.b")


def test_several_processes_are_refused(shell: Shell) -> None:
    class Two(Alone):
        world = 2

    losses = (LossSpec("mse", label="u", data="one"), LossSpec("mse", label="u", data="two"))
    with pytest.raises(UsageError, match="several processes"):
        run_train(
            "u.onnx", {"one": "b.npz", "two": "b.npz"}, "t.onnx", Options(losses=losses), communicator=Two()
        )  # fmt: skip


def test_errors_about_data_name_the_file(shell: Shell) -> None:
    np.savez("b.npz", **{**points(2, 7, "x", "t", "u"), "t": np.full((7, 1), np.nan, np.float32)})
    result = shell(*TRAIN, "-o", "t.onnx")
    assert result.code == 2
    assert result.facts == ("wrong_value", "b.npz", "t", "0", "0", "0", "float32")
    np.savez("b.npz", **points(2, 7, "x", "t"))  # type: ignore[arg-type]
    assert shell(*TRAIN, "-o", "t.onnx").facts[1:] == ("b.npz", "u", "1")


def test_a_path_with_an_equals_sign_is_a_path(shell: Shell) -> None:
    Path("run=1.npz").write_bytes(Path("b.npz").read_bytes())
    one = ("train", "u.onnx", "--loss", "mse::y", "--map", "u=y", "--epochs", "1")
    assert shell(*one, "--data", "run=1.npz", "-o", "t.onnx").code == 0
    named = (*one[:2], "--loss", "run=mse::y", *one[4:], "--data", "run=run=1.npz")
    assert shell(*named, "-o", "t2.onnx").code == 0
    assert weights("t.onnx")["net.0.weight"].tolist() == weights("t2.onnx")["net.0.weight"].tolist()


def test_one_set_with_a_name_has_sample_weights(shell: Shell) -> None:
    np.savez("b.npz", **points(2, 7, "x", "t", "u"), w=np.zeros(7, np.float32))
    loss = ("--loss", "edge=mse::u", "--sample-weight", "w", "--optimizer", "sgd", "--epochs", "1")
    result = shell("train", "u.onnx", "--data", "edge=b.npz", *loss, "-o", "t.onnx")
    assert result.code == 0, result.err
    before, after = weights("u.onnx"), weights("t.onnx")
    assert all((after[name] == before[name]).all() for name in before)


def test_running_statistics_are_refused(shell: Shell) -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    torch.onnx.export(net, (torch.zeros(3, 1),), "bn.onnx", input_names=["x"], output_names=["u"], dynamo=False,
                      dynamic_axes={"x": {0: "n"}, "u": {0: "n"}})  # fmt: skip
    losses = ("--loss", "a=mse", "--loss", "b=mse")
    result = shell("build", "bn.onnx", *losses, "--mode", "train", "-o", "t.onnx")
    assert result.code == 2
    assert "BatchNormalization" in result.err
    assert shell("build", "bn.onnx", *losses, "--mode", "eval", "-o", "t.onnx").code == 0


def test_dropout_draws_for_each_set(shell: Shell) -> None:
    """With the same samples in both sets, the losses differ: `a` and `b` see different masks."""
    import onnxruntime

    net = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5), nn.Linear(64, 1)).train()
    torch.onnx.export(net, (torch.zeros(3, 1),), "drop.onnx", input_names=["x"], output_names=["u"], dynamo=False,
                      training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
                      dynamic_axes={"x": {0: "n"}, "u": {0: "n"}})  # fmt: skip
    losses = ("--loss", "a=mse", "--loss", "b=mse:::-1")
    assert shell("build", "drop.onnx", *losses, "--mode", "train", "-o", "t.onnx").code == 0
    x = points(0, 5, "x")["x"]
    session = onnxruntime.InferenceSession("t.onnx", providers=["CPUExecutionProvider"])
    (loss,) = session.run(["loss"], {name: x for name in ("x", "b.x", "a.label", "b.label")})
    assert abs(loss) > 1e-4


def test_memory_never_splits_a_step_on_several_sets(shell: Shell) -> None:
    result = shell(*TRAIN, "--memory", "1KB", "-o", "t.onnx")
    assert result.code == 2
    assert result.facts[:2] == ("wrong_value", "memory") and SEVERAL_SETS in result.hint
    assert shell(*TRAIN, "--memory", "500MB", "--epochs", "1", "-o", "t.onnx").code == 0
