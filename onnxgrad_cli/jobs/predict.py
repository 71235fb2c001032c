"""Write the predictions of an inference model for each sample to a file."""

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
from onnxgrad_cli.common.escape import table_cell
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.data.dataset import SIZES
from onnxgrad_cli.errors import conflict, wrong_shape, wrong_value
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.files import AtomicWriteGroup, ModelSource, check_target, own_model
from onnxgrad_cli.files.writing import write_npz
from onnxgrad_cli.jobs.output_plan import file_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.inference import Predictor, Setting, Source

MOST_COLUMNS = 10_000
"""Maximum number of columns of a CSV table. Spreadsheets support 16,384."""


@dataclass(frozen=True)
class Predicted:
    """The predictions of a model for data.

    Attributes:
        outputs: output -> its values, with samples along the first axis; an array of arrays if the samples have
            different shapes. If the model stores class names for an output, there are also entries `<output>_class` and
            `<output>_label`.
        samples: the number of samples.
        files: the files written.
    """

    outputs: dict[str, np.ndarray]
    samples: int
    files: list[Path]


@attribute_failures
@job
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
    """Run a model on data, and write its outputs for each sample.

    Args:
        model: the inference model; '-' is stdin.
        data: the samples: a file or folder (see `open_data`), or a map from the name of an input to its array.
        out: the file: .npz, or .csv, .jsonl or .parquet with a row for each sample. By default
            `<model>.predictions.npz`, or no file for a model in memory.
        outputs: the outputs to write; () selects all outputs that are tensors.
        label: the name of the labels in the data, if any. They are ignored.
        options: sizes and shapes of inputs; other options have no effect.
        setting: the batch size, the execution provider, and how data are read.
        force: replace an existing file.
        tell: receives progress messages.

    Raises:
        UsageError: the data don't fit the model, the first axis of an output is not the number of samples, or `out`
            exists and `force` is False.
        OnnxgradError: a file can't be read or written, or onnxruntime fails.
    """
    outputs = checks.tuple_of("outputs", outputs, str, "such as outputs=('logits',)")
    data = data if isinstance(data, Mapping) else checks.path("data", data)
    checks.text("label", label)
    setting = setting or Setting()
    protect_inputs(data, setting.sequences.tokenizer)
    proto, path = own_model(model)
    target = None if out is None and path is None else file_of(model, out, "predictions", ".npz")
    if target is not None:
        if target.suffix not in FORMATS:
            raise wrong_value(f"`out`: '{target}' is not a file for predictions", f"use one of {', '.join(FORMATS)}")
        if target.suffix == ".parquet":
            load_package("pyarrow.parquet", f"writing '{target}'")
        check_target(target, proto, path, force)
    predictor = Predictor(proto, path, data, outputs, setting, tell, label, options)
    found = predictor.all()
    if target is None:
        return Predicted(found, predictor.samples, [])
    with AtomicWriteGroup(target) as switch:
        switch.stage(target, partial(FORMATS[target.suffix], found))
        switch.commit()
    return Predicted(found, predictor.samples, [target])


def _write_npz(arrays: Mapping[str, np.ndarray], stream: BinaryIO) -> None:
    """Write arrays as an .npz. Samples of different shapes become two arrays: all elements, and the shapes."""
    found = dict[str, np.ndarray]()
    for name, array in arrays.items():
        if array.dtype == object:
            found[name] = np.concatenate([sample.reshape(-1) for sample in array])
            found[name + SIZES] = np.array([sample.shape for sample in array], np.int64)
        else:
            found[name] = array
    write_npz(found, stream)


def _write_csv(arrays: Mapping[str, np.ndarray], stream: BinaryIO) -> None:
    uneven = next((name for name, array in arrays.items() if array.dtype == object), None)
    if uneven is not None:
        message = f"the samples of the output '{uneven}' have different shapes, which a table can't hold"
        raise wrong_shape(message, "write .npz, .jsonl or .parquet")
    columns = [table_cell(column) for name, array in arrays.items() for column in _columns(name, array)]
    if len(columns) > MOST_COLUMNS:
        raise wrong_shape(
            f"the table would have {len(columns):,} columns; at most {MOST_COLUMNS:,} are written",
            "write .npz, or name fewer outputs",
        )
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    if twice is not None:
        raise conflict(
            f"two columns of the table would be called '{twice}': the names of outputs and of their elements clash",
            "write .npz, .jsonl or .parquet, or name fewer outputs with `outputs`",
        )
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*(array.reshape(len(array), -1) for array in arrays.values()), strict=True):
        writer.writerow([table_cell(value) if isinstance(value, str) else str(value) for part in row for value in part])
    text.flush()
    text.detach()


def _columns(name: str, array: np.ndarray) -> Iterator[str]:
    """Yield the names of an array's columns, as in data files: y for one value per sample, otherwise y_0, y_0_1 ..."""
    if array[:1].size == 1:
        yield name
        return
    for place in np.ndindex(array.shape[1:]):
        yield "_".join([name, *map(str, place)])


def _write_lines(arrays: Mapping[str, np.ndarray], stream: BinaryIO) -> None:
    for row in zip(*arrays.values(), strict=True):
        said = {name: value.tolist() for name, value in zip(arrays, row, strict=True)}
        stream.write(f"{strict_json.dumps(said)}\n".encode())


def _write_parquet(arrays: Mapping[str, np.ndarray], stream: BinaryIO) -> None:
    arrow, files = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = {name: _nested(arrow, array) for name, array in arrays.items()}
    files.write_table(arrow.table(columns), stream)


def _nested(arrow: Any, array: np.ndarray) -> Any:
    """Convert an array to a pyarrow column. Each axis after the first becomes a level of nested lists."""
    if array.dtype == object:
        return arrow.array([sample.tolist() for sample in array])
    column = arrow.array(np.ascontiguousarray(array).reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        ends = np.arange(math.prod(array.shape[:axis]) + 1, dtype=np.int64) * array.shape[axis]
        column = arrow.LargeListArray.from_arrays(arrow.array(ends), column)
    return column


FORMATS: dict[str, Callable[[Mapping[str, np.ndarray], BinaryIO], None]] = {
    ".npz": _write_npz, ".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet
}  # fmt: skip
"""Suffix of a file of predictions -> the function that writes the file."""
