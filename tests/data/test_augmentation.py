"""Samples that change at random: pictures, and a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli.data import (
    BatchShard,
    SampleOptions,
)
from onnxgrad_cli.data.augmentation import augmentations
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.test_preprocessing import INT64, PICTURES, PORTS, opened, pixels, ready, to_csv
from tests.facts import raises

random = np.random.default_rng(0)


NAMES = ["pear", "apple", "fig"] * 4


def test_pictures_are_flipped_and_moved_alike_again(tmp_path: Path) -> None:
    data, _ = ready(opened(pixels(tmp_path), PICTURES), PICTURES, augment=("flip", "crop"))
    plain = data.batch(np.arange(12))["x"]
    parts = [BatchShard(np.arange(12), 12, epoch, 0) for epoch in (0, 0, 1)]
    first, again, other = (data.batch(part.indices, part)["x"] for part in parts)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != plain).any()
    halves = [BatchShard(np.arange(start, start + 6), 12, 0, start) for start in (0, 6)]  # of two ranks
    np.testing.assert_array_equal(first, np.concatenate([data.batch(part.indices, part)["x"] for part in halves]))
    for row in range(12):
        assert _is_moved(first[row], plain[row])


def _is_moved(found: np.ndarray, picture: np.ndarray) -> bool:
    """Whether a picture is another one, flipped or not, moved by at most 2 and 1 with black behind it."""
    for source in (picture, picture[:, :, ::-1]):
        room = np.pad(source, [(0, 0), (2, 2), (1, 1)])
        for down in range(5):
            for right in range(3):
                if (found == room[:, down : down + 16, right : right + 8]).all():
                    return True
    return False


def test_changes_that_labels_would_have_to_follow_are_refused(tmp_path: Path) -> None:
    masks = {"y": tensor_type(INT64, ["n", 16, 8])}
    with raises(UsageError, "wrong_shape", "augment", "y", "int64", "16", "8"):
        augmentations(("flip",), {"x": PICTURES["x"]}, masks, 0)
    with raises(UsageError, "wrong_shape", "augment", "x", "3"):
        augmentations(("flip",), {"x": PORTS["x"]}, {}, 0)


def test_a_function_changes_batches_and_draws_in_training_alone(tmp_path: Path) -> None:
    def noisy(batch: dict[str, np.ndarray], draw: np.random.Generator | None) -> dict[str, np.ndarray]:
        noise = 0 if draw is None else draw.normal(size=batch["x"].shape)
        return {**batch, "x": batch["x"] + noise}

    data, _ = ready(opened(to_csv(tmp_path / "a.csv", NAMES)), transform=noisy)
    part = BatchShard(np.arange(12), 12, 1, 0)
    np.testing.assert_array_equal(data.batch(part.indices, part)["x"], data.batch(part.indices, part)["x"])
    assert (data.batch(part.indices, part)["x"] != data.batch(part.indices)["x"]).any()
    assert data.batch(part.indices, part)["x"].dtype == np.float32
    assert data.prepared_by(SampleOptions()) != opened(data.source).prepared_by(SampleOptions())


WRONG: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "an error": (lambda batch: batch["z"], ("usage", "transform", "KeyError", "z")),
    "nothing": (lambda batch: None, ("wrong_value", "transform", "NoneType")),
    "too little": (lambda batch: {"x": batch["x"]}, ("wrong_value", "transform")),
    "fewer samples": (
        lambda batch: {**batch, "x": batch["x"][1:]},
        ("wrong_shape", "transform", "x", "2", "3", "1", "3"),
    ),
    "another rank": (
        lambda batch: {**batch, "x": batch["x"][..., None]},
        ("wrong_shape", "transform", "x", "2", "3", "2", "3", "1"),
    ),
    "floats for classes": (
        lambda batch: {**batch, "y": batch["y"] * 0.5},
        ("wrong_type", "transform", "y", "float64", "int64"),
    ),
    "three arguments": (lambda batch, draw, more: batch, ("wrong_value", "transform", "3")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_is_wrong_is_told_before_the_first_step(tmp_path: Path, case: str) -> None:
    function, said = WRONG[case]
    with raises(UsageError, *said):
        ready(opened(to_csv(tmp_path / "a.csv", NAMES)), transform=function)
