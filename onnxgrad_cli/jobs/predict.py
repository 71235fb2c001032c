"""What an inference model says of each sample, in a file."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxgrad_cli.common import checks, strict_json
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.common.visible import table_cell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.files import ModelSource, Switch, check_target, own_model
from onnxgrad_cli.files.arrays import write_npz
from onnxgrad_cli.jobs.targets import target_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.inference import Predictor, Setting, Source

MOST_COLUMNS = 10_000
"""Of a table: spreadsheets have 16,384."""


@dataclass(frozen=True)
class Predicted:
    """What a model says of data.

    Attributes:
        outputs: output -> its values, the first axis is the sample; for outputs whose classes the model names, also
            `<output>_class` and `<output>_label`.
        samples: how many there are.
        files: what was written.
    """

    outputs: dict[str, np.ndarray]
    samples: int
    files: list[Path]


@judged
def run_predict(
    model: ModelSource,
    data: Source,
    out: str | Path | None = None,
    *,
    outputs: Sequence[str] = (),
    label: str = "label",
    options: Options | None = None,
    setting: Setting | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> Predicted:
    """Run a model on data, and write what it says of each sample.

    Args:
        model: the inference model; '-' is stdin.
        data: its inputs: a file or folder, see `open_data`; or arrays by the names of inputs.
        out: the file: .npz, or .csv, .jsonl or .parquet with a row for each sample; by default
            `<model>.predictions.npz`, or for a model in memory none.
        outputs: which ones; () is all that are tensors.
        label: what the data call the labels, if they have some: they are left out.
        options: sizes and shapes of inputs; the rest does not count.
        setting: batches, provider, names in the data.
        force: replace a file that is there.
        tell: takes what is narrated.

    Raises:
        UsageError: the data do not fit the model, an output is not of samples, or the file may not be replaced.
        OnnxgradError: a file can't be read or written, or onnxruntime fails.
    """
    outputs = checks.tuple_of("outputs", outputs, str, "such as outputs=('logits',)")
    data = data if isinstance(data, Mapping) else checks.path("data", data)
    checks.text("label", label)
    setting = setting or Setting()
    keep(data, setting.sequences.tokenizer)
    proto, path = own_model(model)
    target = None if out is None and path is None else target_of(model, out, "predictions", ".npz", streams=False)
    if target is not None:
        if target.suffix not in FORMATS:
            raise UsageError(f"`out`: '{target}' is of no form for predictions", f"{', '.join(FORMATS)}")
        if target.suffix == ".parquet":
            load_package("pyarrow.parquet", f"writing '{target}'")
        check_target(target, proto, path, force)
    predictor = Predictor(proto, path, data, outputs, setting, tell, label, options)
    found = predictor.all()
    if target is None:
        return Predicted(found, predictor.samples, [])
    with Switch(target) as switch:
        switch.stage(target, FORMATS[target.suffix](found))
        switch.commit()
    return Predicted(found, predictor.samples, [target])


Writer = Callable[[BinaryIO], object]


def _npz(arrays: dict[str, np.ndarray]) -> Writer:
    return partial(write_npz, arrays)


def _csv(arrays: dict[str, np.ndarray]) -> Writer:
    columns = [table_cell(column) for name, array in arrays.items() for column in _columns(name, array)]
    if len(columns) > MOST_COLUMNS:
        raise UsageError(f"a table of {len(columns):,} columns is of no use", "write .npz, or name fewer outputs")
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise UsageError(
            f"two columns of the table would be called '{twice}': the names of outputs and of their places clash",
            "write .npz, .jsonl or .parquet, or name fewer outputs with `outputs`",
        )
    return partial(_write_rows, columns, list(arrays.values()))


def _write_rows(columns: Sequence[str], arrays: Sequence[np.ndarray], stream: BinaryIO) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*(array.reshape(len(array), -1) for array in arrays), strict=True):
        writer.writerow([table_cell(value) if isinstance(value, str) else str(value) for part in row for value in part])
    text.flush()
    text.detach()


def _columns(name: str, array: np.ndarray) -> Iterator[str]:
    """The columns of an array, as data are read: y for one number a sample, else y_0, y_1 ..., or y_0_1."""
    if array[:1].size == 1:
        yield name
        return
    for place in np.ndindex(array.shape[1:]):
        yield "_".join([name, *map(str, place)])


def _json_lines(arrays: dict[str, np.ndarray]) -> Writer:
    return partial(_write_lines, arrays)


def _write_lines(arrays: dict[str, np.ndarray], stream: BinaryIO) -> None:
    for row in zip(*arrays.values(), strict=True):
        said = {name: value.tolist() for name, value in zip(arrays, row, strict=True)}
        stream.write(f"{strict_json.dumps(said)}\n".encode())


def _parquet(arrays: dict[str, np.ndarray]) -> Writer:
    arrow, files = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = {name: _nested(arrow, array) for name, array in arrays.items()}
    return partial(files.write_table, arrow.table(columns))


def _nested(arrow: Any, array: np.ndarray) -> Any:
    """An array as a column of pyarrow: each axis behind the first is one of lists."""
    column = arrow.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        ends = np.arange(math.prod(array.shape[:axis]) + 1, dtype=np.int64) * array.shape[axis]
        column = arrow.LargeListArray.from_arrays(arrow.array(ends), column)
    return column


FORMATS: dict[str, Callable[[dict[str, np.ndarray]], Writer]] = {
    ".npz": _npz,
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
"""The suffixes of files that predictions are written to."""
