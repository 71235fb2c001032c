"""Write the report of a training run beside its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from operator import methodcaller
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

from onnxgrad_cli.common.flags import flag_of
from onnxgrad_cli.files import AtomicWriteGroup
from onnxgrad_cli.jobs.train.lbfgs_options import UNUSED
from onnxgrad_cli.jobs.train.prepared_run import PreparedRun, Trained
from onnxgrad_cli.optimizers import LBFGS
from onnxgrad_cli.report import make_report
from onnxgrad_cli.report.curve import Curve
from onnxgrad_cli.report.html import html
from onnxgrad_cli.report.markdown import Writer
from onnxgrad_cli.report.training_report import CURVE, METRIC, RATE, RunSummary, page
from onnxgrad_cli.training.run.folder import LOCK, NAMES, RunFolder
from onnxgrad_cli.training.run.logs import TENSORBOARD
from onnxgrad_cli.view import draw
from onnxgrad_cli.view.html_drawing import html as drawn

REPORTS = ("report.md", "report.html")
"""The names of the files with the report of a training."""


def files_in(folder: Path, ready: PreparedRun) -> list[Path]:
    """Return the files that a run writes to its folder. Files that the user names must not be among them."""
    metrics = len(ready.evaluator.metrics) if ready.evaluator else 0
    pictures = [CURVE, RATE, *(METRIC.format(i) for i in range(1, metrics + 2))]  # the learning rate has a picture too
    return [folder / name for name in (*NAMES, *REPORTS, *pictures)]


def files_of_runs(folder: Path) -> list[Path]:
    """Return all files that a run may write to its folder, except for its lock and the folder for TensorBoard."""
    names = [name for name in NAMES if name not in (LOCK, TENSORBOARD)]
    metrics = re.compile(METRIC.replace(".", r"\.").format(r"\d+"))
    pictures = [file for file in folder.glob("*.svg") if metrics.fullmatch(file.name)]
    return [*(folder / name for name in (*names, *REPORTS, CURVE, RATE)), *pictures]


def stage_report(
    switch: AtomicWriteGroup, folder: RunFolder, ready: PreparedRun, found: Trained, picture: Path | None
) -> None:
    """Add the run's reports, and the HTML page with the picture of the training model, to a group of files to write.

    They are written atomically, together with the trained model.
    """
    told = asdict(ready.course)
    told |= told.pop("sequences") | _shown(told.pop("samples"))
    unused = {*UNUSED, "shuffle"} if ready.built.options.optimizer == LBFGS.name else ()
    asked = {flag_of(name): value for name, value in told.items() if value and name not in unused}
    sets = {"training": ready.samples} if ready.sets is None else {f"training ({ready.sets.first.name})": ready.samples}
    sets |= {f"training ({each.name})": each.data for each in ready.others}
    sets |= {"validation": ready.evaluator.data} if ready.evaluator else {}
    log = folder.history()
    run = RunSummary(
        ready.path.name if ready.path else "",
        found.reason, found.epochs, found.best, found.by, found.steps, found.seconds, asked,
        {use: (str(data.source), len(data)) for use, data in sets.items()},
        [str(file) for file in found.files], Curve.of(log), Curve.others(log), ready.confusion(),
        make_report(built=ready.built),
    )  # fmt: skip
    link = "" if picture is None else quote(Path(relpath(picture, folder.path)).as_posix())
    if picture is not None:
        switch.stage(picture, methodcaller("write", drawn(draw(ready.built.model, ready.path)).encode()))
    document = page(run)
    written = dict(zip(REPORTS, (Writer().write(document), html(document, link)), strict=True))
    for name, text in {**written, **{picture.file: picture.draw() for picture in run.pictures}}.items():
        switch.stage(folder.path / name, methodcaller("write", text.encode()))


def _shown(samples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sample options as a user would type them."""
    columns = [f"{column}={feed}" for column, feed in samples["columns"].items()]
    function = getattr(samples["transform"], "__name__", None)
    return {**samples, "columns": columns, "transform": function}
