"""The port of onnxruntime-training's notebook: its blocks run on digits in the form of MNIST, beside PyTorch."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from tests.docs.test_pages import PAGES, run_in_turn

datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
PAGE = "tutorials/mnist.md"
HEADINGS = [
    "Importing libraries", "1 - Offline Step", "Generating forward only graph", "2 - Data Preparation",
    "3 - Initialize Module and Optimizer", "4 - Run Training and Testing Loops", "5 - Run Inferencing",
]  # fmt: skip
"""The notebook's own."""


def write_mnist(path: Path) -> None:
    """Digits of 8 x 8, drawn three times as large on 28 x 28."""
    digits = datasets.load_digits()
    pictures = np.pad(np.kron(digits.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(pictures))
    images, labels = (pictures * 255 / 16).astype(np.uint8)[order], digits.target.astype(np.uint8)[order]
    np.savez(path, x_train=images[:1400], y_train=labels[:1400], x_test=images[1400:], y_test=labels[1400:])


def test_the_steps_are_those_of_the_notebook() -> None:
    text = PAGES[PAGE].read_text(encoding="utf-8")
    assert re.findall(r"^##+ (.*)$", text, re.MULTILINE) == [*HEADINGS, "What differs"]


@pytest.mark.slow
def test_every_block_runs_and_trains_as_pytorch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "mnist.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        names = run_in_turn(PAGE)
    assert names["test"](5) > 0.9
    (logits,) = names["output"]
    batch = next(names["test_loader"]())[0]
    twin = trained_by_pytorch(copy.deepcopy(names["pt_model"]), names)
    np.testing.assert_allclose(logits, twin(torch.tensor(batch[:1])).detach().numpy(), rtol=1e-3, atol=1e-3)
    (whole,) = onnxruntime.InferenceSession("data/inference_model.onnx").run(None, {"input": batch})
    assert np.mean(whole.argmax(1) == twin(torch.tensor(batch)).argmax(1).numpy()) > 0.995


def trained_by_pytorch(net: torch.nn.Module, names: dict[str, object]) -> torch.nn.Module:
    """The same five epochs, with the defaults that onnxruntime-training's AdamW had."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, eps=1e-6, weight_decay=0.0)
    loader: object = names["train_loader"]
    for _ in range(5):
        for data, target in loader():  # type: ignore[operator]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(torch.tensor(data)), torch.tensor(target)).backward()
            optimizer.step()
    return net
