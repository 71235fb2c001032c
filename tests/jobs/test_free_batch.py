"""Models exported for one batch size, built and trained with another: PyTorch runs the same module sample by sample."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from torch import Tensor, nn

from tests.cli_harness import MLP, Shell, save

PROVED = "Built and proved"
FREED = "was replaced by the symbolic size"
SAME = "samples gives the same results as the original"
"""Parts of the summary, of the caution about the batch size, and of the caution in the report."""

DYNAMO = pytest.param(
    True,
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            importlib.util.find_spec("onnxscript") is None, reason="PyTorch's newer exporter needs onnxscript"
        ),
    ],
    id="dynamo",
)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


class Convolutional(nn.Module):
    """The reshape to [1, -1] holds the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).reshape(1, -1))


class Attention(nn.Module):
    """A class token is joined to the tokens; `merges` joins the batch with the heads."""

    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in "qkv")
        self.head, self.norm = nn.Linear(8, 3), nn.LayerNorm(8)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.merges = merges

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        q, k, v = (layer(x).view(1, 5, 2, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.merges:
            q, k, v = (each.reshape(2, 5, 4) for each in (q, k, v))
        scores = q @ k.transpose(-1, -2) / 2
        scores = scores.masked_fill(torch.tril(torch.ones(1, 1, 5, 5))[0 if self.merges else ...] == 0, -1e9)
        found = (scores.softmax(-1) @ v).reshape(1, 2, 5, 4).transpose(1, 2).reshape(1, 5, 8)
        return self.head(self.norm(found)[:, 0])


class Encoder(nn.Module):
    """PyTorch's own layers, which flatten batch and sequence; with `first`, the sequence comes first inside."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=not first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.first = nn.Linear(8, 3), first

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x.transpose(0, 1)).transpose(0, 1) if self.first else self.layers(x)
        return self.head(found.mean(1))


class Recurrent(nn.Module):
    """Zero states of batch 1."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layers, self.head = kind(4, 6, batch_first=True, bidirectional=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(2, x.shape[0], 6)
        found, _ = self.layers(x, (state, state) if isinstance(self.layers, nn.LSTM) else state)
        return self.head(found[:, -1])


class Tiled(nn.Module):
    """A grid is repeated for each sample, and each sample for the points of the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.grid, self.head = nn.Parameter(torch.randn(4, 2)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid.unsqueeze(0).repeat(x.shape[0], 1, 1)
        return self.head(torch.cat([grid, x.unsqueeze(1).repeat(1, 4, 1)], -1)).tanh().mean(1)


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.interpolate(self.conv(x), size=(3, 5), mode="bilinear").flatten(1))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "classifier": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "convolutional": (Convolutional, (1, 4, 4)),
    "attention": (lambda: Attention(False), (4, 8)),
    "heads in the batch": (lambda: Attention(True), (4, 8)),
    "encoder": (lambda: Encoder(False), (4, 8)),
    "encoder, sequence first": (lambda: Encoder(True), (4, 8)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (5, 4)),
    "GRU": (lambda: Recurrent(nn.GRU), (5, 4)),
    "tiled": (Tiled, (3,)),
    "resized": (Resized, (1, 4, 4)),
}


def module_of(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(1)
    make, shape = MODULES[name]
    module = make().eval()
    for weight in module.parameters():  # exporters write equal tensors once
        nn.init.normal_(weight, 0.0, 0.4)
    return module, shape


def export(module: nn.Module, examples: tuple[Tensor, ...], names: list[str], dynamo: bool = False) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(module, examples, dynamo=True, verbose=False, input_names=names)
            assert program is not None
            return program.model_proto
        file = io.BytesIO()
        torch.onnx.export(module, examples, file, dynamo=False, opset_version=17, input_names=names)
    return onnx.load_from_string(file.getvalue())


def session_of(file: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options)


def results(session: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def one_by_one(module: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of runs of one sample each."""
    losses = [nn.functional.cross_entropy(module(x[i : i + 1]), labels[i : i + 1]) for i in range(len(x))]
    return torch.stack(losses).mean()


def samples(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, *shape, generator=generator)
    return x, torch.randint(0, 3, (count,), generator=generator)


def close(found: np.ndarray, wanted: Tensor) -> bool:
    """Exporters transpose some matrices."""
    array = wanted.detach().numpy()
    return any(
        each.shape == found.shape and np.abs(each - found).max() <= 1e-5 * max(1.0, np.abs(each).max())
        for each in (array, array.T)
    )


@pytest.mark.parametrize("dynamo", [False, DYNAMO])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.thinned(9, 3)
def test_a_batch_in_one_run_gives_the_gradients_of_its_samples(shell: Shell, name: str, dynamo: bool) -> None:
    module, shape = module_of(name)
    onnx.save(export(module, (torch.zeros(1, *shape),), ["x"], dynamo), "net.onnx")
    sizes = ",".join(map(str, ("n", *shape)))
    result = shell("build", "net.onnx", "--loss", "cross-entropy", "--shape", f"x:{sizes}", "-o", "train.onnx")
    assert result.code == 0 and PROVED in result.out, result.err
    assert SAME in Path("train.onnx.report.md").read_text()
    x, labels = samples(shape, 16)
    session = session_of("train.onnx")
    found = results(session, {"x": x.numpy(), "label": labels.numpy()})
    loss = one_by_one(module, x, labels)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    named = {name: weight for name, weight in module.named_parameters() if f"{name}_grad" in found}
    assert named
    for name, weight in named.items():
        assert weight.grad is not None
        assert close(found[f"{name}_grad"], weight.grad), name


@pytest.mark.parametrize(
    "name", ["classifier", "convolutional", "attention", pytest.param("encoder", marks=pytest.mark.slow), "LSTM"]
)
@pytest.mark.thinned(4)
def test_train_frees_the_batch_and_finds_the_weights_of_pytorch(shell: Shell, name: str) -> None:
    """Full batches, so that the order of the samples has no part in it; no accumulation."""
    module, shape = module_of(name)
    original = export(module, (torch.zeros(1, *shape),), ["x"])
    onnx.save(original, "net.onnx")
    x, labels = samples(shape, 16)
    np.savez("data.npz", x=x.numpy(), label=labels.numpy())
    arguments = ("--loss", "cross-entropy", "--data", "data.npz")
    steps = ("--epochs", "5", "--batch-size", "16", "--optimizer", "sgd", "--learning-rate", "0.1")
    result = shell("train", "net.onnx", *arguments, *steps, "-o", "trained.onnx")
    assert result.code == 0, result.err
    assert " runs" not in result.err and FREED in result.err and "(axis 0 of 'x')" in result.err
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        one_by_one(module, x, labels).backward()
        optimizer.step()
    trained = onnx.load("trained.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in trained.graph.initializer}
    named = {name: weight for name, weight in module.named_parameters() if name in stored}
    assert len(named) >= 2
    for name, weight in named.items():
        assert close(stored[name], weight), name
    assert trained.graph.input == original.graph.input and trained.graph.node == original.graph.node
    session = session_of("trained.onnx")
    scores = np.concatenate([session.run(None, {"x": each[None].numpy()})[0] for each in x])
    np.testing.assert_allclose(
        scores, np.concatenate([module(each[None]).detach().numpy() for each in x]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_evaluate_and_predict_take_a_fixed_batch(shell: Shell, batch: int) -> None:
    """All seven samples count, though fours leave three over."""
    module, shape = module_of("classifier")
    onnx.save(export(module, (torch.zeros(batch, *shape),), ["x"]), "net.onnx")
    x, labels = samples(shape, 7)
    np.savez("data.npz", x=x.numpy(), label=labels.numpy())
    wanted = nn.functional.cross_entropy(module(x), labels).item()
    for more in ((), ("--shape", "x:n,6")):
        result = shell("evaluate", "net.onnx", "--loss", "cross-entropy", "--data", "data.npz", *more, "--json")
        assert result.code == 0 and result.json["results"]["loss"] == pytest.approx(wanted, rel=1e-5), result.err
        assert result.json["samples"] == 7 and FREED in result.err
    assert shell("predict", "net.onnx", "--data", "data.npz", "-o", "p.npz").code == 0
    (found,) = np.load("p.npz").values()
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-6)


def test_explain_and_attack_take_a_batch_that_is_freed(shell: Shell) -> None:
    module, shape = module_of("classifier")
    onnx.save(export(module, (torch.zeros(1, *shape),), ["x"]), "net.onnx")
    x, labels = samples(shape, 5)
    np.savez("data.npz", x=x.numpy(), label=labels.numpy())
    how = ("net.onnx", "--data", "data.npz", "--shape", "x:n,6")
    explained = shell("explain", *how, "--class", "1", "--method", "saliency", "-o", "e.npz")
    assert explained.code == 0 and FREED in explained.err, explained.err
    x.requires_grad_()
    module(x)[:, 1].sum().backward()
    assert x.grad is not None
    found = np.load("e.npz")["attributions"]
    np.testing.assert_allclose(np.abs(found), np.abs(x.grad.numpy()), rtol=1e-4, atol=1e-6)
    attacked = shell("attack", *how, "--epsilon", "0.1", "-o", "a.npz")
    assert attacked.code == 0 and FREED in attacked.err, attacked.err


class Squeezed(nn.Module):
    """The batch of 1 is squeezed away on the way, and from the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.squeeze(0)))
        return torch.sigmoid(self.last(hidden.unsqueeze(0).mean(1)).squeeze())


def test_a_batch_that_is_squeezed_away_is_trained_in_one_run(shell: Shell) -> None:
    torch.manual_seed(0)
    module = Squeezed().eval()
    onnx.save(export(module, (torch.zeros(1, 3, 4),), ["x"]), "net.onnx")
    x = torch.randn(8, 3, 4)
    labels = torch.rand(8)
    np.savez("data.npz", x=x.numpy(), label=labels.numpy())
    data = ("--loss", "mse", "--data", "data.npz")
    steps = ("--epochs", "3", "--batch-size", "8", "--optimizer", "sgd", "--learning-rate", "0.5")
    result = shell("train", "net.onnx", *data, *steps, "-o", "trained.onnx")
    assert result.code == 0 and " runs" not in result.err, result.err
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (torch.stack([module(each[None]) for each in x]) - labels).square().mean().backward()
        optimizer.step()
    trained = onnx.load("trained.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in trained.graph.initializer}
    assert close(stored["first.bias"], module.first.bias) and close(stored["last.bias"], module.last.bias)
    assert not trained.graph.output[0].type.tensor_type.shape.dim
    assert shell("predict", "trained.onnx", "--data", "data.npz", "-o", "p.npz").code == 0
    (found,) = np.load("p.npz").values()
    np.testing.assert_allclose(found, [module(each[None]).item() for each in x], rtol=1e-4)


def test_inputs_whose_samples_meet_are_refused_unless_one_is_shared(shell: Shell) -> None:
    """A contrastive loss is one of all pairs; a fixed `--shape` says that all samples share an input."""
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[1, 3] a, float[1, 3] b) => (float[1, 1] y)
    <float[3, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9}> { h = MatMul(a, w) t = Transpose(b) y = MatMul(h, t) }"""
    onnx.save(parser.parse_model(text), "net.onnx")
    build = ("build", "net.onnx", "--loss", "mse", "-o", "train.onnx", "--shape", "a:n,3")
    refused = shell(*build)
    assert refused.code == 3 and refused.facts == ("refused", "MatMul_y", "MatMul")
    rng = np.random.default_rng(0)
    np.savez("data.npz", **{k: rng.standard_normal((8, 3)).astype("f") for k in "ab"}, label=np.ones((8, 1), "f"))
    train = shell("train", "net.onnx", "--loss", "mse", "--data", "data.npz", "-o", "trained.onnx")
    assert train.code == 2 and train.facts == ("conflict", "1", "MatMul_y", "MatMul")
    assert shell(*build, "--shape", "b:1,3").code == 0
    session = session_of("train.onnx")
    assert {value.name: value.shape for value in session.get_inputs()}["a"] == ["n", 3]


def test_normalization_in_training_mode_takes_the_statistics_of_the_free_batch(shell: Shell) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    onnx.save(export(module.eval(), (torch.zeros(1, 4),), ["x"]), "net.onnx")
    x, labels = samples((4,), 16)
    np.savez("data.npz", x=x.numpy(), label=labels.numpy())
    steps = ("--epochs", "3", "--batch-size", "16", "--optimizer", "sgd", "--learning-rate", "0.1")
    data = ("--loss", "cross-entropy", "--data", "data.npz", "--mode", "train")
    result = shell("train", "net.onnx", *data, *steps, "-o", "trained.onnx")
    assert result.code == 0, result.err
    optimizer = torch.optim.SGD(module.train().parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), labels).backward()
        optimizer.step()
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("trained.onnx").graph.initializer}
    named = {name: weight for name, weight in module.named_parameters() if name in stored}
    assert len(named) >= 4
    for name, weight in named.items():
        assert close(stored[name], weight), name


@pytest.mark.slow
def test_what_the_optimizer_of_onnxruntime_has_fused(shell: Shell) -> None:
    module, shape = module_of("encoder")
    model = export(module, (torch.zeros(1, *shape),), ["x"])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = "fused.onnx", 3
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    assert {node.domain for node in onnx.load("fused.onnx").graph.node} >= {"com.microsoft"}
    result = shell("build", "fused.onnx", "--loss", "cross-entropy", "--shape", "x:n,4,8", "-o", "train.onnx")
    assert result.code == 0 and PROVED in result.out, result.err
    x, labels = samples(shape, 5)
    found = results(session_of("train.onnx"), {"x": x.numpy(), "label": labels.numpy()})
    assert found["loss"] == pytest.approx(one_by_one(module, x, labels).item(), rel=1e-5)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(4, 6, num_layers=2), nn.Linear(6, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        found, (h, c) = self.layers(x, (h, c))
        return self.head(found[-1]), h, c


def test_the_batch_is_found_in_every_input_whichever_axis_it_is(shell: Shell) -> None:
    torch.manual_seed(0)
    module, state = Stateful().eval(), torch.zeros(2, 1, 6)
    model = export(module, (torch.zeros(5, 1, 4), state, state), ["x", "h", "c"])
    onnx.save(model, "net.onnx")
    result = shell("derive", "net.onnx", "--shape", "x:5,n,4", "--wrt", "x", "--option", "keep-outputs", "-o", "d.onnx")
    assert result.code == 0 and "proved" in result.out, result.err
    derived = onnx.load("d.onnx")
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in derived.graph.input}
    assert [shapes[name] for name in "xhc"] == [[5, "n", 4], [2, "n", 6], [2, "n", 6]]
    x, h, c = torch.randn(5, 3, 4, requires_grad=True), torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    outputs = module(x, h, c)
    sum(each.sum() for each in outputs).backward()  # type: ignore[union-attr]
    feeds: dict[str, Any] = {"x": x.detach().numpy(), "h": h.numpy(), "c": c.numpy()}
    added = [value for value in derived.graph.input if value.name not in feeds]
    feeds |= {value.name: np.ones(outputs[i].shape, np.float32) for i, value in enumerate(added)}
    session = session_of("d.onnx")
    found = results(session, feeds)
    assert x.grad is not None
    np.testing.assert_allclose(found["x_grad"], x.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_batch_of_four_becomes_one_of_three(shell: Shell) -> None:
    torch.manual_seed(0)
    module = Recurrent(nn.LSTM).eval()
    onnx.save(export(module, (torch.zeros(4, 5, 4),), ["x"]), "net.onnx")
    result = shell("build", "net.onnx", "--loss", "cross-entropy", "--shape", "x:3,5,4", "-o", "train.onnx")
    assert result.code == 0 and PROVED in result.out, result.err
    x, labels = samples((5, 4), 3)
    session = session_of("train.onnx")
    assert session.get_inputs()[0].shape == [3, 5, 4]
    loss = results(session, {"x": x.numpy(), "label": labels.numpy()})["loss"]
    assert loss == pytest.approx(nn.functional.cross_entropy(module(x), labels).item(), rel=1e-5)


MIXING = """<ir_version: 8, opset_import: ["": 17]> net (float[1, 4] x) => (float[1, 4] y)
<float[4, 4] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, 1, 0, 1, 2}, float[4] one = {1, 1, 1, 1},
 int64 zero = {0}> { h = MatMul(x, w) BODY }"""


@pytest.mark.parametrize(
    ("body", "node", "reason"),
    [
        ("m = ReduceMean<axes = [0]>(h) y = Sub(h, m)", "ReduceMean", "reduces along the axis of the samples"),
        ("y = Softmax<axis = 0>(h)", "Softmax", "works along the axis of the samples"),
        ("t = Transpose(h) u = MatMul(t, h) y = MatMul(h, u)", "MatMul", "contracts the axis of the samples"),
        (
            "y, a, b = BatchNormalization<training_mode = 1>(h, one, one, one, one)",
            "BatchNormalization",
            "training mode",
        ),
        ("y = CumSum(h, zero)", "CumSum", "works along the axis of the samples"),
        ("s = Concat<axis = 0>(h, x) y = ReduceMax<axes = [0]>(s)", "Concat", "works along the axis of the samples"),
        ("u = ReduceMax(h) y = Sub(h, u)", "ReduceMax", "reduces along the axis of the samples"),
        ("y = LpNormalization<axis = 0>(h)", "LpNormalization", "works along the axis of the samples"),
    ],
)
@pytest.mark.thinned(2)
def test_models_that_mix_samples_are_refused(shell: Shell, body: str, node: str, reason: str) -> None:
    onnx.save(parser.parse_model(MIXING.replace("BODY", body)), "net.onnx")
    result = shell("build", "net.onnx", "--loss", "mse", "--shape", "x:n,4", "-o", "train.onnx")
    assert result.code == 3 and not Path("train.onnx").exists()
    assert f"({node})" in result.err and reason in result.err, result.err
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.standard_normal((8, 4)).astype("f"), label=rng.standard_normal((8, 4)).astype("f"))
    train = ("train", "net.onnx", "--loss", "mse", "--data", "data.npz", "-o", "trained.onnx", "--epochs", "1")
    refused = shell(*train, "--batch-size", "4")
    assert refused.code == 2 and f"({node})" in refused.err
    alone = "--batch-size 1 and --accumulate 4"  # no advice where a variance is taken over the batch
    assert (alone in refused.err) == (node != "BatchNormalization"), refused.err
    one_by_one = shell(*train, "--batch-size", "1", "--accumulate", "4")
    assert one_by_one.code == (2 if node == "BatchNormalization" else 0), "one value has no variance"


def test_what_is_not_known_runs_one_by_one(shell: Shell) -> None:
    """A loop whose body reads samples: a step takes as many runs, and comes to what one by one gives."""
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[1, 2] x) => (float[1, 2] y)
    <float[2, 2] w = {0.5, -0.3, 0.2, 0.4}, int64 trips = {2}, bool go = {1}> {
        h = MatMul(x, w)
        y = Loop(trips, go, h) <body = b (int64 i, bool c, float[1, 2] v) => (bool d, float[1, 2] u)
            { d = Identity(c) s = Mul(v, h) u = Tanh(s) }>
    }"""
    onnx.save(parser.parse_model(text), "net.onnx")
    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal((8, 2)).astype("f") for name in ("x", "label")}
    np.savez("data.npz", **data)
    common = ("train", "net.onnx", "--loss", "mse", "--data", "data.npz", "--optimizer", "sgd", "--epochs", "2",
              "--learning-rate", "0.1")  # fmt: skip
    result = shell(*common, "--batch-size", "8", "-o", "trained.onnx")
    assert result.code == 0, result.err
    assert "(Loop)" in result.err and " 8 runs" in result.err
    weight = torch.tensor([[0.5, -0.3], [0.2, 0.4]], requires_grad=True)
    for _ in range(2):
        h = torch.from_numpy(data["x"]) @ weight
        loss = ((torch.tanh(torch.tanh(h * h) * h) - torch.from_numpy(data["label"])) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    found = numpy_helper.to_array(onnx.load("trained.onnx").graph.initializer[0])
    np.testing.assert_allclose(found, weight.detach().numpy(), rtol=1e-5)
    text = text.replace("h = MatMul(x, w)", "g = MatMul(x, w) h = BatchNormalization(g, one, one, one, one)")
    onnx.save(parser.parse_model(text.replace("int64 trips", "float[2] one = {1, 1}, int64 trips")), "normal.onnx")
    normal = shell(common[0], "normal.onnx", *common[2:], "--batch-size", "8", "-o", "other.onnx", "--mode", "train")
    assert normal.code == 2 and normal.facts == ("conflict", "1", "Loop_y", "BatchNormalization")
    assert "--accumulate" not in normal.err
    cosine = shell(*common, "--batch-size", "8", "-o", "other.onnx", "--schedule", "cosine")
    assert cosine.code == 2 and cosine.facts == ("conflict", "1", "Loop_y", "cosine")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("x:1,5", "axis 1 of 'x' has size 4 in the model, but 5 is given"),
        ("x:n,m", "axis 1 of 'x' has size 4 in the model, but m is given"),
        ("x:1,m", "the batch size 4 (axis 1 of 'x') can't be made symbolic"),
        ("x:n,n", "axis 1 of 'x' has size 4 in the model, but n is given"),
        ("x:n", "'x' has 2 dimensions, but 1 are given"),
    ],
)
def test_other_sizes_are_the_models(shell: Shell, shape: str, message: str) -> None:
    onnx.save(parser.parse_model(MIXING.replace("BODY", "y = Tanh(h)")), "net.onnx")
    result = shell("build", "net.onnx", "--loss", "mse", "--shape", shape, "-o", "train.onnx")
    assert result.code in (2, 3) and message in result.err, result.err


def test_a_symbolic_length_stays_beside_a_batch_that_is_freed(shell: Shell) -> None:
    """Sizes that the model computes at run time."""
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[1, length, 4] x) => (float[1, length, 4] y)
    <float[4, 4] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, 1, 0, 1, 2}, float[1, 1, 4] token = {1, -2, 0.5, 3},
     int64[1] heads = {2}, int64[1] half = {2}, int64[1] two = {2}, int64[1] start = {0}, int64[1] last = {-1}> {
        s = Shape(x) front = Slice(s, start, two) parts = Concat<axis = 0>(front, heads, half)
        h = MatMul(x, w) k = Reshape(h, parts) t = Transpose<perm = [0, 2, 1, 3]>(k)
        wide = Expand(token, s) u = Transpose<perm = [0, 2, 1, 3]>(t) v = Reshape(u, s) p = Softmax(v)
        y = Mul(p, wide)
    }"""
    onnx.save(parser.parse_model(text), "net.onnx")
    result = shell(
        "derive", "net.onnx", "--shape", "x:n,length,4", "--wrt", "x", "--option", "keep-outputs", "-o", "d.onnx"
    )
    assert result.code == 0 and "proved" in result.out, result.err
    original, derived = session_of("net.onnx"), session_of("d.onnx")
    x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype("f")
    feeds = {value.name: x for value in derived.get_inputs()}
    y = results(derived, feeds)["y"]
    np.testing.assert_allclose(y, np.concatenate([original.run(None, {"x": each[None]})[0] for each in x]), rtol=1e-5)


MASKED = """<ir_version: 8, opset_import: ["": 17]> net (float[1, 3, 4] x, int64[1, 3] mask) => (float[1, 4] y)
<int64[1, 1, 1, 3, 2] pairs = {0, 0, 0, 1, 0, 2}, int64[1, 3] flat = {0, -2, 2}, int64[2] rows = {1, 4},
 int64[1] last = {-1}, int64[1, 1] zero = {0}, float[4, 4] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, -1, 2, 3, 1, 0, 1, 2}> {
    shown = Cast<to = 9>(mask) BODY
}"""


@pytest.mark.parametrize(
    "body",
    [
        "k = GatherND(shown, pairs) f = Cast<to = 1>(k) t = Transpose<perm = [0, 2, 1]>(x) u = MatMul(x, t) "
        "s = Unsqueeze(u, last) r = Transpose<perm = [0, 3, 1, 2]>(s) m = Mul(r, f) p = Softmax(m) "
        "v = ReduceSum<keepdims = 0>(p, last) z = ReduceMax<axes = [1], keepdims = 0>(v) q = Unsqueeze(z, last) "
        "o = Mul(q, x) y = ReduceMax<axes = [1], keepdims = 0>(o)",
        "c = Flatten<axis = 2>(shown) k = Gather(c, flat) f = Cast<to = 1>(k) o = Mul(x, f) "
        "y = ReduceMax<axes = [1], keepdims = 0>(o)",
        "e = ArgMax<axis = 1, keepdims = 1>(mask) b = Concat<axis = 1>(zero, e) l = GatherND(x, b) y = MatMul(l, w)",
    ],
    ids=["GatherND", "flattened", "end of text"],
)
def test_indices_that_hold_the_number_of_the_only_sample(shell: Shell, body: str) -> None:
    """As Hugging Face's masks and CLIP have them: sample 0 of a batch of 1 becomes each sample's own number."""
    onnx.save(parser.parse_model(MASKED.replace("BODY", body)), "net.onnx")
    wrt = ("--wrt", "x", "--option", "keep-outputs")
    result = shell("derive", "net.onnx", "--shape", "x:n,3,4", *wrt, "-o", "d.onnx")
    assert result.code == 0, result.err
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 3, 4)).astype("f"), "mask": rng.integers(0, 2, (4, 3))}
    original, derived = session_of("net.onnx"), session_of("d.onnx")
    added = {value.name: np.ones((4, 4), np.float32) for value in derived.get_inputs() if value.name not in feeds}
    wanted = [original.run(None, {name: x[i : i + 1] for name, x in feeds.items()})[0] for i in range(4)]
    np.testing.assert_allclose(results(derived, feeds | added)["y"], np.concatenate(wanted), rtol=1e-5)


def test_indices_of_a_pool_count_through_the_batch(shell: Shell) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> net (float[1, 1, 4] x) => (float[1, 1, 2] y, int64[1, 1, 2] at)
    { y, at = MaxPool<kernel_shape = [2], strides = [2]>(x) }"""
    onnx.save(parser.parse_model(text), "net.onnx")
    result = shell("derive", "net.onnx", "--shape", "x:n,1,4", "-o", "d.onnx")
    assert result.code == 3 and result.facts == ("refused", "MaxPool_y", "MaxPool")


def test_a_negative_size_is_one_that_may_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """PaddlePaddle's exporter writes a batch of -1."""
    monkeypatch.chdir(tmp_path)
    save(MLP, Path("mlp.onnx"))
    model = onnx.load("mlp.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(model, "paddle.onnx")
    np.savez("data.npz", x=np.ones((40, 4), np.float32), label=np.zeros((40, 2), np.float32))
    shell = Shell(tmp_path, capsys)
    result = shell("inspect", "paddle.onnx", "--json")
    assert result.json["diagnosis"]["origin"]["inputs"] == {"x": "float[?, 4]"}
    assert result.json["diagnosis"]["origin"]["sizes"] == ["?"]
    trained = [shell("train", name, "--data", "data.npz", "--epochs", 2, "--threads", 1, "-o", f"t-{name}")
               for name in ("mlp.onnx", "paddle.onnx")]  # fmt: skip
    assert [done.code for done in trained] == [0, 0] and "-32" not in trained[1].err
    one, other = (onnx.load(f"t-{name}.onnx").graph.initializer for name in ("mlp", "paddle"))
    assert list(one) == list(other)
