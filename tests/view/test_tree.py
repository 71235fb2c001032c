"""The tree beside a drawing holds every box once."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onnxgrad_cli.view import Drawing, draw
from onnxgrad_cli.view.tree import WIDEST, tree
from tests.view.test_html_drawing import chain, training, walk

SAMPLES = Path(__file__).parents[2] / "sample_models"


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    """The samples, a training model, and chains with and without modules."""
    models = [onnx.load(path) for path in sorted(SAMPLES.glob("*.onnx"))]
    return list(map(draw, [*models, training("digits_cnn"), chain(700), chain(700, scoped=True)]))


def test_every_box_stands_in_the_tree_once(drawings: list[Drawing]) -> None:
    for drawing in drawings:
        branches = walk(tree(drawing))
        assert sorted(b.box.key for b in branches if b.box) == sorted(drawing.boxes)
        assert max(len(branch.children) for branch in branches) <= WIDEST
        assert all(branch.children for branch in branches if not branch.box)
