"""Samples of different sizes, such as molecules: trained one by one or padded with a mask, compared with PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
import torch
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.data import open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Term, describe
from tests.cli_harness import Result, Shell
from tests.facts import raises

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
ATOMS = tensor_type(FLOAT, ["molecules", "atoms", 3])
INPUTS = {"positions": ATOMS, "force": ATOMS, "label": tensor_type(FLOAT, ["molecules", 1])}

LOSSES = """
def alone(op, energy, label, force: "label positions", positions: "input"):
    error = op.grad(energy, positions) + force
    return (energy - label) * (energy - label) + op.mean(op.mean(error * error, [2], keepdims=False), [1])


def masked(op, energy, label, force: "label positions", real: "mask positions", positions: "input"):
    error = op.grad(energy, positions) + force
    each = op.mean(error * error, [2], keepdims=False)
    return (energy - label) * (energy - label) + op.sum(each * real, [1]) / op.sum(real, [1])


def per_atom(op, energy, label, real: "mask positions", positions: "input"):
    return op.mean(positions * positions, [2], keepdims=False) * energy * label * real


def points(op, y, label, real: "mask positions"):
    each = op.mean((y - label) * (y - label), [2], keepdims=False)
    return op.sum(each * real, [1]) / op.sum(real, [1])


def plain(op, energy, label):
    return (energy - label) * (energy - label)
"""


class Net(torch.nn.Module):
    """An energy of pairs of atoms: a small relative of SchNet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.widths = torch.nn.Parameter(torch.tensor([0.1, 0.3, 1.0, 3.0]))

    def forward(self, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        real = torch.ones_like(positions[..., 0]) if mask is None else mask
        squares = ((positions[:, :, None] - positions[:, None]) ** 2).sum(-1)
        pairs = torch.exp(-squares[..., None] * self.widths) * real[:, None, :, None]
        each = self.outer(torch.tanh(self.inner(pairs.sum(2)))) * real[..., None]
        return each.sum(1)


def torch_loss(net: Net, sample: dict[str, Any]) -> torch.Tensor:
    """Return the loss of one molecule, without padding."""
    positions = torch.tensor(sample["positions"], requires_grad=True)[None]
    energy = net(positions)
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    error = ((gradient + torch.tensor(sample["force"])) ** 2).mean()
    return ((energy - torch.tensor(sample["label"])) ** 2).sum() + error


def drawn_molecules() -> list[dict[str, Any]]:
    """Return 40 molecules of 2 to 6 atoms, with the energy and the forces of a spring to the origin."""
    rng = np.random.default_rng(0)
    found = []
    for atoms in rng.integers(2, 7, 40):
        x = rng.standard_normal((atoms, 3)).astype("f")
        found.append({"positions": x, "force": -2 * x, "label": (x**2).sum(keepdims=True)[0]})
    return found


def write_molecules(molecules: list[dict[str, Any]]) -> None:
    """Write the molecules, the losses, and the network with and without a mask, into the working directory."""
    Path("losses.py").write_text(LOSSES)
    write_lines(molecules, Path("molecules.jsonl"))
    axes = {"positions": {0: "molecules", 1: "atoms"}, "mask": {0: "molecules", 1: "atoms"}}
    x, mask = torch.zeros(2, 3, 3), torch.ones(2, 3)
    for file, inputs in (("net.onnx", {"positions": x}), ("masked.onnx", {"positions": x, "mask": mask})):
        torch.onnx.export(
            Net(), tuple(inputs.values()), file, dynamo=False, opset_version=17, input_names=list(inputs),
            output_names=["energy"], dynamic_axes={**{name: axes[name] for name in inputs}, "energy": {0: "molecules"}},
        )  # fmt: skip


@pytest.fixture(scope="module")
def molecules() -> list[dict[str, Any]]:
    return drawn_molecules()


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], molecules: list[dict[str, Any]]
) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_molecules(molecules)
    return Shell(tmp_path, capsys)


def write_lines(samples: list[dict[str, Any]], path: Path) -> Path:
    lines = [json.dumps({name: np.asarray(value).tolist() for name, value in each.items()}) for each in samples]
    path.write_text("\n".join(lines))
    return path


def weights_of(path: str) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def trained(net: Net) -> list[np.ndarray]:
    """Return the parameters as the exporter stores them: it transposes the matrices."""
    return [each.detach().numpy().T for each in net.parameters()]


def in_onnx(path: str, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the weights of a model with the given shapes, in their order."""
    held = list(weights_of(path).values())
    return [next(each for each in held if each.shape == shape and each.size > 0) for shape in shapes]


def steps_in_torch(samples: list[dict[str, Any]], size: int, epochs: int) -> Net:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.003)
    for _ in range(epochs):
        for start in range(0, len(samples), size):
            optimizer.zero_grad()
            torch.stack([torch_loss(net, each) for each in samples[start : start + size]]).mean().backward()
            optimizer.step()
    return net


SGD = ("--optimizer", "sgd", "--lr", "0.003", "--no-shuffle", "--epochs", "2", "--threads", "1")


def train(shell: Shell, model: str, loss: str, *more: object) -> Result:
    return shell("train", model, "--loss", f"losses.py:{loss}", "--data", "molecules.jsonl", *more)


@pytest.mark.parametrize(
    ("model", "loss", "sizes"),
    [
        ("net.onnx", "alone", ("--batch-size", 1, "--accumulate", 4)),
        ("masked.onnx", "masked", ("--batch-size", 4)),
        ("masked.onnx", "masked", ("--batch-size", 2, "--accumulate", 2)),
    ],
)
def test_twenty_steps_are_those_of_pytorch(
    shell: Shell, molecules: list[dict[str, Any]], model: str, loss: str, sizes: tuple[object, ...]
) -> None:
    """Energies and forces of molecules of 2 to 6 atoms. PyTorch takes them one by one."""
    done = train(shell, model, loss, *SGD, *sizes, "-o", "t.onnx")
    assert done.code == 0, done.err
    wanted = trained(steps_in_torch(molecules, 4, 2))
    assert max(np.abs(a - b).max() for a, b in zip(trained(Net()), wanted, strict=True)) > 1e-2
    for a, b in zip(in_onnx("t.onnx", [each.shape for each in wanted]), wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_loss_of_a_padded_batch_is_that_of_its_samples(shell: Shell, molecules: list[dict[str, Any]]) -> None:
    wanted = float(torch.stack([torch_loss(Net(), each) for each in molecules]).mean().detach())
    for size in (1, 7, 40):
        done = shell(
            "evaluate", "masked.onnx", "--loss", "losses.py:masked", "--data", "molecules.jsonl", "--batch-size", size,
            "--json",
        )  # fmt: skip
        assert done.code == 0, done.err
        np.testing.assert_allclose(done.json["results"]["loss"], wanted, rtol=1e-6)
    done = shell("evaluate", "net.onnx", "--loss", "losses.py:alone", "--data", "molecules.jsonl", "--json")
    np.testing.assert_allclose(done.json["results"]["loss"], wanted, rtol=1e-6)


def test_a_resumed_run_takes_the_same_steps(shell: Shell) -> None:
    more = ("--batch-size", 1, "--accumulate", 8, "--val", "0.2", "--threads", "1")
    assert train(shell, "net.onnx", "alone", *more, "--epochs", 3, "-o", "whole.onnx").code == 0
    assert train(shell, "net.onnx", "alone", *more, "--epochs", 1, "-o", "parts.onnx").code == 0
    done = train(shell, "net.onnx", "alone", *more, "--epochs", 3, "-o", "parts.onnx", "--resume", "--force")
    assert done.code == 0, done.err
    whole, parts = weights_of("whole.onnx"), weights_of("parts.onnx")
    assert all((whole[name] == parts[name]).all() for name in whole)


def points_net() -> torch.nn.Linear:
    """A layer for each atom, also exported to points.onnx. Its label has one vector per atom."""
    torch.manual_seed(0)
    net, axes = torch.nn.Linear(3, 3), {0: "molecules", 1: "atoms"}
    torch.onnx.export(
        net, (torch.zeros(2, 3, 3),), "points.onnx", dynamo=False, opset_version=17, input_names=["positions"],
        output_names=["y"], dynamic_axes={"positions": axes, "y": axes},
    )  # fmt: skip
    return net


def loss_of_points(net: torch.nn.Linear, samples: list[dict[str, Any]]) -> torch.Tensor:
    pairs = [(torch.tensor(each["positions"]), torch.tensor(each["force"])) for each in samples]
    return torch.stack([((net(x) - force) ** 2).mean() for x, force in pairs]).mean()


@pytest.mark.slow
def test_two_processes_take_the_steps_of_pytorch(shell: Shell, molecules: list[dict[str, Any]]) -> None:
    """Each process pads its own part, so the label has another number of elements in each."""
    from tests.training.distributed.test_gloo import run, torchrun

    net = points_net()
    done = run(
        torchrun(
            2, "train", "points.onnx", "--loss", "losses.py:points:y:force", "--data", "molecules.jsonl", *SGD,
            "--batch-size", "8", "-o", "t.onnx",
        )
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    optimizer = torch.optim.SGD(net.parameters(), lr=0.003)
    for start in [*range(0, 40, 8)] * 2:
        optimizer.zero_grad()
        loss_of_points(net, molecules[start : start + 8]).backward()
        optimizer.step()
    wanted = [net.weight.detach().numpy().T, net.bias.detach().numpy()]
    for found, want in zip(in_onnx("t.onnx", [(3, 3), (3,)]), wanted, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 40])
def test_lbfgs_takes_the_mean_over_samples(shell: Shell, molecules: list[dict[str, Any]], size: int) -> None:
    """Padding changes the number of elements of the label in a batch."""
    pytest.importorskip("scipy.optimize", reason="the solver is scipy's")
    from tests.jobs.train.test_lbfgs_options import solved

    net = points_net()
    more = ("--optimizer", "lbfgs", "--batch-size", size, "--epochs", 4, "--threads", "1", "-o", "t.onnx")
    done = train(shell, "points.onnx", "points:y:force", *more)
    assert done.code == 0, done.err
    solved(net, lambda: loss_of_points(net, molecules), 4)
    wanted = [net.weight.detach().numpy().T, net.bias.detach().numpy()]
    for found, want in zip(in_onnx("t.onnx", [(3, 3), (3,)]), wanted, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-4)


def test_labels_of_different_sizes_without_a_mask_have_no_parts(shell: Shell) -> None:
    text = """<ir_version: 10, opset_import: ["": 18]>
        g (float[molecules, atoms, 3] positions) => (float[molecules, atoms, 3] y) <float[3, 3] w = {1,2,3,4,5,6,7,8,9}>
        { y = MatMul(positions, w) }"""
    onnx.save(onnx.parser.parse_model(text), "points.onnx")
    to_train = ("train", "points.onnx", "--loss", "mse:y:force", "--data", "molecules.jsonl", "--batch-size", 1)
    assert shell(*to_train, "--epochs", 1, "-o", "t.onnx").code == 0
    done = shell(*to_train, "--optimizer", "lbfgs", "-o", "u.onnx")
    assert done.code == 2 and "force" in done.facts and not Path("u.onnx").exists()


@pytest.mark.parametrize("optimizer", ["sgd", "lbfgs"])
def test_one_named_set_takes_the_same_steps(shell: Shell, optimizer: str) -> None:
    more = ("--optimizer", optimizer, "--batch-size", 8, "--epochs", 2, "--threads", "1", "--val", "0.2")
    assert train(shell, "masked.onnx", "masked", *more, "-o", "plain.onnx").code == 0
    named = ("train", "masked.onnx", "--data", "a=molecules.jsonl", "--loss", "a=losses.py:masked")
    done = shell(*named, *more, "-o", "named.onnx")
    assert done.code == 0, done.err
    plain, of_set = weights_of("plain.onnx"), weights_of("named.onnx")
    assert all((plain[name] == of_set[name]).all() for name in plain)
    losses = [
        shell("evaluate", "named.onnx", "--loss", loss, "--data", "molecules.jsonl", "--json").json["results"]["loss"]
        for loss in ("losses.py:masked", "a=losses.py:masked")
    ]
    assert losses[0] == losses[1]
    done = shell("train", "net.onnx", "--data", "a=molecules.jsonl", "--loss", "a=losses.py:masked", "-o", "u.onnx")
    assert done.code == 2 and "padding changes the loss of sample" in done.err


def test_a_named_set_has_its_own_labels_and_mask(shell: Shell) -> None:
    assert shell("build", "masked.onnx", "--loss", "a=losses.py:masked", "-o", "b.onnx").code == 0
    roles = describe(onnx.load("b.onnx"))
    (term,), (own,) = roles.losses, roles.on_set("a").losses
    assert (own.label, own.more, own.mask) == ("label", ("force",), "real")
    assert {term.label, *term.more, term.mask} == {name for name, role in roles.inputs.items() if role == "label"}


def test_several_named_sets_have_samples_of_one_size(shell: Shell) -> None:
    samples = [{"positions": np.ones((2, 3)), "label": [1.0]}] * 4
    write_lines(samples, Path("even.jsonl"))
    for first, second in (("molecules", "even"), ("even", "molecules")):
        both = ("--data", f"a={first}.jsonl", "--data", f"b={second}.jsonl")
        losses = ("--loss", "a=losses.py:plain", "--loss", "b=losses.py:plain")
        done = shell("train", "masked.onnx", *both, *losses, "-o", "t.onnx")
        assert done.code == 2 and done.facts == ("conflict", "molecules.jsonl"), done.err
    both = ("--data", "a=even.jsonl", "--data", "b=even.jsonl")
    losses = ("--loss", "a=losses.py:plain", "--loss", "b=losses.py:masked")
    done = shell("train", "masked.onnx", *both, *losses, "-o", "t.onnx")
    assert done.code == 2 and done.facts == ("conflict", "losses", "real"), done.err
    assert not Path("t.onnx").exists()
    done = shell("train", "masked.onnx", *both, *losses[:3], "b=losses.py:plain", "--epochs", 1, "-o", "t.onnx")
    assert done.code == 0, done.err


def test_predictions_of_different_sizes(shell: Shell, molecules: list[dict[str, Any]]) -> None:
    onnx.save(
        onnx.parser.parse_model("""
            <ir_version: 10, opset_import: ["": 18]>
            forces (float[molecules, atoms, 3] positions) => (float[molecules, atoms, 3] y, float[molecules] s)
            <float two = {2}, int64[2] axes = {1, 2}>
            { y = Mul(positions, two)  s = ReduceSum<keepdims = 0>(y, axes) }
        """),
        "forces.onnx",
    )
    wanted = [2 * each["positions"] for each in molecules]
    for form in ("npz", "jsonl", "parquet"):
        done = shell("predict", "forces.onnx", "--data", "molecules.jsonl", "-o", f"p.{form}")
        assert done.code == 0, done.err
        found = open_data(f"p.{form}", {"y": ATOMS, "s": tensor_type(FLOAT, ["molecules"])})
        for row, each in enumerate(wanted):
            batch = found.batch(np.array([row]))
            np.testing.assert_allclose(batch["y"][0], each, rtol=1e-6)
            np.testing.assert_allclose(batch["s"], each.sum(), rtol=1e-4, atol=1e-5)
    done = shell("predict", "forces.onnx", "--data", "molecules.jsonl", "-o", "p.csv")
    assert done.code == 2 and "y" in done.facts and not Path("p.csv").exists()


def test_all_formats_hold_the_same_samples(tmp_path: Path, molecules: list[dict[str, Any]]) -> None:
    sizes = np.array([len(each["positions"]) for each in molecules])
    arrays: dict[str, np.ndarray] = {"label": np.stack([each["label"] for each in molecules])}
    for name in ("positions", "force"):
        arrays |= {name: np.concatenate([each[name] for each in molecules]), f"{name}_sizes": sizes}
    np.savez(tmp_path / "a.npz", **arrays)
    whole = {"positions_sizes": np.stack([sizes, np.full(40, 3)], 1), "positions": arrays["positions"].reshape(-1)}
    np.savez(tmp_path / "b.npz", **{**arrays, **whole})
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    (tmp_path / "folder").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    columns = {name: [each[name].tolist() for each in molecules] for name in INPUTS}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    write_lines(molecules, tmp_path / "a.jsonl")
    for name in ("a.npz", "b.npz", "a.safetensors", "folder", "a.parquet", "a.jsonl"):
        told: list[str] = []
        data = open_data(tmp_path / name, INPUTS, tell=lambda text, _, told=told: told.append(text))
        assert len(data) == 40 and told == []
        for row, each in enumerate(molecules):
            batch = data.batch(np.array([row]))
            assert all((batch[name][0] == each[name]).all() for name in INPUTS)


def test_classes_of_points_are_ignored_in_the_padding(tmp_path: Path) -> None:
    inputs = {
        "x": tensor_type(FLOAT, ["n", "points", 2]), "mask": tensor_type(TensorProto.BOOL, ["n", "points"]),
        "label": tensor_type(INT64, ["n", "points"]),
    }  # fmt: skip
    samples = [{"x": np.ones((size, 2)), "label": np.arange(size)} for size in (2, 3, 1)]
    terms = [Term("cross-entropy", "y", "label", 1.0, 3, -100)]
    data = open_data(write_lines(samples, tmp_path / "a.jsonl"), inputs, terms=terms)
    batch = data.batch(np.arange(3))
    np.testing.assert_array_equal(batch["label"], [[0, 1, -100], [0, 1, 2], [0, -100, -100]])
    np.testing.assert_array_equal(batch["mask"], [[True, True, False], [True] * 3, [True, False, False]])
    np.testing.assert_array_equal(batch["x"].sum(2), 2 * batch["mask"])


def test_matrices_of_graphs_differ_along_two_axes(tmp_path: Path) -> None:
    inputs = {"edges": tensor_type(FLOAT, ["n", "nodes", "nodes"]), "node_mask": tensor_type(FLOAT, ["n", "nodes"])}
    samples = [np.eye(size) for size in (2, 4, 3)]
    write_lines([{"edges": each} for each in samples], tmp_path / "a.jsonl")
    pyarrow.parquet.write_table(pyarrow.table({"edges": [each.tolist() for each in samples]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        batch = open_data(tmp_path / name, inputs).batch(np.arange(3))
        for row, each in enumerate(samples):
            np.testing.assert_array_equal(batch["edges"][row], np.pad(each, (0, 4 - len(each))))
            np.testing.assert_array_equal(batch["edges"][row].sum(1), batch["node_mask"][row])


def test_a_mask_that_marks_padding_is_not_made(tmp_path: Path) -> None:
    """PyTorch's key_padding_mask is true for padding."""
    inputs = {"x": ATOMS, "key_padding_mask": tensor_type(TensorProto.BOOL, ["molecules", "atoms"])}
    write_lines([{"x": np.ones((size, 3))} for size in (1, 2)], tmp_path / "a.jsonl")
    with raises(UsageError, "missing_value", "a.jsonl", "key_padding_mask"):
        open_data(tmp_path / "a.jsonl", inputs)


GOOD = [{"positions": np.ones((n, 3)), "force": np.ones((n, 3)), "label": [1.0]} for n in (2, 3, 4)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"positions": np.ones((3, 2))}, ("wrong_shape", "a.jsonl", "positions", "2", "1", "1", "0", "3")),
        ({"force": np.ones((2, 3))}, ("wrong_shape", "a.jsonl", "force", "2", "0", "1", "0", "positions", "3")),
        (
            {"positions": np.full((3, 3), np.nan)},
            ("wrong_value", "a.parquet", "positions", "1", "0", "0", "0", "float32"),
        ),
        ({"positions": np.ones(3)}, ("wrong_type", "a.jsonl", "positions")),
        ({"positions": np.ones((0, 3)), "force": np.ones((0, 3))}, ("wrong_type", "a.jsonl", "positions")),
        ({"label": [1.0, 2.0]}, ("wrong_shape", "a.jsonl", "label", "2", "0", "1", "0", "1")),
    ],
)
def test_samples_that_are_wrong(tmp_path: Path, changed: dict[str, Any], said: tuple[str, ...]) -> None:
    samples = [GOOD[0], {**GOOD[1], **changed}, GOOD[2]]
    lines = [json.dumps({name: np.asarray(value).tolist() for name, value in each.items()}) for each in samples]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines).replace("NaN", "1e999").replace("1e999", "NaN"))
    if said[0] == "wrong_value":
        path = tmp_path / "a.parquet"
        columns = {name: [np.asarray(each[name]).tolist() for each in samples] for name in INPUTS}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with raises(UsageError, *said):
        open_data(path, INPUTS)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([2, 3], ("wrong_shape", "a.npz", "positions_sizes", "positions", "15", "27")),
        ([2, 3, -4], ("wrong_shape", "a.npz", "positions_sizes", "positions")),
        ([2.0, 3.0, 4.0], ("wrong_shape", "a.npz", "positions_sizes", "positions")),
        ([5, 0, 4], ("wrong_shape", "a.npz", "positions", "0", "0", "1", "0")),
    ],
)
def test_sizes_that_are_wrong(tmp_path: Path, sizes: list[float], said: tuple[str, ...]) -> None:
    np.savez(tmp_path / "a.npz", positions=np.ones((9, 3), "f"), positions_sizes=np.array(sizes))
    with raises(UsageError, *said):
        open_data(tmp_path / "a.npz", {"positions": ATOMS})


def test_uneven_arrays_inside_a_sample(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": [[[1.0], [2.0]], [[1.0, 2.0], [3.0]]]}), tmp_path / "a.parquet")
    with raises(UsageError, "wrong_shape", "a.parquet", "x", "1", "0"):
        open_data(tmp_path / "a.parquet", {"x": tensor_type(FLOAT, ["n", "a", "b"])})


def test_options_that_need_one_shape_are_refused(shell: Shell) -> None:
    done = train(shell, "net.onnx", "alone", "--max-length", 3, "-o", "t.onnx")
    assert done.facts == ("conflict", "molecules.jsonl", "positions", "tokenizer", "max_length", "pack", "pad_id")
    done = train(shell, "net.onnx", "alone", "--batch-size", 1, "--balance", "-o", "t.onnx")
    assert done.facts == ("wrong_type", "balance", "label")


def test_signals_of_different_lengths_have_no_mean_per_position(shell: Shell) -> None:
    text = """<ir_version: 10, opset_import: ["": 18]> g (float[n, time] x) => (float[n, 1] y)
        <float[1, 1] w = {2}, int64[1] axis = {1}> { a = ReduceMean<keepdims = 1>(x, axis)  y = MatMul(a, w) }"""
    onnx.save(onnx.parser.parse_model(text), "signals.onnx")
    write_lines([{"x": np.arange(size) + 0.5, "label": [1.0]} for size in (2, 3, 2, 4)], Path("signals.jsonl"))
    on_signals = ("train", "signals.onnx", "--data", "signals.jsonl", "--batch-size", 1, "--epochs", 1, "-o", "t.onnx")
    done = shell(*on_signals, "--normalize", "auto")
    assert done.facts == ("wrong_shape", "normalize", "x", "1")
    done = shell(*on_signals)
    assert done.code == 0, done.err
