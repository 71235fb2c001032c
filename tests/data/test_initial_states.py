"""Inputs with the batch on another axis than the first, and initial states of recurrent networks, beside PyTorch."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn

from onnxgrad_cli.data.initial_states import recurrent_values
from tests.cli_harness import Shell, save


def test_a_deep_residual_network_before_a_layer_is_walked_once() -> None:
    """Each block doubles the number of paths."""
    blocks = " ".join(f"t{i} = Tanh(x{i}) x{i + 1} = Add(x{i}, t{i})" for i in range(60))
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[6, N, 3] x0, float[1, N, 4] h) => (float[6, 1, N, 4] y)
        {{ {blocks} s = Identity(h) y = GRU<hidden_size = 4>(x60, w, u, , , s) }}""")
    found = recurrent_values(model.graph.node)
    assert found.states == {"s", "h"}
    assert {"x0", "x60"} <= found.sequences and "w" not in found.sequences


def test_a_sequence_that_is_transposed_or_has_its_batch_first_is_none() -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 6, 3] x, float[N, 6, 3] z) => (float[6, 1, N, 4] y, float[N, 6, 1, 4] v)
        { t = Transpose<perm = [1, 0, 2]>(x) y = GRU<hidden_size = 4>(t, w, u)
          v = GRU<hidden_size = 4, layout = 1>(z, w, u) }""")
    assert recurrent_values(model.graph.node).sequences == {"t"}


SAMPLES, STEPS, WIDTH, HIDDEN = 20, 6, 3, 5


ORDER = np.random.Generator(np.random.PCG64((0, 0))).permutation(SAMPLES)


class Network(nn.Module):
    """A recurrent layer whose states are inputs, and a line on its last output."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM], batch_first: bool) -> None:
        super().__init__()
        self.layers = kind(WIDTH, HIDDEN, num_layers=2, batch_first=batch_first)
        self.line = nn.Linear(HIDDEN, 2)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers(x, states if len(states) > 1 else states[0])
        return self.line(y[:, -1] if self.layers.batch_first else y[-1])


def export(kind: type[nn.GRU] | type[nn.LSTM], batch_first: bool) -> Network:
    torch.manual_seed(0)
    network = Network(kind, batch_first)
    names = ["h", "c"] if kind is nn.LSTM else ["h"]
    x = torch.zeros((4, STEPS, WIDTH) if batch_first else (STEPS, 4, WIDTH))
    axes = {"x": {0: "batch"} if batch_first else {0: "time", 1: "batch"}, "y": {0: "batch"}}
    torch.onnx.export(
        network, (x, *(torch.zeros(2, 4, HIDDEN) for _ in names)), "net.onnx", input_names=["x", *names],
        output_names=["y"], dynamic_axes={**axes, **{name: {1: "batch"} for name in names}}, dynamo=False,
    )  # fmt: skip
    return network


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def arrays(kind: type[nn.GRU] | type[nn.LSTM], batch_first: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, STEPS, WIDTH) if batch_first else (STEPS, SAMPLES, WIDTH))
    states = {name: rng.standard_normal((2, SAMPLES, HIDDEN)) for name in (("h", "c") if kind is nn.LSTM else ("h",))}
    found = {"x": x, **states, "label": rng.standard_normal((SAMPLES, 2))}
    return {name: array.astype(np.float32) for name, array in found.items()}


TRAIN = ("train", "net.onnx", "--data", "data.npz", "--loss", "mse", "--optimizer", "sgd", "--lr", "0.1", "--epochs",
         "1", "--batch-size", "8", "--threads", "1")  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "batch_first"), [(nn.GRU, True), (nn.LSTM, True), (nn.LSTM, False)])
def test_states_of_each_sample_are_those_of_pytorch(
    shell: Shell, kind: type[nn.GRU] | type[nn.LSTM], batch_first: bool
) -> None:
    network, data = export(kind, batch_first), arrays(kind, batch_first)
    np.savez("data.npz", **data)
    tensors = {name: torch.tensor(array) for name, array in data.items()}
    inputs = [name for name in tensors if name != "label"]
    wanted = network(*(tensors[name] for name in inputs))

    assert shell("predict", "net.onnx", "--data", "data.npz", "--batch-size", "8", "-o", "p.npz").code == 0
    np.testing.assert_allclose(np.load("p.npz")["y"], wanted.detach().numpy(), atol=1e-5)
    evaluated = shell("evaluate", "net.onnx", "--data", "data.npz", "--loss", "mse", "--json")
    loss = nn.functional.mse_loss(wanted, tensors["label"]).item()
    np.testing.assert_allclose(evaluated.json["results"]["loss"], loss, rtol=1e-5)

    result = shell(*TRAIN, "-o", "t.onnx")
    assert result.code == 0, result.err
    steps = torch.optim.SGD(network.parameters(), lr=0.1)
    for start in range(0, SAMPLES, 8):
        batch = ORDER[start : start + 8]
        steps.zero_grad()
        fed = [tensors[name][batch] if batch_first and name == "x" else tensors[name][:, batch] for name in inputs]
        nn.functional.mse_loss(network(*fed), tensors["label"][batch]).backward()
        steps.step()
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("t.onnx").graph.initializer}
    np.testing.assert_allclose(found["line.weight"], network.line.weight.detach().numpy(), atol=1e-5)
    assert shell("predict", "t.onnx", "--data", "data.npz", "-o", "q.npz").code == 0
    trained = network(*(tensors[name] for name in inputs)).detach().numpy()
    np.testing.assert_allclose(np.load("q.npz")["y"], trained, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_states_are_zero_where_data_hold_none(shell: Shell) -> None:
    export(nn.LSTM, True)
    data = arrays(nn.LSTM, True)
    zeros = {name: np.zeros_like(data[name]) for name in ("h", "c")}
    np.savez("data.npz", **{**data, **zeros})
    given = shell(*TRAIN, "-o", "given.onnx")
    assert given.code == 0 and "c, h" not in given.err, given.err
    np.savez("data.npz", **{name: array for name, array in data.items() if name not in zeros})
    result = shell(*TRAIN, "--val", "0.2", "-o", "val.onnx")
    assert result.code == 0 and "c, h" in result.err, result.err
    assert shell(*TRAIN, "-o", "t.onnx").code == 0
    assert Path("t.onnx").read_bytes() == Path("given.onnx").read_bytes()
    for command in (("evaluate", "t.onnx", "--loss", "mse"), ("predict", "t.onnx", "-o", "p.npz")):
        result = shell(*command, "--data", "data.npz")
        assert result.code == 0 and "c, h" in result.err, result.err


@pytest.mark.filterwarnings("ignore")
def test_states_in_another_layout_are_refused(shell: Shell) -> None:
    export(nn.GRU, True)
    data = arrays(nn.GRU, True)
    np.savez("data.npz", **{**data, "h": data["h"].swapaxes(0, 1)})
    result = shell(*TRAIN, "-o", "t.onnx")
    assert result.facts == ("wrong_shape", "data.npz", "h", "20", "2", "5", "2", "5"), result.err
    assert "numpy.moveaxis(array, 0, 1)" in result.err


@pytest.mark.filterwarnings("ignore")
def test_an_input_that_is_no_state_must_be_there(shell: Shell) -> None:
    export(nn.LSTM, False)
    data = arrays(nn.LSTM, False)
    np.savez("data.npz", h=data["h"], c=data["c"], label=data["label"])
    result = shell(*TRAIN, "-o", "t.onnx")
    assert result.facts[:3] == ("missing_value", "data.npz", "x"), result.err


RNG = np.random.default_rng(8)


MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[{batch}, 3] x, float[2, {batch}, 3] state) => (float[{batch}, 2] y)
<float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, int64[1] first = {{0}}> {{
  s = ReduceSum<keepdims = 0>(state, first)
  a = Add(x, s)
  y = MatMul(a, w)
}}"""


def test_one_sample_beside_a_state_is_a_sample(shell: Shell) -> None:
    """Both arrays have the shapes that the model declares, and only the first size of one of them is 1."""
    save(MODEL.format(batch="1"), shell.folder / "model.onnx")
    x, state = (np.float32(RNG.standard_normal(shape)) for shape in ((1, 3), (2, 1, 3)))
    np.savez(shell.folder / "data.npz", x=x, state=state)
    assert shell("predict", "model.onnx", "--data", "data.npz", "-o", "y.npz").code == 0
    w = np.array([[1, 2], [3, 4], [5, 6]])
    np.testing.assert_allclose(np.load("y.npz")["y"], (x + state.sum(0)) @ w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "samples"), [("1", 1), ("1", 3), ("", 4)])
def test_one_state_is_fed_with_each_batch(batch: str, samples: int, shell: Shell) -> None:
    """Of one sample, a step of plain gradient descent is compared with the formula."""
    save(MODEL.format(batch=batch or "?"), shell.folder / "model.onnx")
    x, label = (np.float32(RNG.standard_normal((samples, size))) for size in (3, 2))
    state = np.float32(RNG.standard_normal((2, 1, 3)))
    np.savez(shell.folder / "data.npz", x=x, label=label, state=state)
    step = ("--optimizer", "sgd", "--learning-rate", "0.1", "--epochs", "1", "--batch-size", batch or samples)
    result = shell("train", "model.onnx", "--loss", "mse", "--data", "data.npz", *step, "-o", "trained.onnx")
    assert result.code == 0, result.err
    session = onnxruntime.InferenceSession("trained.onnx")
    y = np.concatenate([session.run(None, {"x": row[None], "state": state})[0] for row in x])
    result = shell("evaluate", "trained.onnx", "--loss", "mse", "--data", "data.npz", "--batch-size", 1, "--json")
    assert result.code == 0, result.err
    np.testing.assert_allclose(result.json["results"]["loss"], np.mean((y - label) ** 2), rtol=1e-4)
    w, a = np.array([[1, 2], [3, 4], [5, 6]], np.float32), x + state.sum(0)
    if batch != "1" or samples == 1:
        stepped = w - 0.1 * a.T @ (2 * (a @ w - label) / label.size)
        np.testing.assert_allclose(y, a @ stepped, rtol=1e-4, atol=1e-5)
