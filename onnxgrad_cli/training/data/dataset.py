"""Data that are known to fit a training model, in any format, of which batches are taken by the number of samples."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from onnx import helper

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import dtype_of, shape_of
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.data import onnx_test_sets
from onnxgrad_cli.training.data.input_types import InputTypes, Range
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.reading import Found, check_regular, reading
from onnxgrad_cli.training.data.sequences import Preparation, SequenceOptions, Sequences, following, tokens_of
from onnxgrad_cli.training.data.text import TEXTS, read_text
from onnxgrad_cli.training.data.validate import blocks, check

FORMATS = {
    ".jsonl": "json_lines",
    ".npz": "npz",
    ".csv": "csv_file",
    ".tsv": "csv_file",
    ".parquet": "parquet",
    ".safetensors": "safetensors_file",
}
"""The suffixes of files, with the modules that read them."""


@dataclass(frozen=True)
class Data:
    """Samples for a training model.

    Attributes:
        source: the file or folder they are from.
        arrays: input -> its samples, the first axis; they may lie in files, or be lists of different lengths.
        dtypes: input -> the type in which the model takes it.
        size: how many samples there are.
        sizes: symbol -> its size, of those that are not the batch.
        batch_size: how many samples the model takes at once; None if any number.
        samples: which rows of the arrays they are, int64 (size,); None is all.
        sequences: how batches are made of sequences of tokens; None where samples are arrays of one shape.
    """

    source: Path
    arrays: Mapping[str, np.ndarray | Lists]
    dtypes: Mapping[str, np.dtype]
    size: int
    sizes: Mapping[str, int]
    batch_size: int | None = None
    samples: np.ndarray | None = None
    sequences: Sequences | None = None

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Some samples, as a run is fed them: contiguous copies in the model's types.

        Args:
            indices: the numbers of the samples, integers of shape (n,).
        """
        rows = self.rows(indices)
        taken = {name: _take(array, rows) for name, array in self.arrays.items()}
        whole = taken if self.sequences is None else self.sequences.batch(taken)
        return {name: np.asarray(whole[name], dtype, order="C") for name, dtype in self.dtypes.items()}

    def digest(self) -> str:
        """Eight digits that tell these samples from others: a CRC-32 of names, types, shapes and all bytes.

        It is read in blocks, so that data in files may be larger than memory.
        """
        check = 0 if self.samples is None else zlib.crc32(self.samples.data)
        for name, column in sorted(self.arrays.items()):
            check = zlib.crc32(f"{name} {column.dtype.str} {column.shape}".encode(), check)
            for array in (column.values, column.offsets) if isinstance(column, Lists) else (column,):
                for _, block in blocks(array):
                    check = zlib.crc32(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data, check)
        return f"{check:08x}"

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Which rows of the arrays samples are, by their numbers."""
        return indices if self.samples is None else self.samples[indices]


def open_data(
    source: str | Path,
    inputs: InputTypes,
    ranges: Mapping[str, Range] | None = None,
    *,
    prefix: str = "",
    finite: bool = True,
    terms: Sequence[Term] = (),
    options: SequenceOptions | None = None,
    tell: Tell = silent,
) -> Data:
    """Open data for a training model, and make sure that they fit it.

    Args:
        source: an .npz, .csv, .tsv, .jsonl, .parquet or .safetensors file, a folder of .npy files, or an ONNX
            test_data_set_N or a folder of these.
        inputs: what is fed, with its types; see `input_types_of`.
        ranges: the whole numbers that inputs may hold; see `ranges_of`.
        prefix: what the names in the data have before those of the inputs, such as 'train_'.
        finite: refuse nan and infinity.
        terms: the losses, which say what labels of tokens are.
        options: how text and lists of tokens become samples.
        tell: takes what is narrated.

    Raises:
        UsageError: they can't be read, or don't fit; the message names file, input and sample.
    """
    path, asked = Path(source), options or SequenceOptions()
    columns, others, sequences = _gathered(path, inputs, ranges or {}, prefix, terms, asked, tell)
    made = {*sequences.made, *sequences.pairs} if sequences else set()
    held = {prefix + name: column for name, column in columns.items() if name in inputs}
    wanted = {prefix + name: value_type for name, value_type in inputs.items() if name not in made}
    allowed = {prefix + name: range_ for name, range_ in (ranges or {}).items()}
    checked = check(path, Found(held, others), wanted, allowed, finite)
    if others and asked.tokenizer is None:
        tell(f"'{path}' has more than the model is fed, left out: {_listed(others)}", 0)
    dtypes = {name: helper.tensor_dtype_to_np_dtype(dtype_of(value_type)) for name, value_type in inputs.items()}
    arrays = {name: _kept(column, dtypes.get(name, column.dtype)) for name, column in columns.items()}
    return Data(path, arrays, dtypes, checked.size, checked.sizes, checked.batch_size, sequences=sequences)


def _gathered(
    path: Path,
    inputs: InputTypes,
    ranges: Mapping[str, Range],
    prefix: str,
    terms: Sequence[Term],
    options: SequenceOptions,
    tell: Tell,
) -> tuple[dict[str, np.ndarray | Lists], list[str], Sequences | None]:
    """The columns of inputs, what else the data have, and how batches are made of sequences if there are some."""
    tokens = tokens_of(inputs, ranges, terms)
    columns: dict[str, np.ndarray | Lists] = {}
    if options.tokenizer is not None:
        _check_there(path)
        options, columns = read_text(path, options, tokens, terms, tell, prefix)
    elif tokens is not None:
        _refuse_text(path, prefix + tokens)
    absent = {prefix + name for name in columns}
    absent |= _absent(path, {prefix + name for name in following(inputs, tokens, terms)})
    found = _read(path, {prefix + name: kind for name, kind in inputs.items() if prefix + name not in absent})
    columns |= {name.removeprefix(prefix): column for name, column in found.arrays.items()}
    sequences = None
    if tokens in columns:
        columns, sequences = Preparation(path, tokens, inputs, terms, options, tell)(columns)
    elif tokens is None and options != SequenceOptions():
        raise UsageError(
            "`max_length`, `pack` and `pad_id` are of tokens, and the model has no input of tokens",
            "call it input_ids, or leave these out",
        )
    return {**columns, **_empty(columns, inputs)}, found.others, sequences


def names_in(source: str | Path) -> list[str] | None:
    """What the arrays or columns of data are called; None where their order tells, as in ONNX test sets.

    Raises:
        UsageError: they can't be read.
    """
    path = Path(source)
    return None if path.is_dir() and onnx_test_sets.folders(path) else _read(path, {}).others


def _absent(path: Path, names: Collection[str]) -> set[str]:
    """Of inputs those that data do not name: what follows from tokens is no column that is left over."""
    held = names_in(path) if names else []
    if held is None:
        return set()
    parts = {name: (f"{name}_", f"{name}[") for name in names}
    return {name for name in names if name not in held and not any(each.startswith(parts[name]) for each in held)}


def _refuse_text(path: Path, tokens: str) -> None:
    """Refuse data that hold text in place of tokens."""
    held = names_in(path) or []
    texts = [name for name in held if name in TEXTS]
    if texts and tokens not in held:
        raise UsageError(f"'{path}' has no '{tokens}'", f"for the text in {_listed(texts)} name a `tokenizer`")


def _check_there(path: Path) -> None:
    with reading(path, "data", "check its name"):
        there = path.exists()
    if not there:
        raise UsageError(f"no such file or folder: '{path}'")


def _read(path: Path, inputs: InputTypes) -> Found:
    _check_there(path)
    if path.is_dir():
        name = "onnx_test_sets" if onnx_test_sets.folders(path) else "npy_folder"
    elif path.suffix.lower() in FORMATS:
        check_regular(path)
        name = FORMATS[path.suffix.lower()]
    else:
        hint = (
            "put it in a folder, called as the input" if path.suffix == ".npy" else f"{', '.join(FORMATS)}, or a folder"
        )
        raise UsageError(f"'{path}' is of no format that data are read from", hint)
    return import_module(f"onnxgrad_cli.training.data.{name}").read(path, inputs)


def _empty(arrays: Mapping[str, np.ndarray | Lists], inputs: InputTypes) -> dict[str, np.ndarray]:
    """Samples for inputs that data need not have: an empty past has no numbers, as many samples as there may be."""
    size = next((len(array) for array in arrays.values() if array.ndim), 0)
    shapes = {name: (shape_of(value_type) or ())[1:] for name, value_type in inputs.items() if name not in arrays}
    static = {name: [dim for dim in shape if isinstance(dim, int)] for name, shape in shapes.items() if 0 in shape}
    return {
        name: np.zeros([size, *dims], helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name])))
        for name, dims in static.items()
        if len(dims) == len(shapes[name])
    }


def _kept(array: np.ndarray | Lists, dtype: np.dtype) -> np.ndarray | Lists:
    """An array in memory is cast once, if it does not grow by it; one in a file stays there."""
    if isinstance(array, Lists):
        return array
    in_file = isinstance(array, np.memmap)
    return array if in_file or dtype.itemsize > array.itemsize else np.asarray(array, dtype, order="C")


def _take(array: np.ndarray | Lists, indices: np.ndarray) -> np.ndarray | list[np.ndarray]:
    """Samples of an array; `take` is faster than an index, but copies an array whole that is not laid out plainly."""
    if isinstance(array, Lists):
        return array.take(indices)
    if not array.ndim:
        return array
    plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    return array.take(indices, axis=0) if plain else array[indices]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
