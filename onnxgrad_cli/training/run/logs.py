"""The log of a run in the forms that other programs read, written beside train.jsonl and line by line as it is.

A run that goes on from a checkpoint forgets what came after it, for these steps come again.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnxgrad_cli.common.choices import LogForm
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.common.visible import table_cell
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.files import save_bytes, told

CSV, TENSORBOARD = "train.csv", "tensorboard"
"""The file and the folder in the run's folder."""

EVENTS = "events.out.tfevents.*"
"""The files in the folder."""

OF_A_STEP = ("step", "epoch", "loss", "rate", "seconds")
"""What a line of a log says of a step, which alone has a rate."""


class Sink(Protocol):
    """Takes the lines of a log."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line, to be written now or soon."""

    def write(self) -> None:
        """Write all lines that are not yet written.

        Raises:
            OnnxgradError: they can't be written.
        """


def sinks(folder: Path, forms: Sequence[LogForm], steps: int, results: Sequence[str]) -> list[Sink]:
    """What writes a log in other forms.

    Args:
        folder: of the run.
        forms: which.
        steps: how many were taken before; what was written of later ones is forgotten.
        results: what a judgement says, by the names in the lines of the log.

    Raises:
        UsageError: a package is missing.
        OnnxgradError: a file can't be written.
    """
    wanted = dict.fromkeys(forms)
    return [_Csv(folder / CSV, steps, results) if form == "csv" else _TensorBoard(folder, steps) for form in wanted]


class _Csv:
    """A row for each step and for each judgement, in which the columns of the other stand empty, as of CSVLogger."""

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
    """The name of a judgement's result, told from that of a step, as a reader sees it: outputs have any names."""
    return "epoch_loss" if name == "loss" else table_cell(name)


def _rows(path: Path, steps: int) -> Iterator[dict[str, Any]]:
    """The rows of a table that are of steps up to some; the last one may have been cut.

    Raises:
        OnnxgradError: it is no table.
    """
    try:
        if not path.is_file():
            raise csv.Error("it is a folder, a device or a pipe")
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            for row in csv.DictReader(stream):
                if (row.get("step") or "").isdecimal() and int(row["step"]) <= steps and None not in row.values():
                    yield row
    except (csv.Error, ValueError) as error:  # the latter for a number of thousands of digits
        raise OnnxgradError(f"'{path}' is no log of steps: {error}", "move it away: a run goes on without") from None


TAGS = {"loss": "train/loss", "rate": "train/rate"}
"""What a line of a step says -> its tag in TensorBoard."""


class _TensorBoard:
    """An event file of scalars, in which steps that come again replace those of before: TensorBoard purges them.

    The records are tensorboardX's, without its thread, in which an error of the disk would be lost.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        load_package("tensorboardX.event_file_writer", "`log='tensorboard'`")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._path = (folder / TENSORBOARD).resolve()  # tensorboardX takes the names of some schemes for a cloud's
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        if (folder / TENSORBOARD).is_symlink():
            raise OnnxgradError(f"'{folder / TENSORBOARD}' is a link, which may lead anywhere", "name another `run`")
        with told(self._path):
            self._path.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(self._path / "events"), f".{steps}")
        if steps:
            again = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=steps + 1, session_log=again)

    def add(self, line: Mapping[str, Any]) -> None:
        if "rate" in line:
            values = {tag: line[name] for name, tag in TAGS.items()}
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
    """The tag of a judgement's result: val/accuracy for val_accuracy."""
    return "train/epoch_loss" if name == "loss" else name.replace("val_", "val/", 1)
