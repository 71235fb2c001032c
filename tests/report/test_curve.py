"""The loss curve and the report of a run: what they draw and say is what stands in its log."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from onnxgrad_cli.report.curve import BLOCKS, COLUMNS, Curve, blocks, svg
from tests.cli_harness import Shell

SVG = "{http://www.w3.org/2000/svg}"


def line(picture: ET.Element, kind: str) -> np.ndarray:
    """The points of a line, in pixels."""
    path = next(p for p in picture.iter(f"{SVG}path") if p.get("class") == kind)
    return np.array([pair.split() for pair in path.get("d", "")[1:].split("L")], float)


def test_blocks_rise_and_fall_with_the_values() -> None:
    assert blocks([1, 2, 3, 2]) == "▁▅█▅"
    assert blocks([5, 5, 5]) == BLOCKS[0] * 3
    assert blocks([1, 10, 100]) == "▁▅█"  # by their logarithms: a fall by a factor of ten or more
    assert blocks([0, 10, 100]) == "▁▂█"  # zero has none
    assert len(blocks(list(range(1000)))) == 59  # of 17 each
    assert len(blocks(list(range(1000)), 20)) == 20


@pytest.mark.parametrize("factor", [1.0, 1e-4])
def test_the_picture_is_to_scale(factor: float) -> None:
    """Ticks say where a value lies; the line must lie where they say, on a linear or a logarithmic scale."""
    steps = [
        (i, 2.0 * math.exp(math.log(factor) * i / 400) + (0.3 if factor == 1 else 0) * (i % 2)) for i in range(1, 401)
    ]
    picture = ET.fromstring(svg(Curve(steps, [(200, 0.8), (400, 0.5)]), "a <b> & c"))
    assert picture.find(f"{SVG}title").text == "a <b> & c"
    ticks = {}
    for text in picture.iter(f"{SVG}text"):
        if text.get("text-anchor") == "end" and text.text != "step":
            ticks[float(text.text)] = float(text.get("y")) - 4
    assert len(ticks) >= 3
    scale = np.log if factor < 1 else np.asarray
    values, places = np.array(sorted(ticks.items())).T
    slope, start = np.polyfit(scale(values), places, 1)
    raw = line(picture, "raw")
    np.testing.assert_allclose(raw[:, 1], slope * scale(np.array([y for _, y in steps])) + start, atol=0.3)
    np.testing.assert_allclose(line(picture, "val")[:, 1], slope * scale(np.array([0.8, 0.5])) + start, atol=0.3)
    np.testing.assert_allclose(np.diff(raw[:, 0]), np.diff(raw[:, 0]).mean(), atol=0.11)
    assert line(picture, "val")[1, 0] == raw[-1, 0]
    assert svg(Curve(steps), "x") == svg(Curve(steps), "x")


@pytest.mark.parametrize("losses", [[1.0], [0.0, 0.0], [-3.0, -5.0, 2.0], [1e-30, 1e30], [7.0] * 5000])
def test_any_losses_can_be_drawn(losses: list[float]) -> None:
    text = svg(Curve(list(enumerate(losses, 1))), "")
    points = line(ET.fromstring(text), "raw")
    assert "nan" not in text and 1 <= len(points) <= COLUMNS
    assert (points >= 0).all() and (points[:, 1] <= 320).all() and (points[:, 0] <= 720).all()


def test_no_curve_of_one_epoch(shell: Shell) -> None:
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "-o", "t.onnx")
    assert result.code == 0 and not set(BLOCKS) & set(result.out)
