"""Who has a network of several inputs and outputs, a loss of her own, and an output that is no tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser

from tests.cli_harness import Shell

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")

pytestmark = pytest.mark.slow
NET = """<ir_version: 10, opset_import: ["": 18]>
two (float[n, 4] left, float[n, 3] right) => (float[n, 3] cls, float[n, 1] reg, seq(float[n, 8]) kept) {
  both = Concat<axis = 1>(left, right) h = Gemm(both, w, b) a = Tanh(h)
  cls = MatMul(a, u) reg = MatMul(a, v) kept = SequenceConstruct(h, a) }"""
SHAPES = {"w": (7, 8), "b": (8,), "u": (8, 3), "v": (8, 1)}
FOCAL = '''
def focal(op, prediction, label: "class", *, gamma: float = 2.0):
    """Samples that are met well count less."""
    logs = op.LogSoftmax(prediction, axis=1)
    picked = op.squeeze(op.GatherElements(logs, op.unsqueeze(label, [1]), axis=1), [1])
    return -picked * op.Pow(1 - op.Exp(picked), gamma)
'''
LOSSES = ("--loss", "focal.py:focal:cls:kind", "--loss", "huber:reg:size:0.5", "--loss-option", "reg:delta=0.7")


def write() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    model = parser.parse_model(NET)
    for name, shape in SHAPES.items():
        values = random.standard_normal(shape).astype(np.float32) / 2
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, "two.onnx")
    Path("focal.py").write_text(FOCAL)
    left, right = (random.standard_normal((400, size)).astype(np.float32) for size in (4, 3))
    kind = np.digitize(left[:, 0] + right[:, 0], [-0.7, 0.7])
    data = {"left": left, "right": right, "kind": kind, "size": np.tanh(left[:, 1:2] - right[:, 1:2])}
    np.savez("data.npz", **data)
    return data


def test_two_losses_of_which_one_is_her_own(shell: Shell) -> None:
    """Gradients beside PyTorch; trained, and measured by output as scikit-learn measures."""
    data = write()
    done = shell("build", "two.onnx", *LOSSES, "--loss-option", "cls:gamma=1.5", "-o", "train.onnx")
    assert done.code == 0, done.err
    few = {name: array[:16] for name, array in data.items()}
    session = onnxruntime.InferenceSession("train.onnx")
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(names, few), strict=True))
    weights = {
        t.name: torch.tensor(numpy_helper.to_array(t), requires_grad=True)
        for t in onnx.load("two.onnx").graph.initializer
    }
    given = {name: torch.tensor(array) for name, array in few.items()}
    a = torch.tanh(torch.cat([given["left"], given["right"]], 1) @ weights["w"] + weights["b"])
    picked = torch.log_softmax(a @ weights["u"], 1).gather(1, given["kind"][:, None])
    own = (-picked * (1 - picked.exp()) ** 1.5).mean()
    loss = own + 0.5 * torch.nn.functional.huber_loss(a @ weights["v"], given["size"], delta=0.7)
    loss.backward()
    assert float(found["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(found[f"{name}_grad"], weight.grad, rtol=1e-4, atol=1e-6)

    metrics = ("--metric", "accuracy:cls", "--metric", "rmse:reg")
    train = ("--val", "0.25", "--epochs", "25", "--learning-rate", "0.02", *metrics)
    done = shell("train", "two.onnx", "--data", "data.npz", *LOSSES, *train, "-o", "trained.onnx")
    assert done.code == 0, done.err
    measured = shell("evaluate", "trained.onnx", "--data", "data.npz", *LOSSES, *metrics, "--json")
    assert measured.code == 0, measured.err
    inputs = {name: data[name] for name in ("left", "right")}
    cls, reg = onnxruntime.InferenceSession("trained.onnx").run(["cls", "reg"], inputs)
    wanted = sklearn.accuracy_score(data["kind"], cls.argmax(1)), sklearn.root_mean_squared_error(data["size"], reg)
    assert wanted[0] > 0.9 and wanted[1] < 0.2
    results = measured.json["results"]
    assert (results["accuracy:cls"], results["rmse:reg"]) == pytest.approx(wanted, rel=1e-5)
    assert [value.name for value in onnx.load("trained.onnx").graph.output] == ["cls", "reg", "kept"]
