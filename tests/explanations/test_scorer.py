"""The class whose score is explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from tests.cli_harness import Shell
from tests.explanations import nets
from tests.explanations.test_attributions import CLOSE, explained

X = nets.samples()


LABELS = np.array([3, 0, 4, 1, 1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.save(tmp_path_factory.mktemp("net"), y=LABELS)


def test_the_class_stays_that_of_the_sample_on_the_way_from_the_baseline(files: tuple[Path, Path]) -> None:
    scores = nets.Twin()(torch.tensor(np.stack([*X, np.zeros_like(X[0])]))).detach().numpy()
    best = scores[:5].argmax(1)
    assert (best != scores[5].argmax()).any()
    found = explained(files, "integrated-gradients", "argmax", steps=200)
    np.testing.assert_allclose(found.values.sum((1, 2, 3)), scores[range(5), best] - scores[5, best], atol=2e-3)


def test_a_single_number_is_no_class(shell: Shell, tmp_path: Path) -> None:
    weights = np.float32([[0.5], [-2.0], [3.0]])
    text = '<ir_version: 10, opset_import: ["" : 21]> price (float[n,3] x) => (float[n,1] y) {y = MatMul(x, w)}'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "price.onnx")
    np.savez(tmp_path / "d.npz", x=np.float32([[1, 2, 3], [4, 5, 6]]))
    said = shell("explain", "price.onnx", "--data", "d.npz", "-o", "a.npy").out
    assert "of 'y' with respect to 'x'" in said
    assert "class" not in said
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), np.abs(weights.T).repeat(2, 0), **CLOSE)
