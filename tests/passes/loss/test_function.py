"""Losses with derivatives in them: `op.grad` and its kin, other models, and more labels, against PyTorch's autograd."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node import make_node
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.passes.loss.function import LossOp
from tests.cli_harness import Shell, save

LOSSES = """
def burgers(op, u, x: "input", t: "input", *, nu: float = 0.1):
    u_x, u_t = op.grad(u, x, t)
    residual = u_t + u * u_x - nu * op.grad(u_x, x)
    return residual * residual

def forces(op, energy, e, force: "label x", x: "input", *, share: float = 2.0):
    error = op.grad(energy, x) + force
    return (energy - e) * (energy - e) + share * op.sum(error * error, [1])

def penalty(op, y, x: "input"):
    norm = op.Sqrt(op.sum(op.grad(y, x) * op.grad(y, x), [1]))
    return y + 10 * (norm - 1) * (norm - 1)

def sobolev(op, y, label, tangent: "label y", x: "input", v: "label x"):
    error = op.jvp(y, x, v) - tangent
    return (y - label) * (y - label) + error * error

def poisson(op, u, x: "input"):
    residual = op.laplacian(u, x) - op.Sin(op.sum(x, [1]))
    return residual * residual

def boundary(op, u, x: "input", edge: "label x"):
    value = op.model(x=edge)
    return u * u + op.sum(value * value, [0])

def distilled(op, y, x: "input"):
    error = y - op.load("teacher.onnx")
    return error * error

def smooth(op, y, x: "input"):
    moved = op.load("teacher.onnx", x=op.model(x=x + 0.1 * op.grad(y, x)))
    return moved * moved

def divergent(op, field, x: "input"):
    d = op.divergence(field, x)
    return d * d

def turned(op, field, x: "input", v: "label y"):
    g = op.vjp(field, v, x)
    return g * g
"""


DYNAMO = pytest.param(
    True,
    marks=pytest.mark.skipif(
        importlib.util.find_spec("onnxscript") is None, reason="PyTorch's newer exporter needs onnxscript"
    ),
    id="dynamo",
)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(LOSSES)
    return Shell(tmp_path, capsys)


class Net(nn.Module):
    """A small smooth network of one input [n, columns], or of several inputs [n, 1]."""

    def __init__(self, columns: int, outputs: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(columns, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, outputs)
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.net(torch.cat(inputs, 1))
        return found


def export(net: nn.Module, file: str, inputs: Mapping[str, int], dynamo: bool = False, seed: int = 0) -> None:
    """Export a network; every input is [n, columns]."""
    arrays = tuple(torch.zeros(3, columns) for columns in inputs.values())
    if dynamo:
        sizes = ({0: torch.export.Dim("n")},) * len(arrays)
        torch.onnx.export(net, arrays, file, input_names=[*inputs], output_names=["y"], dynamo=True,
                          dynamic_shapes=(sizes,), verbose=False)  # fmt: skip
    else:
        torch.onnx.export(net, arrays, file, input_names=[*inputs], output_names=["y"], dynamo=False,
                          dynamic_axes={name: {0: "n"} for name in (*inputs, "y")})  # fmt: skip


def grad(y: Tensor, *xs: Tensor) -> Any:
    found = torch.autograd.grad(y.sum(), xs, create_graph=True)
    return found[0] if len(found) == 1 else found


def laplacian(y: Tensor, x: Tensor) -> Tensor:
    g = grad(y, x)
    return sum((grad(g[:, i], x)[:, i] for i in range(x.shape[1])), torch.zeros(()))


def sobolev(net: nn.Module, x: Tensor, label: Tensor, tangent: Tensor, v: Tensor) -> Tensor:
    error = (grad(net(x), x) * v).sum(1, keepdim=True) - tangent
    return (net(x) - label) ** 2 + error**2


def divergence(net: nn.Module, x: Tensor) -> Tensor:
    y = net(x)
    found: Tensor = sum((grad(y[:, i], x)[:, i] for i in range(x.shape[1])), torch.zeros(()))
    return found


def burgers(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u = net(x, t)
    u_x, u_t = grad(u, x, t)
    return (u_t + u * u_x - 0.1 * grad(u_x, x)) ** 2


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    return net(x) + 10 * (grad(net(x), x).norm(dim=1, keepdim=True) - 1) ** 2


TEACHER = Net(3)

WITH_TORCH: dict[str, tuple[dict[str, int], int, dict[str, int], Callable[..., Tensor]]] = {
    "burgers": ({"x": 1, "t": 1}, 1, {}, burgers),
    "forces": (
        {"x": 3}, 1, {"label": 1, "force": 3},
        lambda net, x, label, force: (net(x) - label) ** 2 + 2 * ((grad(net(x), x) + force) ** 2).sum(1, keepdim=True),
    ),
    "penalty": ({"x": 3}, 1, {}, penalty),
    "sobolev": ({"x": 3}, 1, {"label": 1, "tangent": 1, "v": 3}, sobolev),
    "poisson": ({"x": 3}, 1, {}, lambda net, x: (laplacian(net(x), x) - torch.sin(x.sum(1)))[:, None] ** 2),
    "boundary": ({"x": 3}, 1, {"edge": 3}, lambda net, x, edge: net(x) ** 2 + (net(edge) ** 2).sum()),
    "distilled": ({"x": 3}, 1, {}, lambda net, x: (net(x) - TEACHER(x)) ** 2),
    "divergent": ({"x": 3}, 3, {}, lambda net, x: divergence(net, x) ** 2),
    "turned": ({"x": 3}, 2, {"v": 2}, lambda net, x, v: grad(net(x) * v, x) ** 2),
}  # fmt: skip


@pytest.mark.parametrize("dynamo", [False, DYNAMO])
@pytest.mark.parametrize("name", WITH_TORCH)
def test_gradients_of_weights_pass_through_derivatives(shell: Shell, name: str, dynamo: bool) -> None:
    inputs, outputs, labels, function = WITH_TORCH[name]
    torch.manual_seed(3)
    net = Net(sum(inputs.values()), outputs)
    export(net, "net.onnx", inputs, dynamo)
    export(TEACHER, "teacher.onnx", {"x": 3})
    result = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx", "--verify")
    assert result.code == 0, result.err
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((7, size)).astype(np.float32) for n, size in {**inputs, **labels}.items()}
    session = onnxruntime.InferenceSession("train.onnx")
    assert {value.name for value in session.get_inputs()} == feeds.keys()
    found = dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))
    loss = function(net, *(torch.tensor(feeds[n], requires_grad=n in inputs) for n in feeds)).mean()
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load("train.onnx").graph.initializer}
    for parameter, value in net.named_parameters():
        wanted = np.zeros(value.shape, np.float32) if value.grad is None else value.grad.numpy()
        gradient = next(
            found[f"{n}_grad"] for n, array in stored.items()
            if f"{n}_grad" in found and array.shape == value.shape and np.array_equal(array, value.detach().numpy())
        )  # fmt: skip
        scale = max(float(np.abs(wanted).max()), 1e-6)
        assert np.abs(gradient - wanted).max() <= 1e-5 * scale, parameter


SECOND = """
def product(op, y, x: "input", v: "label x"):
    h = op.jvp(op.grad(y, x), x, v)
    return h * h

def transposed(op, y, x: "input", v: "label x"):
    h = op.vjp(op.grad(y, x), v, x)
    return h * h

def curvature(op, y, x: "input", v: "label x"):
    c = op.jvp(op.jvp(y, x, v), x, v)
    return c * c

def of_itself(op, y, x: "input"):
    g = op.grad(y, x)
    return op.vjp(y * y, y, x) * op.jvp(g, x, g)

def laplace(op, y, x: "input"):
    d = op.laplacian(y, x)
    return d * d

def unread(op, y, x: "input"):
    op.laplacian(op.model(x=2.0 * x), x)
    return y * y
"""

SECOND_WITH_TORCH: dict[str, Callable[..., Tensor]] = {
    "product": lambda net, x, v: grad((grad(net(x), x) * v).sum(1), x) ** 2,
    "transposed": lambda net, x, v: grad((grad(net(x), x) * v).sum(1), x) ** 2,
    "curvature": lambda net, x, v: (grad((grad(net(x), x) * v).sum(1), x) * v).sum(1) ** 2,
    "of_itself": lambda net, x: 2 * net(x) ** 2 * grad(net(x), x) * grad((grad(net(x), x) ** 2).sum(1), x) / 2,
    "laplace": lambda net, x: laplacian(net(x), x) ** 2,
    "unread": lambda net, x: net(x) ** 2,
}


@pytest.mark.parametrize("fixed", [False, True], ids=["any batch", "fixed batch"])
@pytest.mark.parametrize("name", SECOND_WITH_TORCH)
def test_derivatives_whose_values_the_loss_does_not_read_are_proved(shell: Shell, name: str, fixed: bool) -> None:
    """The training model computes neither these values nor anything that is not read; `check` still proves them."""
    Path("losses.py").write_text(SECOND)
    torch.manual_seed(3)
    net, x = Net(3), torch.randn(7, 3, requires_grad=True)
    axes = {} if fixed else {"x": {0: "n"}, "y": {0: "n"}}
    torch.onnx.export(net, (x,), "net.onnx", dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=axes)
    built = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx", "--verify")
    assert built.code == 0, built.err
    again = shell("check", "train.onnx", "--original", "net.onnx")
    assert again.code == 0, again.out
    if name in ("product", "laplace"):  # with a Gradient node, the names of unread values are used again
        assert shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "g.onnx", "--as-gradient-op").code == 0
        assert shell("check", "g.onnx", "--original", "net.onnx").code == 0
    session = onnxruntime.InferenceSession("train.onnx")
    feeds = {"x": x.detach().numpy(), "v": np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)}
    feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    loss = SECOND_WITH_TORCH[name](net, x, *(torch.tensor(array) for key, array in feeds.items() if key != "x")).mean()
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-4)
    for key, value in net.named_parameters():
        if value.grad is not None and value.grad.any():
            scale = float(value.grad.abs().max())
            np.testing.assert_allclose(found[f"{key}_grad"], value.grad.numpy(), atol=1e-5 * scale, err_msg=key)
    graph = onnx.load("train.onnx").graph
    read = {name for node in graph.node for name in node.input} | set(names)
    assert all(read.intersection(node.output) for node in graph.node)


IN_16_BITS = """
def forces(op, y, label, force: "label x", x: "input"):
    error = op.grad(y, x) + force
    return (y - label) * (y - label) + op.sum(error * error, [1])

def laplacian(op, y, x: "input"):
    error = op.laplacian(y, x) - y
    return error * error

def along(op, y, x: "input", v: "label x"):
    error = op.jvp(y, x, v) - y
    return error * error

def moved(op, y, x: "input", v: "label x"):
    error = op.model(x=v + 0.5 * op.grad(y, x)) - op.load("net.onnx", x=v)
    return error * error

def weighted(op, y, x: "input"):
    weights = op.Exp(op.sum(x, [1]))
    return y * y * weights, weights
"""

WITH_TORCH_IN_16_BITS: dict[str, Callable[..., Tensor]] = {
    "forces": lambda net, x, label, force: (net(x) - label) ** 2 + ((grad(net(x), x) + force) ** 2).sum(1, True),
    "laplacian": lambda net, x: (laplacian(net(x), x)[:, None] - net(x)) ** 2,
    "along": lambda net, x, v: ((grad(net(x), x) * v).sum(1, True) - net(x)) ** 2,
    "moved": lambda net, x, v: (net(v + 0.5 * grad(net(x), x)) - net(v).detach()) ** 2,
    "weighted": lambda net, x: (net(x) ** 2 * x.sum(1, True).exp()).sum() / x.sum(1, True).exp().sum(),
}


@pytest.mark.parametrize("name", WITH_TORCH_IN_16_BITS)
def test_losses_of_a_16_bit_model_are_computed_in_float32(shell: Shell, name: str) -> None:
    Path("losses.py").write_text(IN_16_BITS)
    torch.manual_seed(3)
    net = Net(3)
    net.load_state_dict({key: value.half().float() for key, value in net.state_dict().items()})
    export(net, "net.onnx", {"x": 3})
    model = onnx.load("net.onnx")
    del model.graph.value_info[:]
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(model, "net.onnx")
    built = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx", "--verify")
    assert built.code == 0, built.err
    session = onnxruntime.InferenceSession("train.onnx")
    sizes = {value.name: value.shape[1] for value in session.get_inputs()}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((7, size)).astype(np.float16) for name, size in sizes.items()}
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    assert found["loss"].dtype == np.float32
    arrays = {n: torch.tensor(x, dtype=torch.float64, requires_grad=n == "x") for n, x in feeds.items()}
    loss = WITH_TORCH_IN_16_BITS[name](net.double(), **arrays).mean()
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=3e-3)
    for key, value in net.named_parameters():
        if value.grad is not None and value.grad.any():
            scale = float(value.grad.abs().max())
            np.testing.assert_allclose(found[f"{key}_grad"], value.grad.numpy(), atol=1e-2 * scale, err_msg=key)


LOADED = """
from pathlib import Path

def near(op, y, x: "input"):
    error = y - op.load("teacher.onnx")
    return error * error

def absolute(op, y, x: "input"):
    error = y - op.load(Path(__file__).parent / "teacher.onnx", x=x)
    return error * error
"""


@pytest.mark.parametrize("name", ["near", "absolute"])
@pytest.mark.parametrize("saved", ["plain", "external data", "fixed batch", "opset 13"])
def test_another_model_is_read_beside_the_loss(shell: Shell, name: str, saved: str) -> None:
    """In the working directory, another file has its name. It may store its weights elsewhere or have other sizes."""
    torch.manual_seed(5)
    net, teacher = Net(3), Net(3)
    Path("losses").mkdir()
    Path("losses/losses.py").write_text(LOADED)
    export(net, "net.onnx", {"x": 3})
    export(net, "teacher.onnx", {"x": 3})
    axes = {} if saved == "fixed batch" else {"x": {0: "batch"}, "y": {0: "batch"}}
    opset = 13 if saved == "opset 13" else 17
    torch.onnx.export(teacher, (torch.zeros(7, 3),), "losses/teacher.onnx", dynamo=False, input_names=["x"],
                      output_names=["y"], dynamic_axes=axes, opset_version=opset)  # fmt: skip
    if saved == "external data":
        model = onnx.load("losses/teacher.onnx")
        onnx.save(model, "losses/teacher.onnx", save_as_external_data=True, size_threshold=0, location="teacher.data")
    built = shell("build", "net.onnx", "--loss", f"losses/losses.py:{name}", "-o", "train.onnx", "--verify")
    assert built.code == 0, built.err
    x = torch.randn(5, 3)
    (found,) = onnxruntime.InferenceSession("train.onnx").run(["loss"], {"x": x.numpy()})
    np.testing.assert_allclose(found, ((net(x) - teacher(x)) ** 2).mean().item(), rtol=1e-5)
    Path("losses/teacher.onnx").unlink()
    missing = shell("build", "net.onnx", "--loss", f"losses/losses.py:{name}", "-o", "again.onnx")
    words = f"in line {5 if name == 'near' else 9} of 'losses/losses.py'"
    assert missing.code == 1 and words in missing.err and "teacher.onnx" in missing.err, missing.err


def test_training_takes_the_steps_of_pytorch(shell: Shell) -> None:
    """Force matching for 50 steps of Adam, and its evaluation."""
    torch.manual_seed(0)
    net = Net(3)
    export(net, "net.onnx", {"x": 3})
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 3)).astype(np.float32)
    data = {"x": x, "label": (x**2).sum(1, keepdims=True), "force": -2 * x}
    np.savez("data.npz", **data)
    command = ("net.onnx", "--loss", "losses.py:forces", "--data", "data.npz", "--batch-size", 10)
    more = ("--epochs", 5, "--optimizer", "adam", "--lr", "0.01", "--no-shuffle", "--threads", 1)
    assert shell("train", *map(str, (*command, *more)), "-o", "trained.onnx").code == 0
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    function = WITH_TORCH["forces"][-1]
    for at in [*range(0, 100, 10)] * 5:
        batch = [torch.tensor(array[at : at + 10], requires_grad=name == "x") for name, array in data.items()]
        optimizer.zero_grad()
        function(net, *batch).mean().backward()
        optimizer.step()
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load("trained.onnx").graph.initializer}
    for name, value in net.named_parameters():
        np.testing.assert_allclose(stored[name], value.detach().numpy(), atol=1e-5)
    judged = shell("evaluate", "trained.onnx", "--loss", "losses.py:forces", "--data", "data.npz", "--json")
    wanted = function(net, *(torch.tensor(array, requires_grad=name == "x") for name, array in data.items())).mean()
    assert judged.code == 0, judged.err
    np.testing.assert_allclose(judged.json["results"]["loss"], wanted.item(), rtol=1e-4)


MISUSE = """
def stranger(op, y, z: "input"): return y
def no_value(op, y, f: "label z"): return y
def apart(op, y, x: "input", t: "input"): return op.grad(x * x, t)
def whole(op, y, x: "input"): return op.grad(y, op.Shape(x)) + y
def number(op, y, x: "input"): return op.grad(y, 3)
def wide(op, y, x: "input"): return op.divergence(op.Concat(y, y, axis=1), x)
def many(op, y, x: "input"): return op.laplacian(op.Concat(y, y, axis=1), x)
def renamed(op, y, x: "input"): return op.model(z=x)
def flat(op, y, x: "input"): return op.model(x=op.squeeze(x, [1]))
def missing(op, y): return op.load("nothing.onnx")
def other(op, y, x: "input"): return op.load("net.onnx", z=x)
def twice(op, y, a, b): return y - a - b
def relus(op, y, x: "input"): return op.laplacian(op.sum(op.Relu(x) * 2, [1]), x)
def misspelt(op, y): return op.Sofmax(y)
def branched(op, y): return y if y > 0 else -y
def largest(op, y): return max(y, -y)
def chained(op, y): return op.Where(0 < y < 1, y, -y)
def equal(op, y, x: "input"): return op.Where(x == y, y, -y)
def untyped(op, y): return op.TopK(y, [1], outputs=2)[0]
def wider(op, y, x: "input"): return op.model(x=op.Concat(x, x, axis=1)) + y
def broadcast(op, y, x: "input"): return op.vjp(op.Tanh(y), op.const(2.0, y), x)
def narrow(op, y, x: "input"): return op.jvp(y, x, op.cast(x, 11))
def tangled(op, y, x: "input"): return op.grad("y", x)
def far(op, y): return op.mean(y, [2])
def counted(op, y): return y, op.Shape(y)
def constant(op, y, x: "input"): return x * x
def stepped(op, y): return op.Sign(y)
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("stranger", 2, "the parameter 'z' names 'z', which is not one of the model's inputs"),
        ("no_value", 2, "which is not one of the model's inputs and outputs"),
        ("apart", 2, "in line 4 of 'losses.py': `op.grad`: "),
        ("whole", 2, "pass float tensors, because only they have derivatives"),
        ("number", 2, "`op.grad` accepts only values of the graph"),
        ("wide", 2, "`op.divergence`: "),
        ("many", 2, "`op.laplacian`: "),
        ("renamed", 2, "the model has no input 'z'"),
        ("flat", 2, "the input 'x' must be float[n, 1], but the given value is float[n]"),
        ("missing", 1, "no such file: 'nothing.onnx'"),
        ("other", 2, "'net.onnx' has no input 'z'"),
        ("twice", 2, "has the parameters op, y, a, b"),
        ("relus", 2, "is constant, so the second is zero"),
        ("misspelt", 2, "in line 15 of 'losses.py': No schema registered for 'Sofmax'"),
        ("branched", 2, "in line 16 of 'losses.py': a value has no truth at build time"),
        ("largest", 2, "a value has no truth at build time"),
        ("chained", 2, "a value has no truth at build time"),
        ("equal", 2, "write op.Equal(x, y)"),
        ("untyped", 2, "in line 20 of 'losses.py': can't infer the output types of loss/untyped/TopK"),
        ("wider", 2, "the input 'x' must be float[n, 1], but the given value is float[n, 2]"),
        (
            "broadcast",
            2,
            "the cotangent of 'loss/broadcast/Tanh_out' must be float[n, 1], but the given value is float[]",
        ),
        ("narrow", 2, "the tangent of 'x' must be float[n, 1], but the given value is double[n, 1]"),
        ("tangled", 2, "`op.grad` accepts only values of the graph"),
        ("far", 2, "in line 25 of 'losses.py': a reduction over axis 2: 'y' is float[n, 1]"),
        ("counted", 2, "must return floats, but returns int64[2]"),
        ("constant", 3, "no differentiable path leads from a trained weight to the loss"),
        ("stepped", 3, "no differentiable path leads from a trained weight to the loss"),
    ],
)
def test_misuse_is_refused_by_name(shell: Shell, name: str, code: int, words: str) -> None:
    Path("losses.py").write_text(MISUSE)
    export(Net(2), "net.onnx", {"x": 1, "t": 1})
    result = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx")
    assert result.code == code and words in result.err, result.err
    assert not Path("train.onnx").exists()


@pytest.mark.parametrize("name", ["Scaled", "doubled"])
def test_a_loss_may_be_an_object_or_a_partial_function(shell: Shell, name: str) -> None:
    Path("losses.py").write_text("""
from functools import partial

class _Scaled:
    def __call__(self, op, y, x: "input  x", *, by: float = 2.0):
        return by * y * op.load("net.onnx", x=x)

def scaled(op, y, x: "input", *, by: float):
    return by * y * op.load("net.onnx", x=x)

Scaled, doubled = _Scaled(), partial(scaled, by=2.0)
""")
    net, x = Net(3), torch.randn(4, 3)
    export(net, "net.onnx", {"x": 3})
    for more, factor in (((), 2.0), (("--loss-option", "by=3"), 3.0)):
        built = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx", "--force", *more)
        assert built.code == 0, built.err
        (found,) = onnxruntime.InferenceSession("train.onnx").run(["loss"], {"x": x.numpy()})
        np.testing.assert_allclose(found, factor * (net(x) ** 2).mean().item(), rtol=1e-5)


def test_a_loss_without_gradients_can_be_evaluated(shell: Shell) -> None:
    Path("losses.py").write_text("def wrong(op, y, label): return op.Abs(op.Sign(y) - op.Sign(label)) * 0.5")
    net, x = Net(3), torch.randn(20, 3)
    label = torch.randn(20, 1)
    export(net, "net.onnx", {"x": 3})
    np.savez("data.npz", x=x.numpy(), label=label.numpy())
    judged = shell("evaluate", "net.onnx", "--loss", "losses.py:wrong", "--data", "data.npz", "--json")
    assert judged.code == 0, judged.err
    assert judged.json["results"]["loss"] == pytest.approx(((net(x) > 0) != (label > 0)).float().mean().item())


OF_TWO_HEADS = """
def of_both(op, first, second: "output"):
    return first * first + second * second

def of_a_slope(op, first, x: "input", second: "output"):
    slope = op.grad(second, x)
    return first * first + slope * slope

def anew(op, first, x: "input"):
    _, second = op.model(x=2.0 * x)
    return first * first + second * second

def of_one(op, first):
    return first * first
"""


@pytest.mark.parametrize("name", ["of_both", "of_a_slope", "anew", "of_one"])
def test_weights_of_another_output_are_trained_if_the_loss_reads_it(shell: Shell, name: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(1, 5), nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.tanh(self.body(x))
            return self.a(hidden), self.b(hidden)

    torch.manual_seed(0)
    net, x = TwoHeads(), torch.randn(6, 1, requires_grad=True)
    torch.onnx.export(
        net, (x,), "net.onnx", dynamo=False, input_names=["x"], output_names=["first", "second"],
        dynamic_axes={"x": {0: "n"}, "first": {0: "n"}, "second": {0: "n"}},
    )  # fmt: skip
    Path("losses.py").write_text(OF_TWO_HEADS)
    built = shell("build", "net.onnx", "--loss", f"losses.py:{name}:first", "-o", "train.onnx")
    assert built.code == 0, built.err
    first, second = net(x)
    read = second
    if name == "of_a_slope":
        (read,) = torch.autograd.grad(second.sum(), x, create_graph=True)
    if name == "anew":
        read = net(2.0 * x)[1]
    (first**2 + (0 if name == "of_one" else read**2)).mean().backward()
    session = onnxruntime.InferenceSession("train.onnx")
    names = [value.name for value in session.get_outputs()]
    gradients = dict(zip(names, session.run(None, {"x": x.detach().numpy()}), strict=True))
    wanted = {f"{key}_grad": p.grad.numpy() for key, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    assert set(wanted) == set(names) - {"loss"}
    for key, gradient in wanted.items():
        np.testing.assert_allclose(gradients[key], gradient, atol=1e-6)
    asked = shell("build", "net.onnx", "--loss", f"losses.py:{name}:first", "--train", "b.weight", "-o", "b.onnx")
    assert asked.code == (3 if name == "of_one" else 0), asked.err
    assert ("of 22 float parameters (27%) stay untrained" in built.out) == (name == "of_one"), built.out


CAUTIONS = """
def kinked(op, y, x: "input"):
    second = op.grad(op.grad(y, x), x)
    return y + second * second

def of_a_slope(op, y, x: "input"):
    return op.grad(y, x)

def paired(op, y, x: "input"):
    return y - op.squeeze(x, [1])

def centered(op, y):
    return y - op.mean(y, [0])

def of_a_mean(op, y, x: "input"):
    return op.grad(op.mean(y), x) + y
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kinked", "a second derivative passes through Relu"),
        ("of_a_slope", "the gradient of 'net.4.bias' is zero"),
        ("paired", "one for each pair of samples"),
        ("centered", "the loss centered of a sample depends on its batch"),
        ("of_a_mean", "it computes with the number of samples"),
    ],
)
def test_what_changes_a_result_unseen_is_a_warning(shell: Shell, name: str, words: str) -> None:
    class Relu(Net):
        def __init__(self) -> None:
            super().__init__(1)
            self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    Path("losses.py").write_text(CAUTIONS)
    export(Relu(), "net.onnx", {"x": 1})
    result = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx")
    assert result.code == 0 and words in result.out, result.out


@pytest.mark.parametrize("activation", [nn.ELU(), nn.Hardswish()])
def test_a_second_derivative_that_exists_is_no_warning(shell: Shell, activation: nn.Module) -> None:
    """These operators have a kink or a jump, but also a second derivative."""
    net = Net(2)
    net.net[1] = activation
    Path("losses.py").write_text(CAUTIONS + 'def laplace(op, y, x: "input"): return op.laplacian(y, x)')
    export(net, "net.onnx", {"x": 2})
    result = shell("build", "net.onnx", "--loss", "losses.py:laplace", "-o", "train.onnx")
    assert result.code == 0 and "passes through" not in result.out, result.out


def test_running_statistics_follow_the_inputs_of_the_model(shell: Shell) -> None:
    """PyTorch would update them again for each evaluation."""
    Path("losses.py").write_text('def moved(op, y, x: "input"): return y * op.model(x=0.5 * x)')
    net = Net(3)
    net.net[1] = nn.BatchNorm1d(16)
    export(net, "net.onnx", {"x": 3})
    words = "leaves the running statistics unchanged"
    for mode in ("train", "eval"):
        built = shell("build", "net.onnx", "--loss", "losses.py:moved", "--mode", mode, "-o", f"{mode}.onnx")
        assert built.code == 0 and (words in " ".join(built.out.split())) == (mode == "train"), built.out
    x = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    session = onnxruntime.InferenceSession("train.onnx")
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": x}), strict=True))
    (mean,) = (value for name, value in found.items() if "running_mean" in name)
    linear = net.net[0]
    assert isinstance(linear, nn.Linear)
    wanted = 0.1 * linear(torch.tensor(x)).mean(0).detach().numpy()
    np.testing.assert_allclose(mean, wanted, atol=1e-6)


def test_the_proof_notices_another_derivative_in_the_loss(shell: Shell) -> None:
    """The gradients of the weights stay right; the description then speaks of a derivative that is not computed."""
    export(Net(2), "net.onnx", {"x": 1, "t": 1})
    assert shell("build", "net.onnx", "--loss", "losses.py:burgers", "-o", "train.onnx").code == 0
    assert shell("check", "train.onnx", "--original", "net.onnx").code == 0
    model = onnx.load("train.onnx")
    (entry,) = (each for each in model.metadata_props if each.key == "onnxgrad.roles")
    roles = json.loads(entry.value)
    roles["inner"][0]["wrt"].reverse()
    entry.value = json.dumps(roles)
    onnx.save(model, "changed.onnx")
    result = shell("check", "changed.onnx", "--original", "net.onnx")
    assert result.code == 4 and "derivatives in the loss" in result.out + result.err


def test_a_label_that_no_loss_of_a_data_set_reads_is_none_of_its_arrays(shell: Shell) -> None:
    Path("losses.py").write_text("def still(op, y, label): return y * y")
    export(Net(3), "net.onnx", {"x": 3})
    command = ("--loss", "near=mse", "--loss", "far=losses.py:still")
    assert shell("build", "net.onnx", *command, "-o", "train.onnx").code == 0
    sets = describe(onnx.load("train.onnx")).sets
    assert {data: set(arrays) for data, arrays in sets.items()} == {"near": {"x", "label"}, "far": {"x"}}


@pytest.mark.parametrize(("kind", "loss"), [("float", "near"), ("float16", "near"), ("int64", "far")])
def test_a_mask_has_the_first_two_axes_of_its_value(shell: Shell, kind: str, loss: str) -> None:
    nodes = "p = MatMul(x, w) y = Tanh(p) t = ArgMax<axis = 2>(p)" if kind == "int64" else "y = Mul(x, w)"
    ends = "float[n, k, 2] y, int64[n, k, 1] t" if kind == "int64" else f"{kind}[n, k, 2] y"
    inner = "float" if kind == "int64" else kind
    stored = "float[2, 2] w = {1, 2, 3, 4}" if kind == "int64" else f"{kind}[2] w = {{1, 2}}"
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({inner}[n, k, 2] x) => ({ends}) <{stored}> {{ {nodes} }}'
    save(text, Path("net.onnx"))
    rows = "return op.sum(op.sum(y * y, [2], keepdims=False) * real, [1])"
    Path("losses.py").write_text(f"""def near(op, y, real: "mask y"): {rows}
def far(op, y, real: "mask t"): {rows}
""")
    result = shell("build", "net.onnx", "--loss", f"losses.py:{loss}:y", "-o", "train.onnx", "--no-verify")
    assert result.code == 0, result.err
    (mask,) = (value for value in onnx.load("train.onnx").graph.input if value.name == "real")
    assert describe(onnx.load("train.onnx")).losses[0].mask == "real"
    assert shape_of(mask.type) == ("n", "k")
    assert dtype_of(mask.type) == (TensorProto.FLOAT16 if kind == "float16" else TensorProto.FLOAT)


def test_the_divergence_of_samples_with_two_axes(shell: Shell) -> None:
    save(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n, 2, 2] x) => (float[n, 2, 2] y) '
        "<float[2] w = {0.5, 2}> { p = Mul(x, w) y = Tanh(p) }",
        Path("cube.onnx"),
    )
    Path("losses.py").write_text('def flux(op, y, x: "input"): return op.divergence(y, x)')
    assert shell("build", "cube.onnx", "--loss", "losses.py:flux", "-o", "train.onnx").code == 0
    x, w = np.float32(np.random.default_rng(0).standard_normal((3, 2, 2))), np.float32([0.5, 2])
    (found,) = onnxruntime.InferenceSession("train.onnx").run(["loss"], {"x": x})
    np.testing.assert_allclose(found, (w * (1 - np.tanh(x * w) ** 2)).sum((1, 2)).mean(), rtol=1e-5)


def test_labels_that_the_loss_does_not_read_are_no_inputs(shell: Shell) -> None:
    Path("losses.py").write_text(
        'def squared(op, y, label, x: "input", old: "label x", edge: "label x"):\n    return y * y + op.model(x=edge)\n'
    )
    net = Net(3)
    export(net, "net.onnx", {"x": 3})
    result = shell("build", "net.onnx", "--loss", "losses.py:squared", "-o", "train.onnx", "--verify")
    assert result.code == 0, result.err
    for name in ("label", "old"):
        assert f"label '{name}'" in result.out
    session = onnxruntime.InferenceSession("train.onnx")
    assert [value.name for value in session.get_inputs()] == ["x", "edge"]
    x, edge = torch.randn(2, 5, 3)
    (found,) = session.run(["loss"], {"x": x.numpy(), "edge": edge.numpy()})
    np.testing.assert_allclose(found, (net(x) ** 2 + net(edge)).mean().item(), rtol=1e-5)
    np.savez("data.npz", x=x.numpy(), edge=edge.numpy())
    command = ("--loss", "losses.py:squared", "--data", "data.npz")
    assert shell("train", "net.onnx", *command, "--epochs", 1, "-o", "trained.onnx").code == 0
    assert shell("evaluate", "trained.onnx", *command).code == 0


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("name", ["product", "transposed", "curvature", "of_itself", "laplace"])
def test_a_wrong_derivative_inside_the_loss_fails(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    """One derivative is 1 % too large. The gradients of the weights are those of this other loss, and so agree."""
    record, calls = LossOp.record, 0

    def scaled(op: LossOp, kind: str, y: Val, seed: str, xs: Sequence[Val], found: Sequence[Val]) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            names = {each.name: f"{each.name}_right" for each in found}
            rename(op.graph.nodes, names)
            for old, new in names.items():
                op.graph.types[new] = op.graph.types[old]
                node = make_node("Mul", [new, op.const(np.float32(1.01)).name], [old], f"{old}/Mul")
                op.graph.nodes.append(node)
        record(op, kind, y, seed, xs, found)

    monkeypatch.setattr(LossOp, "record", scaled)
    Path("losses.py").write_text(SECOND)
    torch.manual_seed(3)
    torch.onnx.export(Net(3), (torch.zeros(7, 3),), "net.onnx", dynamo=False, input_names=["x"], output_names=["y"])
    result = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx")
    assert result.code == 4 and "derivatives in the loss against differences: the derivative of" in result.err


EVALUATED = """
def moved(op, y, x: "input", edge: "label x"):
    value = op.model(x=edge)
    return value * value

def stretched(op, y, x: "input"):
    z = 2.0 * x
    g = op.grad(op.model(x=z), z)
    return g * g
"""


@pytest.mark.parametrize("name", ["moved", "stretched"])
def test_evaluations_in_the_loss_are_compared_with_the_original(shell: Shell, name: str) -> None:
    """The loss does not read the output itself. A check notices if the evaluation is that of another model."""
    Path("losses.py").write_text(EVALUATED)
    net = Net(3)
    export(net, "net.onnx", {"x": 3})
    built = shell("build", "net.onnx", "--loss", f"losses.py:{name}", "-o", "train.onnx", "--verify")
    assert built.code == 0, built.err
    model = onnx.load("net.onnx")
    next(node for node in model.graph.node if node.op_type == "Tanh").op_type = "Sin"
    onnx.save(model, "other.onnx")
    result = shell("check", "train.onnx", "--original", "other.onnx")
    assert result.code == 4 and "on other inputs in the loss" in result.out + result.err, result.out


def test_the_nodes_of_a_proof_may_be_unreadable(shell: Shell) -> None:
    Path("losses.py").write_text(SECOND)
    export(Net(3), "net.onnx", {"x": 3})
    assert shell("build", "net.onnx", "--loss", "losses.py:product", "-o", "train.onnx").code == 0
    for text in ("?", "AAAA", "CgA="):
        model = onnx.load("train.onnx")
        (entry,) = (each for each in model.metadata_props if each.key == "onnxgrad.roles")
        roles = json.loads(entry.value)
        assert roles["proof_part"]
        entry.value = json.dumps({**roles, "proof_part": text})
        onnx.save(model, "changed.onnx")
        result = shell("check", "changed.onnx", "--original", "net.onnx")
        assert result.code in (1, 4) and "internal" not in result.err, result.err


def test_a_loss_that_depends_on_its_batch_is_not_computed_in_parts(shell: Shell) -> None:
    """Its parts don't add up to it: a step is not split into runs, and an evaluation says so."""
    Path("losses.py").write_text(CAUTIONS)
    export(Net(1), "net.onnx", {"x": 1})
    np.savez("data.npz", x=np.ones((32, 1), np.float32))
    words = "the loss centered of a sample depends on its batch"
    judged = shell("evaluate", "net.onnx", "--loss", "losses.py:centered", "--data", "data.npz")
    assert judged.code == 0 and words in judged.err
    command = ("net.onnx", "--data", "data.npz", "--batch-size", "32", "--memory", "1kB", "-o", "t.onnx")
    refused = shell("train", *command, "--loss", "losses.py:centered")
    assert refused.code == 2 and "split" in refused.err and "(ReduceMean)" in refused.err
    refused = shell("train", *command, "--loss", "losses.py:of_a_slope")
    assert refused.code == 2 and "split" not in refused.err
