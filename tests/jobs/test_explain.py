"""`onnxgrad explain`: the files that are written, and what they contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli import Method, UsageError, run_explain
from onnxgrad_cli.jobs.explain import Explained
from tests.cli_harness import Shell, save, save_mlp_and_data
from tests.facts import raises

PICTURES = """
<ir_version: 8, opset_import: ["": 17]>
g (float[n, 3, 8, 8] x, float[n, 2] side) => (float[n, 3] y)
{ h = GlobalAveragePool(x) f = Flatten(h) s = ReduceSum(side) y = Mul(f, s) }
"""


@pytest.fixture
def folder(shell: Shell) -> Path:
    save_mlp_and_data()
    return shell.folder


def test_arrays_are_those_of_the_result(folder: Path) -> None:
    found = run_explain("mlp.onnx", "data.npz", "a.npz", sample=[3, 5], verify=False)
    arrays = np.load("a.npz")
    assert set(arrays) == {"attributions", "samples", "classes", "scores"} and found.files == [Path("a.npz")]
    np.testing.assert_array_equal(arrays["attributions"], found.values)
    np.testing.assert_array_equal(arrays["samples"], [3, 5])
    np.testing.assert_array_equal(arrays["classes"], found.classes)
    np.testing.assert_array_equal(arrays["scores"], found.scores)
    run_explain("mlp.onnx", "data.npz", "a.npy", sample=[3, 5], verify=False)
    np.testing.assert_array_equal(np.load("a.npy"), found.values)


@pytest.mark.parametrize(
    ("out", "more", "expected"),
    [
        ("p.png", {}, ("conflict", "p.png")),
        ("p.html", {}, ("conflict", "p.html")),
        (None, {"method": Method("grad-cam"), "wrt": "x"}, ("conflict", "wrt")),
    ],
)
def test_what_can_not_be_shown(out: str | None, more: dict[str, Any], expected: tuple[str, ...], folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run_explain("mlp.onnx", "data.npz", out, verify=False, **more)
    assert caught.value.code == expected[0] and all(
        name in str(caught.value) or name == "layer" for name in expected[1:]
    )
    assert not Path("p.png").exists() and not Path("p.html").exists()


def test_a_picture_needs_the_attributions_of_pixels(folder: Path) -> None:
    save(PICTURES, folder / "pictures.onnx")
    rng = np.random.default_rng(0)
    x = rng.random((2, 3, 8, 8)).astype(np.float32)
    np.savez("p.npz", x=x, side=np.ones((2, 2), np.float32))
    with raises(UsageError, "wrong_shape", "p.png", "1", "2"):
        run_explain("pictures.onnx", "p.npz", "p.png", wrt="side", verify=False)
    assert run_explain("pictures.onnx", "p.npz", "p.png", wrt="x", verify=False).files == [Path("p.png")]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_pixels_and_tokens_have_one_attribution() -> None:
    values = np.float32([[[[1, -2]], [[-3, 1]]]])  # a sample, two channels, a row of two pixels
    one = {"samples": np.r_[0], "classes": np.r_[1], "scores": np.r_[0.5]}
    summed = Explained("occlusion", "", values, **one)
    largest = Explained("saliency", "", values, **one)
    np.testing.assert_array_equal(summed.of_places(1), [[[-2, -1]]])
    np.testing.assert_array_equal(largest.of_places(1), [[[3, 2]]])
    np.testing.assert_array_equal(summed.of_places(None), values)
    assert summed.of_tokens() is None


def test_tokens_without_their_padding() -> None:
    values = np.float32([[[1, 2], [3, 4], [5, 6]]])
    one = {"samples": np.r_[0], "classes": np.r_[1], "scores": np.r_[0.5]}
    tokens, lengths = np.int64([[7, 8, 0]]), np.r_[2]
    plain = Explained("occlusion", "", values, **one, tokens=tokens, lengths=lengths)
    named = Explained("occlusion", "", values, **one, tokens=tokens, lengths=lengths, texts=[["a", "b"]])
    assert [(t.number, t.text, t.attribution) for t in (plain.of_tokens() or [])[0]] == [(7, "7", 3.0), (8, "8", 7.0)]
    assert [(t.number, t.text, t.attribution) for t in (named.of_tokens() or [])[0]] == [(7, "a", 3.0), (8, "b", 7.0)]


def test_the_name_of_a_class() -> None:
    def name(classes: np.ndarray, **more: Any) -> str:
        zero = np.zeros(1)
        return Explained("saliency", "", zero, samples=zero, classes=classes, scores=zero, **more).name_of(0)

    assert name(np.r_[1], names=("cat", "dog")) == "dog" and name(np.r_[2], names=("cat", "dog")) == "2"
    assert name(np.r_[1], alone=True) == "score" and "each" in name(np.int64([[1, 2]]))
