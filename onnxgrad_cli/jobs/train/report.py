"""The report of a run of training, beside its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from operator import methodcaller
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

from onnxgrad_cli.common.wording import flag_of
from onnxgrad_cli.files import Switch
from onnxgrad_cli.jobs.train.prepared_run import PreparedRun
from onnxgrad_cli.jobs.train.trained import Trained
from onnxgrad_cli.report import make_report
from onnxgrad_cli.report.curve import Curve
from onnxgrad_cli.report.html import html
from onnxgrad_cli.report.markdown import markdown
from onnxgrad_cli.report.training import CURVE, METRIC, RATE, Run, page
from onnxgrad_cli.training.run.folder import LOCK, NAMES, RunFolder
from onnxgrad_cli.training.run.logs import TENSORBOARD
from onnxgrad_cli.view import draw
from onnxgrad_cli.view.html import html as drawn

REPORTS = ("report.md", "report.html")
"""The files of the report."""


def files_in(folder: Path, ready: PreparedRun) -> list[Path]:
    """What a run writes to its folder, so that no file which a user names is one of it."""
    metrics = len(ready.evaluator.metrics) if ready.evaluator else 0
    pictures = [CURVE, RATE, *(METRIC.format(i) for i in range(1, metrics + 2))]  # the rate is counted, too
    return [folder / name for name in (*NAMES, *REPORTS, *pictures)]


def files_of_runs(folder: Path) -> list[Path]:
    """Return the files that any run writes to its folder, but its lock and the folder for TensorBoard."""
    names = [name for name in NAMES if name not in (LOCK, TENSORBOARD)]
    metrics = re.compile(METRIC.replace(".", r"\.").format(r"\d+"))
    pictures = [file for file in folder.glob("*.svg") if metrics.fullmatch(file.name)]
    return [*(folder / name for name in (*names, *REPORTS, CURVE, RATE)), *pictures]


def stage_report(switch: Switch, folder: RunFolder, ready: PreparedRun, found: Trained, picture: Path | None) -> None:
    """Write the reports to the run's folder, and the picture of the training model to its page.

    They take their names with the trained model.
    """
    told = asdict(ready.course)
    told |= told.pop("sequences") | _shown(told.pop("samples"))
    asked = {flag_of(name): value for name, value in told.items() if value}
    sets = {"training": ready.samples, **({"validation": ready.evaluator.data} if ready.evaluator else {})}
    log = folder.history()
    run = Run(
        ready.path.name if ready.path else "",
        found.reason, found.epochs, found.best, found.by, found.steps, found.seconds, asked,
        {use: (str(data.source), len(data)) for use, data in sets.items()},
        [str(file) for file in found.files], Curve.of(log), Curve.others(log), ready.confusion(),
        make_report(built=ready.built),
    )  # fmt: skip
    link = "" if picture is None else quote(Path(relpath(picture, folder.path)).as_posix())
    document = replace(page(run), picture=link)
    if picture is not None:
        switch.stage(picture, methodcaller("write", drawn(draw(ready.built.model, ready.path)).encode()))
    written = dict(zip(REPORTS, (markdown(document), html(document)), strict=True))
    for name, text in {**written, **{picture.file: picture.svg for picture in run.pictures}}.items():
        switch.stage(folder.path / name, methodcaller("write", text.encode()))


def _shown(samples: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of the samples, as it would be typed."""
    columns = [f"{column}={feed}" for column, feed in samples["columns"].items()]
    function = getattr(samples["transform"], "__name__", None)
    return {**samples, "columns": columns, "transform": function}
