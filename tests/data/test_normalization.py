"""Normalization of data: by their own statistics, by ImageNet's, or by given numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from onnxgrad_cli.data import (
    held_out,
)
from onnxgrad_cli.data.normalization import IMAGENET, Normalization
from onnxgrad_cli.data.preprocessing import INPUTS, Preprocessing
from onnxgrad_cli.errors import OnnxgradError, UsageError
from tests.data.test_preprocessing import PICTURES, X, opened, pixels, ready, to_csv
from tests.facts import raises, raises_as

random = np.random.default_rng(0)


NAMES = ["pear", "apple", "fig"] * 4


def test_auto_is_of_the_training_data_alone_and_exact_far_from_zero(tmp_path: Path) -> None:
    data = opened(to_csv(tmp_path / "a.csv", NAMES), normalize=("auto",))
    rest, kept = held_out(data, 0.25)
    training, validation = ready(rest, val=kept, normalize=("auto",))
    raw = np.concatenate(list(training.column("x")))
    wanted = (X - raw.mean(0)) / raw.std(0)
    for part in (training, validation):
        found = part.batch(np.arange(len(part)))["x"]
        np.testing.assert_allclose(found, wanted[part.rows(np.arange(len(part)))], rtol=1e-5, atol=1e-6)
    assert abs(training.batch(np.arange(9))["x"].mean()) < 1e-6
    assert training.normal == validation.normal


def test_imagenet_is_what_torchvision_does(tmp_path: Path) -> None:
    """ToTensor and Normalize of torchvision, written out in torch."""
    path = pixels(tmp_path)
    data, _ = ready(opened(path, PICTURES, normalize=("imagenet",)), PICTURES, normalize=("imagenet",))
    tensor = torch.tensor(np.load(path)["x"]).to(torch.float32).div(255)
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in IMAGENET)
    np.testing.assert_array_equal(data.batch(np.arange(12))["x"], ((tensor - mean) / std).numpy())


def test_auto_of_pictures_is_by_channel(tmp_path: Path) -> None:
    path = pixels(tmp_path)
    data, _ = ready(opened(path, PICTURES, normalize=("auto",)), PICTURES, normalize=("auto",))
    found = data.batch(np.arange(12))["x"]
    np.testing.assert_allclose(found.mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(found.std((0, 2, 3)), 1, rtol=1e-6)


def test_numbers_that_are_given(tmp_path: Path) -> None:
    path = to_csv(tmp_path / "a.csv", NAMES)
    for text in ("1/2", "x:1/2", "1,1,1/2,2,2", "1/2,2,2"):
        data, _ = ready(opened(path, normalize=(text,)), normalize=(text,))
        np.testing.assert_allclose(data.batch(np.arange(12))["x"], ((X - 1) / 2).astype(np.float32), rtol=1e-6)
    data, _ = ready(opened(path, normalize=("none",)), normalize=("none",))
    np.testing.assert_array_equal(data.batch(np.arange(12))["x"], X.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("imagenet", ("wrong_shape", "normalize", "3", "x", "3")),
        ("0", ("wrong_value", "normalize", "0")),
        ("1/0", "means must be finite, deviations finite and above 0"),
        ("1/nan", "means must be finite, deviations finite and above 0"),
        ("1,2/3,4", "'1,2/3,4' has 2 numbers"),
        ("z:auto", ("unknown_name", "normalize", "z")),
        ("y:auto", ("unknown_name", "normalize", "y")),
    ],
)
def test_a_normalization_that_does_not_fit_is_told(tmp_path: Path, text: str, said: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, said):
        ready(opened(to_csv(tmp_path / "a.csv", NAMES)), normalize=(text,))


def test_imagenet_is_not_done_twice_nor_to_numbers_beyond_one(tmp_path: Path) -> None:
    path = pixels(tmp_path, np.float32)
    with raises(UsageError, "wrong_value", "normalize", "x", "0", "255", "0", "1"):
        ready(opened(path, PICTURES), PICTURES, normalize=("imagenet",))


def test_a_column_that_never_changes_keeps_its_scale(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[7.0, 1, 2], [7, 3, 4]]), y=np.arange(2))
    data, _ = ready(opened(tmp_path / "a.npz", normalize=("auto",)), normalize=("auto",))
    np.testing.assert_array_equal(data.batch(np.arange(2))["x"], [[0, -1, -1], [0, 1, 1]])


@pytest.mark.parametrize("axis", [1, 3])
def test_a_normalization_of_a_strangers_model_that_does_not_fit(axis: int) -> None:
    """Nobody has typed it."""
    known = Normalization.of_json({"scale": 1, "mean": [0, 0], "std": [1, 1], "axis": axis})
    with raises(UsageError, "wrong_shape", "2", str(axis), "5", "4"):
        known(np.zeros((5, 4), np.float32))


def test_a_normalization_by_no_number_is_told() -> None:
    said = {"x": {"scale": 1, "mean": [10**400], "std": [1], "axis": None}}
    with raises(OnnxgradError, "unreadable_file"):
        Preprocessing.of_json({INPUTS: json.dumps(said)}, "the model")
