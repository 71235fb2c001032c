"""The loss curve and the report of a run: what they draw and say is what stands in its log."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from onnxgrad_cli.report.curve import BLOCKS, COLUMNS, Curve, blocks, svg
from onnxgrad_cli.report.words import figure
from tests.cli_harness import MLP, Shell, save

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    x = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    np.savez("data.npz", x=x, label=np.stack([x.sum(1), x[:, 0]], 1))
    return Shell(tmp_path, capsys)


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


def test_a_run_leaves_its_curve_and_its_report(shell: Shell) -> None:
    arguments = ("--epochs", "3", "--batch-size", "10", "--freeze", "b1", "--threads", "1", "-o", "t.onnx")
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--val", "data.npz", *arguments)
    assert result.code == 0, result.err
    assert [line.split()[0] for line in result.out.splitlines()] == ["loss", "validation", "epoch"]
    log = [json.loads(entry) for entry in Path("t.onnx.run/train.jsonl").read_text().splitlines()]
    picture = ET.parse("t.onnx.run/curve.svg").getroot()
    assert len(line(picture, "raw")) == sum("rate" in entry for entry in log) == 15
    assert len(line(picture, "val")) == 3
    report, page = (Path(f"t.onnx.run/report.{kind}").read_text("utf-8") for kind in ("md", "html"))
    for text in (report, page):
        for entry in log:
            if "val_loss" in entry:
                assert figure(entry["loss"]) in text and figure(entry["val_loss"]) in text
        assert "b1" in text and "--batch-size" in text and "data.npz" in text
    assert "![Loss of mlp.onnx](curve.svg)" in report and "<svg" in page and "<script" not in page


METRICS = ("--metric", "accuracy", "--metric", "f1-macro")


def test_the_report_has_the_curves_of_metrics_and_rate_and_the_confusion_of_the_weights_that_were_taken(
    shell: Shell,
) -> None:
    from onnxgrad_cli import LossSpec, Options, run_evaluate
    from tests.jobs.train.test_train import ON_DIGITS, ROOT

    model = ROOT / "sample_models" / "digits_mlp.onnx"
    more = (
        "--epochs",
        "3",
        "--schedule",
        "linear",
        "--metric",
        "accuracy",
        "--metric",
        "f1-macro",
        "--eval-every",
        "9",
    )
    result = shell("train", model, *ON_DIGITS, *more, "-o", "t.onnx")
    assert result.code == 0, result.err
    log = [json.loads(entry) for entry in Path("t.onnx.run/train.jsonl").read_text().splitlines()]
    judged = sum("val_loss" in entry for entry in log)
    assert judged > 3
    for file in ("metric-1.svg", "metric-2.svg"):
        assert len(line(ET.parse(f"t.onnx.run/{file}").getroot(), "val")) == judged
    assert len(line(ET.parse("t.onnx.run/rate.svg").getroot(), "raw")) == sum("rate" in entry for entry in log)
    options = Options(losses=(LossSpec("cross-entropy"),), label="y")
    data = np.load(ROOT / "sample_models" / "digits.npz")
    found = run_evaluate("t.onnx", {"x": data["test_x"], "y": data["test_y"]}, options)
    report, page = (Path(f"t.onnx.run/report.{kind}").read_text("utf-8") for kind in ("md", "html"))
    rows = re.findall(r"^\| `\d` +\|(.*)\|$", report, re.MULTILINE)
    assert [list(map(int, row.split("|"))) for row in rows] == found.confusion["logits"].counts
    for picture in ("curve", "metric-1", "metric-2", "rate"):
        assert f"({picture}.svg)" in report
    assert page.count("<svg") == 4 and "<script" not in page
    assert "<code>accuracy</code>, <code>f1-macro</code>" in page


def test_no_curve_of_one_epoch(shell: Shell) -> None:
    result = shell("train", "mlp.onnx", "--data", "data.npz", "--epochs", "1", "-o", "t.onnx")
    assert result.code == 0 and not set(BLOCKS) & set(result.out)


def test_a_resumed_run_has_the_whole_curve(shell: Shell) -> None:
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--threads", "1")
    assert shell(*arguments, "--epochs", "4", "-o", "whole.onnx").code == 0
    assert shell(*arguments, "--epochs", "2", "-o", "t.onnx").code == 0
    assert shell(*arguments, "--epochs", "4", "-o", "t.onnx", "--resume").code == 0
    assert Path("t.onnx.run/curve.svg").read_bytes() == Path("whole.onnx.run/curve.svg").read_bytes()
