"""The report of a training: its curves, and the confusion of the weights that were written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

from onnxgrad_cli.report.formatting import figure
from tests.cli_harness import Shell
from tests.report.test_curve import line


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


def test_a_resumed_run_has_the_whole_curve(shell: Shell) -> None:
    arguments = ("train", "mlp.onnx", "--data", "data.npz", "--threads", "1")
    assert shell(*arguments, "--epochs", "4", "-o", "whole.onnx").code == 0
    assert shell(*arguments, "--epochs", "2", "-o", "t.onnx").code == 0
    assert shell(*arguments, "--epochs", "4", "-o", "t.onnx", "--resume").code == 0
    assert Path("t.onnx.run/curve.svg").read_bytes() == Path("whole.onnx.run/curve.svg").read_bytes()
