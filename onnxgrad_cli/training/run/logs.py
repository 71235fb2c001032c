"""The log of a run in CSV and TensorBoard format, with the same lines as train.jsonl.

If a run is resumed from a checkpoint, lines about later steps are removed, because the run takes these steps again.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.common.escape import table_cell
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import unreadable, unwritable
from onnxgrad_cli.files import save_bytes, told

CSV, TENSORBOARD = "train.csv", "tensorboard"
"""Names in the run's folder: the CSV file, and the folder of TensorBoard's files."""

EVENTS = "events.out.tfevents.*"
"""A glob pattern that matches TensorBoard's files."""

WITHOUT = "move it away: a run continues without it"
"""The hint of errors about a log that can't be read."""

OF_A_STEP = ("step", "epoch", "loss", "rate", "seconds")
"""The keys of a log line about a step. Lines about evaluations have no 'rate'."""


class Sink(Protocol):
    """A writer of log lines in some format."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. It may be written later."""

    def write(self) -> None:
        """Write all lines that have not been written yet.

        Raises:
            OnnxgradError: the lines can't be written.
        """


def sinks(folder: Path, forms: Sequence[LogForm], steps: int, results: Sequence[str]) -> list[Sink]:
    """Return the writers of a log in other formats than JSON lines.

    Args:
        folder: the folder of the run.
        forms: the formats.
        steps: the number of steps that the run took before; lines about later steps are removed.
        results: the names of the results of an evaluation.

    Raises:
        UsageError: a package is missing.
        OnnxgradError: a file can't be written.
    """
    wanted = dict.fromkeys(forms)
    return [_Csv(folder / CSV, steps, results) if form == "csv" else _TensorBoard(folder, steps) for form in wanted]


class _Csv:
    """A CSV file with a row per step and a row per evaluation, as PyTorch Lightning's CSVLogger writes it.

    In a row of a step, the columns of evaluations are empty, and vice versa.
    """

    def __init__(self, path: Path, steps: int, results: Sequence[str]) -> None:
        self._path, self._columns = path, [*OF_A_STEP, *map(_column, results)]
        with told(path):
            kept = list(_rows(path, steps)) if steps and path.exists() else []
        save_bytes(b"", path)
        self._lines: list[Mapping[str, Any]] = [dict(zip(self._columns, self._columns, strict=True)), *kept]
        self.write()

    def add(self, line: Mapping[str, Any]) -> None:
        self._lines.append(line if "rate" in line else {_column(name): value for name, value in line.items()})

    def write(self) -> None:
        with told(self._path), self._path.open("a", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, self._columns, extrasaction="ignore", lineterminator="\n")
            writer.writerows(self._lines)
        self._lines = []


def _column(name: str) -> str:
    """Return the column name for a result of an evaluation.

    The name differs from the columns of steps, and is not a formula for spreadsheets.
    """
    return "epoch_loss" if name == "loss" else table_cell(name)


def _rows(path: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file about steps up to `steps`. An incomplete last row is left out.

    Raises:
        OnnxgradError: the file is not a CSV file.
    """
    try:
        if not path.is_file():
            raise csv.Error("it is a folder, a device or a pipe")
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            for row in csv.DictReader(stream):
                if (row.get("step") or "").isdecimal() and int(row["step"]) <= steps and None not in row.values():
                    yield row
    except (csv.Error, ValueError) as error:  # ValueError: int() refuses numbers with thousands of digits
        raise unreadable(f"'{path}' is not a log of steps: {error}", WITHOUT) from None


TAGS = {"loss": "train/loss", "rate": "train/rate"}
"""Key of a log line about a step -> its tag in TensorBoard."""


class _TensorBoard:
    """An event file of scalars for TensorBoard.

    A resumed run writes a start event. TensorBoard then discards earlier records about the steps that the run takes
    again. The file is written with tensorboardX, but without its thread, in which errors of the disk would get lost.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        load_package("tensorboardX.event_file_writer", "`log='tensorboard'`")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._path = (folder / TENSORBOARD).resolve()  # tensorboardX treats some relative names as cloud URLs
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        if (folder / TENSORBOARD).is_symlink():
            message = f"'{folder / TENSORBOARD}' is a link, which onnxgrad does not follow"
            raise unwritable(message, "pass another folder as `run`")
        with told(self._path):
            self._path.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self._path / "events"), f".{steps}")
        if steps:
            again = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=steps + 1, session_log=again)

    def add(self, line: Mapping[str, Any]) -> None:
        if "rate" in line:
            values = {tag: line[name] for name, tag in TAGS.items() if name != "rate" or math.isfinite(line[name])}
        else:
            values = {_tag(name): value for name, value in line.items() if name not in ("step", "epoch")}
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])
        self._add(step=line["step"], summary=summary)

    def _add(self, **what: Any) -> None:
        with told(self._path):
            self._writer.write_event(self._event(wall_time=time.time(), **what))

    def write(self) -> None:
        with told(self._path):
            self._writer.flush()


def _tag(name: str) -> str:
    """Return the TensorBoard tag for a result of an evaluation, such as val/accuracy for val_accuracy."""
    return "train/epoch_loss" if name == "loss" else name.replace("val_", "val/", 1)
