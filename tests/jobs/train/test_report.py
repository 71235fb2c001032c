"""The report of a training run, and the files of a run's folder."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from onnxgrad_cli.jobs.train.report import REPORTS, files_in, files_of_runs
from onnxgrad_cli.report.training_report import CURVE, METRIC, RATE
from onnxgrad_cli.training.run.folder import LOCK, NAMES
from onnxgrad_cli.training.run.logs import TENSORBOARD
from tests.cli_harness import Shell, save_mlp_and_data


@pytest.mark.parametrize(("metrics", "pictures"), [(None, 1), (0, 1), (2, 3)])
def test_a_picture_for_each_metric_and_the_rate(metrics: int | None, pictures: int) -> None:
    ready = Mock(evaluator=None if metrics is None else Mock(metrics=[Mock()] * metrics))
    expected = [*NAMES, *REPORTS, CURVE, RATE, *(METRIC.format(i + 1) for i in range(pictures))]
    assert [file.name for file in files_in(Path("run"), ready)] == expected
    assert {file.parent for file in files_in(Path("run"), ready)} == {Path("run")}


def test_the_files_of_earlier_runs(tmp_path: Path) -> None:
    ours = {name for name in NAMES if name not in (LOCK, TENSORBOARD)} | {*REPORTS, CURVE, RATE}
    for name in (METRIC.format(1), METRIC.format(12), METRIC.format("x"), "other.svg"):
        (tmp_path / name).touch()
    found = [file.name for file in files_of_runs(tmp_path)]
    assert sorted(found) == sorted([*ours, METRIC.format(1), METRIC.format(12)])


def test_the_report_names_data_settings_and_files(shell: Shell) -> None:
    save_mlp_and_data()
    more = (
        "--val",
        "0.2",
        "--map",
        "x=x",
        "--metric",
        "r2",
        "--metric",
        "mae",
        "--epochs",
        "2",
        "--schedule",
        "cosine",
    )
    assert shell("train", "mlp.onnx", "--data", "data.npz", *more, "-o", "t.onnx").code == 0
    text = Path("t.onnx.run/report.md").read_text()
    assert all(word in text for word in ("mlp.onnx", "t.onnx", "t.onnx.run", "data.npz", "--map", "40"))
    assert "`None`" not in text
    assert "mlp.onnx" in text.splitlines()[0]
    html = Path("t.onnx.run/report.html").read_text()
    for name in (CURVE, RATE, METRIC.format(1), METRIC.format(2)):
        assert Path("t.onnx.run", name).exists() and name in text
    assert "<html" in html and "page.html" not in html
