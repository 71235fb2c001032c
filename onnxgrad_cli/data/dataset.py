"""Open data for a training model from any format or from memory, check them, and return batches by sample index."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from onnx import helper

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data import csv_file, json_lines, onnx_test_sets, picture_folder
from onnxgrad_cli.data.array_files import read_npy_folder, read_npz, read_safetensors
from onnxgrad_cli.data.arrow import is_arrow_folder, read_arrow_folder, read_parquet
from onnxgrad_cli.data.augmentation import Augmentations, Transformed
from onnxgrad_cli.data.batch_shard import BatchShard
from onnxgrad_cli.data.class_names import Names, as_numbers, is_text, numbered, shortened
from onnxgrad_cli.data.columns import Chosen, KnownColumns, single
from onnxgrad_cli.data.initial_states import NOT_RECURRENT, Recurrent, arrays_batch_first, with_batch_first, zero_states
from onnxgrad_cli.data.input_types import InputTypes, Range
from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.loaded_columns import Column, LoadedColumns
from onnxgrad_cli.data.normalization import PIXEL, Normalization
from onnxgrad_cli.data.pictures import SUFFIXES, Pictures
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.data.ragged import Padding, Ragged, cut, masks_of, padding_of
from onnxgrad_cli.data.read_failures import check_regular, check_there, reading
from onnxgrad_cli.data.sequences import Preparation, Sequences, following, tokens_of, uneven
from onnxgrad_cli.data.text import TEXTS, read_text
from onnxgrad_cli.data.validate import BLOCK, blocks, check, without_samples
from onnxgrad_cli.errors import conflict, mismatch, missing_value, suggest, unknown_name, wrong_shape, wrong_type
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.options.data import SampleOptions, SequenceOptions

T = TypeVar("T")

TABLES = {".jsonl": json_lines.read, ".csv": csv_file.read, ".tsv": csv_file.read, ".parquet": read_parquet}
"""Suffix of a table -> its reader."""

ARRAYS = {".npz": read_npz, ".safetensors": read_safetensors}
"""Suffix of a file with named arrays -> its reader."""

FORMATS = (*TABLES, *ARRAYS)
"""The suffixes of data files, except for pictures."""

SIZES = "_sizes"
"""Suffix of a name: if the samples of `x` have different sizes, the array `x_sizes` has the size of each sample."""


@dataclass(frozen=True)
class Data:
    """Samples for a training model.

    Attributes:
        source: the file or folder that the samples come from.
        arrays: input -> its samples, along the first axis. The array may be memory-mapped; samples may also be lists of
            different lengths, or pictures.
        dtypes: input -> the dtype that the model expects.
        size: the number of samples.
        sizes: symbolic dimension -> its size, except for the batch.
        batch_size: the fixed batch size of the model, or 1 if samples of different shapes can't be padded; None if
            batches may have any size.
        samples: for each sample, its row in the arrays, int64 (size,); None if the samples are all rows.
        sequences: the rules that make a batch of token sequences; None for data without sequences.
        names: label -> the names of its classes, for labels that have names.
        normal: input -> its normalization to mean 0 and standard deviation 1.
        augment: the random changes to pictures; None except in training.
        transform: the user's function that changes each batch.
        order: input -> its columns in a table, in order, for inputs that took several columns with other names.
        resize: how pictures of the training data were resized; None for data without pictures.
        same: inputs that are the same for all samples: each batch contains the whole array.
        axes: input -> its batch axis in the model, for inputs whose batch axis is not the first. In `arrays`, samples
            are always along the first axis.
        padding: the rules for samples of different shapes and for masks; None for data without both.
    """

    source: Path
    arrays: Mapping[str, Column]
    dtypes: Mapping[str, np.dtype]
    size: int
    sizes: Mapping[str, int]
    batch_size: int | None = None
    samples: np.ndarray | None = None
    sequences: Sequences | None = None
    names: Mapping[str, Names] = field(default_factory=dict)
    normal: Mapping[str, Normalization] = field(default_factory=dict)
    augment: Augmentations | None = None
    transform: Transformed | None = None
    order: Chosen = field(default_factory=dict)
    resize: Resize | None = None
    same: frozenset[str] = frozenset()
    axes: Mapping[str, int] = field(default_factory=dict)
    padding: Padding | None = None

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray, part: BatchShard | None = None) -> dict[str, np.ndarray]:
        """Return a batch of samples: input -> array, contiguous, in the dtype that the model expects.

        Args:
            indices: the indices of the samples, integers (n,).
            part: the epoch and the position of this batch in the training, which seed random changes to the samples.
                None outside of training: the samples are not changed at random.

        Raises:
            UsageError: a picture can't be read, samples have different shapes and can't be padded, or the user's
                function fails.
        """
        rows = self.rows(indices)
        taken = {name: _take(array, rows) for name, array in self.arrays.items() if name not in self.same}
        whole: dict[str, Any] = dict(taken)
        if self.sequences is not None:
            tokens = self.arrays[self.sequences.tokens]
            batch = rows if part is None or part.batch is None else self.rows(part.batch)
            whole = self.sequences.batch(taken, tokens.longest(batch) if isinstance(tokens, Lists) else 0)
        elif self.padding is not None:
            whole = self.padding.batch(taken)
        whole |= {name: self.arrays[name] for name in self.same}
        if part is not None and self.augment is not None:
            whole = self.augment(whole, part)
        whole |= {name: normal(whole[name]) for name, normal in self.normal.items()}
        whole |= {name: np.moveaxis(whole[name], 0, axis) for name, axis in self.axes.items()}
        found = {name: np.asarray(whole[name], dtype, order="C") for name, dtype in self.dtypes.items()}
        return found if self.transform is None else self.transform(found, part)

    def column(self, name: str) -> Iterator[np.ndarray]:
        """Yield the samples of an input in blocks, not normalized. Yield nothing for lists and for inputs in `same`."""
        array, rows = self.arrays[name], self.rows(np.arange(len(self)))
        if isinstance(array, Ragged):
            yield from (sample[None] for sample in array.take(rows))
        elif not isinstance(array, Lists) and array.ndim and name not in self.same:
            step = max(BLOCK // max(array.nbytes // max(len(array), 1), 1), 1)
            for start in range(0, len(rows), step):
                yield np.asarray(_take(array, rows[start : start + step]))

    @property
    def ragged(self) -> bool:
        """True if samples may have different lengths, so that batches are padded."""
        return any(isinstance(column, (Lists, Ragged)) for column in self.arrays.values())

    def tell_padding(self, tell: Tell) -> None:
        """Warn if samples are padded and the model takes no mask, and report masks that are computed."""
        if self.padding is not None and self.padding.note:
            tell(self.padding.note, 0)
        sequences = self.sequences
        column = None if sequences is None or sequences.told_ends else self.arrays[sequences.tokens]
        if sequences is not None and isinstance(column, Lists) and np.ptp(column.lengths):
            tell(
                f"'{sequences.tokens}' has {column.lengths.min()} to {column.shape[1]} tokens in a sample. Batches are "
                f"padded with {sequences.fill[sequences.tokens]}, and the model reads the padding like other "
                "tokens, because it takes no mask",
                0,
            )

    def digest(self) -> str:
        """Return a CRC-32 of the names, dtypes, shapes and values of all arrays, as eight hexadecimal digits.

        Arrays are read in blocks, so that data in files may be larger than memory.
        """
        check = 0 if self.samples is None else zlib.crc32(self.samples.data)
        for name, column in sorted(self.arrays.items()):
            check = zlib.crc32(f"{name} {column.dtype.str} {column.shape}".encode(), check)
            if isinstance(column, Pictures):
                check = column.digest(check)
            else:
                for _, block in chain(*map(blocks, _arrays_of(column))):
                    check = zlib.crc32(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data, check)
        return f"{check:08x}"

    def preprocessing(self, terms: Sequence[Term]) -> Preprocessing:
        """Return the preprocessing to store with a model that is trained on the data.

        It contains the class names of each output that a loss in `terms` reads, if the data name the classes.
        """
        classes = {term.output: self.names[term.label] for term in terms if term.label in self.names}
        forms = [column.resize for column in self.arrays.values() if isinstance(column, Pictures)]
        return Preprocessing(classes, self.normal, forms[0] if forms else self.resize, self.order)

    def prepared_by(self, options: SampleOptions) -> str:
        """Return a description of how samples are prepared, for comparing runs; "" if they are used unchanged."""
        said: dict[str, object] = {label: list(names) for label, names in self.names.items()}
        said |= {name: each.to_json() for name, each in self.normal.items()}
        transform = None if self.transform is None else self.transform.digest()
        asked = {"augment": options.augment, "balance": options.balance, "normalize": options.normalize}
        said |= {name: each for name, each in {**asked, "transform": transform}.items() if each}
        return strict_json.dumps(said) if said else ""

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows in `arrays` of the samples with the given indices."""
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
    samples: SampleOptions | None = None,
    known: Preprocessing | None = None,
    unread: Collection[str] = (),
    elsewhere: Collection[str] = (),
    recurrent: Recurrent = NOT_RECURRENT,
    trains: bool = True,
    tell: Tell = silent,
) -> Data:
    """Open data for a training model, and check that they fit it.

    Args:
        source: a file: .npz, .csv, .tsv, .jsonl, .parquet, .safetensors or a picture. Or a folder: of .npy files, of
            pictures in a folder for each class, or written by `datasets.Dataset.save_to_disk`. Or an ONNX
            test_data_set_N, or a folder of these.
        inputs: the model's inputs and labels, with their types.
        ranges: input or label -> the integers that it accepts.
        prefix: the prefix of names in the data, such as 'train_'.
        finite: raise an error if the data contain nan or infinity.
        terms: the losses, which determine what labels mean. If the data lack the labels of a causal-lm loss, they are
            computed from the tokens.
        options: the user's options for text and token sequences.
        samples: the user's options for samples. Those that need the whole training data, such as normalization and
            balance, have no effect here.
        known: the preprocessing of the training data: class names, normalizations, the order of columns.
        unread: the names of labels that the data may contain, but that are not read.
        elsewhere: arrays whose names have one of these prefixes are not reported as ignored, because the same file is
            opened a second time for them.
        recurrent: the values that recurrent layers read. Initial states that the data lack are zero.
        trains: True for training: class names whose numbers are unknown are numbered in sorted order. If False, this
            numbering is a guess, so the data must contain as many classes as the model has.
        tell: receives log messages.

    Raises:
        UsageError: the data can't be read or don't fit. The message names file, input and sample.
    """
    path, asked, how, ranges = Path(source), options or SequenceOptions(), samples or SampleOptions(), ranges or {}
    known, labels = known or Preprocessing(), {term.label for term in terms}
    inputs, axes = with_batch_first(inputs, recurrent)
    columns_known = KnownColumns(unread, known.order, how.resize or known.resize or "crop")
    opened = _Source(path, prefix, how.columns, labels, columns_known, tell)
    columns, found, sequences = _gathered(opened, inputs, ranges, terms, asked, axes)
    columns |= zero_states(columns, inputs, recurrent, tell)
    names, others = _number(path, columns, inputs, ranges, terms, found.names, known, trains, tell), found.others
    same = without_samples(columns, inputs)
    padding = None if sequences else padding_of(columns, inputs, terms, same)
    made = {*sequences.made, *sequences.pairs} if sequences else set(padding.masks if padding else ())
    held = {name: column for name, column in columns.items() if name in inputs}
    wanted = {name: value_type for name, value_type in inputs.items() if name not in made}
    named = _as_in_the_data(prefix, held), _as_in_the_data(prefix, wanted), _as_in_the_data(prefix, ranges)
    size, sizes, batch_size = check(path, LoadedColumns(named[0], others), *named[1:], finite)
    _refuse_labels_alone(path, {} if sequences else held, terms)
    ignored = opened.surplus(others, elsewhere)
    if ignored and asked.tokenizer is None:
        tell(f"ignoring arrays of '{path}' that are not model inputs: {shortened(ignored)}", 0)
    dtypes = {name: helper.tensor_dtype_to_np_dtype(dtype_of(value_type)) for name, value_type in inputs.items()}
    if not how.normalize and not known.normal:  # otherwise each batch is normalized from the data's dtype
        columns = {name: _kept(column, dtypes.get(name, column.dtype)) for name, column in columns.items()}
    if batch_size is None and padding is not None and padding.obstacle:
        batch_size = 1
    return Data(
        path, columns, dtypes, size, sizes, batch_size, sequences=sequences, names=names, padding=padding,
        normal=_normal(columns, inputs, known, labels), order={**known.order, **found.order}, resize=known.resize,
        same=same, axes=axes,
    )  # fmt: skip


def _as_in_the_data(prefix: str, by_input: Mapping[str, T]) -> dict[str, T]:
    """Return a map with its keys, the names of inputs, replaced by their names in the data: the prefix is added."""
    return {prefix + name: value for name, value in by_input.items()}


def _normal(
    columns: Mapping[str, Column], inputs: InputTypes, known: Preprocessing, labels: Collection[str]
) -> dict[str, Normalization]:
    """Return a map: input -> its known normalization.

    Pictures without a known normalization are scaled to the range 0 to 1 for inputs of floats.
    """
    pictures = [name for name, column in columns.items() if isinstance(column, Pictures) and is_float(inputs[name])]
    fitting = {name: each for name, each in known.normal.items() if name in columns and name not in labels}
    return {name: Normalization(PIXEL) for name in pictures} | fitting


@dataclass(frozen=True)
class _Source:
    """The path of the data to open, and the settings of the readers."""

    path: Path
    prefix: str
    mapped: Mapping[str, str]
    labels: Collection[str]
    known: KnownColumns
    tell: Tell

    def column(self, name: str) -> str:
        """Return the name in the data of an input or a label."""
        return next((column for column, feed in self.mapped.items() if feed == name), self.prefix + name)

    def surplus(self, others: Iterable[str], elsewhere: Iterable[str]) -> list[str]:
        """Return the arrays to report as ignored, from those that no input is read from. A prefix leaves out others."""
        unread = {self.column(name) for name in self.known.unread}
        chosen = [name for name in others if name not in unread and name.startswith(self.prefix)]
        return [name for name in chosen if not name.startswith(tuple(elsewhere))]

    def read(self, inputs: InputTypes) -> LoadedColumns:
        """Read the columns of `inputs`. In the result they have the names of the inputs, without the prefix."""
        there = {self.column(name): name for name in inputs}
        wanted = {column: inputs[name] for column, name in there.items()}
        order = {self.column(name): columns for name, columns in self.known.order.items()}
        known = KnownColumns([self.column(name) for name in self.known.unread], order, self.known.resize)
        found = _read(self.path, wanted, known, self.labels, self.tell)
        return LoadedColumns(
            {there[column]: each for column, each in found.arrays.items()},
            found.others,
            {there[column]: each for column, each in found.names.items()},
            {there[column]: each for column, each in found.order.items()},
        )

    def check_columns(self, inputs: InputTypes) -> None:
        """Check the option that maps columns to inputs: the model must have each input, and the data each column."""
        for feed in self.mapped.values():
            if feed not in inputs and feed not in self.known.unread:
                hint = suggest(feed, inputs, "inputs and labels")
                raise unknown_name(f"`columns`: the model has no input or label '{feed}'", hint)
        held = names_in(self.path) if self.mapped else None
        for column in self.mapped:
            if held is not None and column not in held:
                hint = suggest(column, held, "columns") if held else "the data have no named columns"
                raise unknown_name(f"`columns`: '{self.path}' has no column '{column}'", hint)


def _number(
    path: Path, columns: dict[str, Column], inputs: InputTypes, ranges: Mapping[str, Range], terms: Sequence[Term],
    told: Mapping[str, Names], known: Preprocessing, trains: bool, tell: Tell,
) -> dict[str, Names]:  # fmt: skip
    """Replace class names in the labels of `columns` by class numbers, and return the class names of each label.

    Args:
        path, inputs, ranges, terms, known, trains, tell: see `open_data`.
        columns: the columns, which are changed.
        told: label -> the class names that the data declare, such as the names of a ClassLabel.

    Raises:
        UsageError: a class name is not one of the model's; the data number the classes differently than the model;
            there are more names than classes; or the numbers of the names are unknown.
    """
    found: dict[str, Names] = {}
    by_folder = any(isinstance(each, Pictures) and isinstance(each.files[0], Path) for each in columns.values())
    for term in terms:
        label, names = term.label, known.classes.get(term.output) if trains else known.names_of(term)
        column = columns.get(label)
        if label in found or label not in inputs or is_float(inputs[label]):
            continue
        guessed = False
        if column is not None and is_text(column):
            texts = np.asarray(column)
            numbers = None if by_folder else as_numbers(path, label, texts, names)
            if numbers is None:
                guessed = names is None and not trains
                numbers, names = numbered(path, label, texts, names)
            columns[label] = numbers
        elif label in told and names not in (None, told[label]):
            classes, of_model = shortened(told[label]), shortened(names or ())
            message = f"'{path}': the classes of '{label}' are {classes}, but those of the model are {of_model}"
            raise mismatch(message, "number the classes as in the data that the model was trained on")
        elif label in told:
            names = told[label]
        if names is None:
            continue
        found[label] = names
        if guessed:
            _check_guess(path, label, names, term.classes)
        _tell_classes(path, label, names, ranges.get(label), tell)
    return found


def _check_guess(path: Path, label: str, names: Names, there: int) -> None:
    """Raise an error if the number of class names in the data is not the number of the model's classes.

    The model does not store the numbers of these names, so the names are numbered in sorted order. If a class were
    missing in the data, other classes would get wrong numbers.
    """
    if len(names) != there:
        model = f"the model {f'has {there} classes, and ' if there else ''}does not store their names"
        hint = "save class numbers instead of names; models that were trained on names store them"
        raise unknown_name(f"'{path}': the class names of '{label}' have no numbers: {shortened(names)}; {model}", hint)


def _tell_classes(path: Path, label: str, names: Names, allowed: Range | None, tell: Tell) -> None:
    """Report the class names of a label. Raise an error if there are more names than the model has classes."""
    there = None if allowed is None or allowed.high is None else allowed.high + 1
    if there is not None and len(names) > there:
        message = f"'{path}': '{label}' has {len(names)} classes ({shortened(names)}), but the model has {there}"
        hint = f"use `classes={len(names)}`, which replaces the last layer of the model by one with as many outputs"
        raise mismatch(message, hint)
    fewer = f"; the model has {there} classes" if there is not None and len(names) < there else ""
    tell(f"classes of '{label}': {shortened(names)}{fewer}", 0)


def _gathered(
    source: _Source, inputs: InputTypes, ranges: Mapping[str, Range], terms: Sequence[Term], options: SequenceOptions,
    axes: Mapping[str, int],
) -> tuple[dict[str, Column], LoadedColumns, Sequences | None]:  # fmt: skip
    """Read the samples of all inputs, including text and token sequences.

    Returns:
        Input -> its samples, ready for batches; the result of the reader; and the rules that make a batch of token
        sequences, or None for data without sequences.
    """
    path, prefix, tell = source.path, source.prefix, source.tell
    source.check_columns(inputs)
    tokens = tokens_of(inputs, ranges, terms)
    columns: dict[str, Column] = {}
    if options.tokenizer is not None:
        check_there(path)
        options, texts = read_text(path, options, tokens, terms, tell, prefix)
        columns |= texts
    elif tokens is not None:
        _refuse_text(path, prefix + tokens)
    mapped = set(source.mapped.values())
    gone = {prefix + name for name in columns}  # not read: these inputs come from the text, or follow from the tokens
    follow = {*following(inputs, tokens, terms), *masks_of(inputs, terms)}
    gone |= absent(path, {prefix + name for name in follow if name not in mapped})
    found = source.read({name: kind for name, kind in inputs.items() if prefix + name not in gone})
    arrays = {name: single(array, inputs, name) for name, array in found.arrays.items()}
    columns |= arrays_batch_first(path, arrays, inputs, axes, prefix)
    tokens = tokens or uneven(columns, inputs, terms)
    sequences = None
    if options != SequenceOptions():
        _refuse_ragged(path, columns)
    elif _is_ragged(columns, inputs):
        columns |= {name: Ragged.of_lists(column) for name, column in columns.items() if isinstance(column, Lists)}
        tokens = None
    if tokens in columns and tokens is not None:
        plain = {name: column for name, column in columns.items() if not isinstance(column, (Pictures, Ragged))}
        lists, sequences = Preparation(path, tokens, inputs, terms, options, tell)(plain)
        columns |= lists
    elif tokens is None and options != SequenceOptions():
        hint = "name the input of tokens input_ids, or leave these options out"
        raise conflict("`max_length`, `pack` and `pad_id` are for tokens, but the model has no input of tokens", hint)
    return columns, found, sequences


def names_in(source: str | Path) -> list[str] | None:
    """Return the names of the arrays or columns in data; None for ONNX test sets, whose arrays may have no names.

    Raises:
        UsageError: the data can't be read.
    """
    path = Path(source)
    if path.is_dir() and onnx_test_sets.folders(path):
        return None
    return _read(path, {}, KnownColumns(), (), silent).others


def holds_samples(path: Path) -> bool:
    """Return True for a folder or a data file.

    An .npz file is not counted as a data file, because it may hold any arrays.
    """
    return path.is_dir() or path.suffix.lower() in {*FORMATS, *SUFFIXES} - {".npz"}


def absent(path: Path, names: Collection[str]) -> set[str]:
    """Return those of `names` that the data lack; an empty set for ONNX test sets, whose arrays may have no names."""
    held = names_in(path) if names else []
    if held is None:
        return set()
    return {n for n in names if n not in held and not any(each.startswith((f"{n}_", f"{n}[")) for each in held)}


def holds_text(path: Path, prefix: str = "") -> bool:
    """Return True if the data have columns of text for a tokenizer."""
    return not {prefix + name for name in TEXTS}.isdisjoint(names_in(path) or ())


def _refuse_text(path: Path, tokens: str) -> None:
    """Raise an error if the data contain text, but not the column `tokens`."""
    held = names_in(path) or []
    texts = [name for name in held if name in TEXTS]
    if texts and tokens not in held:
        raise missing_value(f"'{path}' has no '{tokens}'", f"pass a `tokenizer` for the text in {shortened(texts)}")


def _is_ragged(columns: Mapping[str, Column], inputs: InputTypes) -> bool:
    """Return True if samples are arrays of different shapes, and not only sequences of whole numbers."""
    uneven = [name for name, column in columns.items() if isinstance(column, (Lists, Ragged))]
    return any(isinstance(columns[name], Ragged) or (name in inputs and is_float(inputs[name])) for name in uneven)


def _refuse_ragged(path: Path, columns: Mapping[str, Column]) -> None:
    """Raise an error if samples are arrays of different shapes, which the options for sequences don't fit."""
    name = next((name for name, column in columns.items() if isinstance(column, Ragged)), None)
    if name is not None:
        options = "`tokenizer`, `max_length`, `pack` and `pad_id`"
        hint = "leave these options out"
        raise conflict(f"'{path}': '{name}' holds arrays of different shapes, but {options} are for tokens", hint)


def _refuse_labels_alone(path: Path, columns: Mapping[str, Column], terms: Sequence[Term]) -> None:
    """Raise an error if samples differ in the sizes of labels, but not in the sizes of the model's inputs."""
    labels = {name for term in terms for name in (term.label, *term.more)}
    uneven = [name for name, column in columns.items() if isinstance(column, (Lists, Ragged))]
    if uneven and labels.issuperset(uneven):
        hint = "pad the lists to the same length"
        raise wrong_shape(f"'{path}': '{uneven[0]}' holds lists of different lengths, which the model can't take", hint)


def _read(path: Path, inputs: InputTypes, known: KnownColumns, labels: Collection[str], tell: Tell) -> LoadedColumns:
    """Read the columns of `inputs`, and the names of the others. Pictures are read only if `inputs` has any."""
    check_there(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        if is_arrow_folder(path):
            return read_arrow_folder(path, inputs, known)
        with reading(path, "a folder of data", "check its permissions"):
            of_pictures = not any(path.rglob("*.npy")) and picture_folder.is_picture_folder(path)
        if not of_pictures and onnx_test_sets.folders(path):
            return onnx_test_sets.read(path, inputs)
        if not of_pictures:
            return _cut(path, read_npy_folder(path, _with_sizes(inputs)), inputs)
    elif suffix in {*FORMATS, *SUFFIXES}:
        check_regular(path)
    if path.is_dir() or suffix in SUFFIXES:
        return picture_folder.read(path, inputs, labels, known.resize, tell) if inputs else LoadedColumns({}, [])
    if suffix in TABLES:
        return TABLES[suffix](path, inputs, known)
    if suffix in ARRAYS:
        return _cut(path, ARRAYS[suffix](path, _with_sizes(inputs)), inputs)
    formats = f"use {', '.join(FORMATS)}, or a folder"
    hint = "put it into a folder, and name it after the input: FOLDER/INPUT.npy" if suffix == ".npy" else formats
    raise wrong_type(f"onnxgrad can't read data of the format of '{path}'", hint)


def _with_sizes(inputs: InputTypes) -> InputTypes:
    """Return the inputs, and for each input `x` an entry `x_sizes`, the name of the array with its samples' sizes."""
    return {**{name + SIZES: kind for name, kind in inputs.items()}, **inputs}


def _cut(path: Path, found: LoadedColumns, inputs: InputTypes) -> LoadedColumns:
    """Split arrays in which samples of different shapes are concatenated.

    An array of an input is split if it has fewer axes than the input and the data have the sizes of its samples.

    Raises:
        UsageError: the sizes of the samples don't fit the array.
    """
    arrays, others = dict(found.arrays), list(found.others)
    for name in [name for name in arrays if name not in inputs]:
        sizes, feed = arrays.pop(name), name.removesuffix(SIZES)
        values = arrays.get(feed)
        if isinstance(values, np.ndarray) and values.ndim < len(shape_of(inputs[feed]) or ()):
            try:
                arrays[feed] = cut(values, np.asarray(sizes))
            except ValueError as error:
                hint = f"save the concatenated samples as '{feed}', and the size of each as '{name}'"
                raise wrong_shape(f"'{path}': '{name}' does not fit '{feed}': {error}", hint) from None
        else:
            others.append(name)
    return found._replace(arrays=arrays, others=others)


def _arrays_of(column: np.ndarray | Lists | Ragged) -> tuple[np.ndarray, ...]:
    """Return the arrays that hold a column's values and layout."""
    if isinstance(column, Ragged):
        return column.elements.values, column.shapes
    return (column.values, column.offsets) if isinstance(column, Lists) else (column,)


def _kept(array: Column, dtype: np.dtype) -> Column:
    """Cast an array in memory to the model's dtype if that takes no more memory. Memory-mapped arrays are unchanged."""
    if isinstance(array, Ragged):
        elements = array.elements
        return replace(array, elements=replace(elements, values=np.asarray(_kept(elements.values, dtype))))
    if isinstance(array, (Lists, Pictures)):
        return array
    in_file = isinstance(array, np.memmap)
    return array if in_file or dtype.itemsize > array.itemsize else np.asarray(array, dtype, order="C")


def _take(array: Column, indices: np.ndarray) -> np.ndarray | list[np.ndarray]:
    """Return the samples `indices` of an array.

    numpy's `take` is faster than indexing. But `take` first copies the whole array if it is not contiguous and aligned.
    """
    if isinstance(array, (Lists, Ragged, Pictures)):
        return array.take(indices)
    if not array.ndim:
        return array
    plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    return array.take(indices, axis=0) if plain else array[indices]


IN_MEMORY = Path("the arrays")
"""The name by which messages refer to data that do not come from a file."""


def data_of(
    arrays: Mapping[str, np.ndarray],
    inputs: InputTypes,
    ranges: Mapping[str, Range],
    finite: bool,
    recurrent: Recurrent,
) -> Data:
    """Return data whose samples are arrays in memory, with the samples along the first axis.

    Args:
        arrays: input -> array; arrays with other names are ignored.
        inputs, ranges, finite, recurrent: see `open_data`.

    Raises:
        UsageError: the arrays don't fit the inputs.
    """
    inputs, axes = with_batch_first(inputs, recurrent)
    held = {name: single(np.asarray(array), inputs, name) for name, array in arrays.items() if name in inputs}
    held |= arrays_batch_first(IN_MEMORY, held, inputs, axes)
    held |= zero_states(held, inputs, recurrent, silent)
    others = [name for name in arrays if name not in inputs]
    sizes = check(IN_MEMORY, LoadedColumns(held, others), inputs, ranges, finite)
    dtypes = {name: helper.tensor_dtype_to_np_dtype(dtype_of(value_type)) for name, value_type in inputs.items()}
    return Data(IN_MEMORY, held, dtypes, *sizes, axes=axes)
