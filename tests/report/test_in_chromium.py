"""The reports as pages in Chromium: of models of three sizes and of a training, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from onnxgrad_cli import Course, LossSpec, Options, run_build, run_train
from tests.view.test_html_drawing import SAMPLES, chain
from tests.web import javascript

LOOK = Path(__file__).parent / "look.mjs"
CLASSES = Options(losses=(LossSpec("cross-entropy"),), label="y")


def build_of(count: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        onnx.save(chain(count, scoped=count > 10), folder / "m.onnx")
        run_build(folder / "m.onnx", folder / "t.onnx", reports=[folder / "r.html"], verify=False)
        return folder / "r.html"

    return make


def a_training(folder: Path) -> Path:
    course = Course(epochs=2, metrics=("accuracy",), prefix="train_")
    run_train(SAMPLES / "digits_cnn.onnx", SAMPLES / "digits.npz", folder / "t.onnx", CLASSES, course, val=0.2)
    return folder / "t.onnx.run" / "report.html"


PAGES = {"10": build_of(10), "700": build_of(700), "20000": build_of(20_000), "training": a_training}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "20000" else ()) for name in PAGES]
)
def test_the_report_in_chromium(name: str, tmp_path: Path) -> None:
    """It opens in under 3 seconds, fits a telephone, scrolls within its long tables, and its links lead somewhere."""
    seen = javascript.looked(LOOK, PAGES[name](tmp_path), tmp_path)
    assert seen["errors"] == [] and seen["broken"] == [] and seen["went"]
    assert seen["seconds"] < 3
    assert set(seen["overflows"].values()) == {0}
    assert {name.split("-")[1]: ink for name, ink in seen["inks"].items()} == {
        "light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)",
    }  # fmt: skip
    assert seen["tallest"] <= 640
