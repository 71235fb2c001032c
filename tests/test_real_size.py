"""BERT-base and ResNet-50 at their real size, on two threads, against PyTorch's float64 autograd.

Stock onnxruntime has faults that only large shapes and several threads show (lost updates of scattered sums,
blocked kernels), so the runs are repeated, and each must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks import models
from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options

torch = pytest.importorskip("torch", reason="PyTorch is the source these gradients are compared with")

pytestmark = [pytest.mark.slow, pytest.mark.long]
RUNS = 3


def _ids() -> Any:
    return torch.randint(0, 30522, (2, 128), generator=torch.Generator().manual_seed(1))


def _images() -> Any:
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("make", "example", "name"),
    [(models.bert_base, _ids, "ids"), (models.resnet50, _images, "x")],
    ids=["bert_base", "resnet50"],
)
def test_gradients_at_real_size(make: Callable[[], Any], example: Callable[[], Any], name: str, tmp_path: Path) -> None:
    module, x = make(), example()
    path = models.export(module, x, tmp_path / "model.onnx", name)
    with torch.no_grad():
        target = torch.randn_like(module(x))
    model = build(onnx.load(path), Options(losses=(LossSpec("mse"),), label="target")).model
    onnx.save(model, tmp_path / "train.onnx")
    trained = [o.name.removesuffix("_grad") for o in model.graph.output if o.name.endswith("_grad")]
    del model

    module = module.double()
    prediction = module(x.double() if x.is_floating_point() else x)
    loss = torch.nn.functional.mse_loss(prediction, target.double())
    loss.backward()
    expected = {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}
    expected_loss = float(loss.detach())
    del module, prediction, loss

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(tmp_path / "train.onnx", options, providers=["CPUExecutionProvider"])
    feeds = {name: x.numpy(), "target": target.numpy()}
    largest = max(np.abs(g).max() for g in expected.values())
    names = [n for n in expected if n in trained]
    unnamed = [n for n in expected if n not in trained]  # the exporter renames transposed weights
    assert len(names) + len(unnamed) == len(expected)
    assert len(trained) == len(expected)
    for _ in range(RUNS):
        result = session.run(["loss", *(f"{n}_grad" for n in names)], feeds)
        assert abs(result[0] - expected_loss) <= 1e-5 * abs(expected_loss)
        for weight, got in zip(names, result[1:], strict=True):
            reference = expected[weight]
            error = np.abs(got - reference).max() / max(np.abs(reference).max(), 1e-4 * largest)
            assert error <= 1e-4, f"{weight}: {error:.1e}"
    assert not unnamed, f"no gradient found under the names of {unnamed}"
