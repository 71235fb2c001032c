"""Data that are known to fit a training model, in any format, of which batches are taken by the number of samples."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from onnx import helper

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.choices import Resize
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import UsageError, suggest
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.data import arrow_folder, onnx_test_sets, parquet, picture_folder
from onnxgrad_cli.training.data.augmentation import Augmentations
from onnxgrad_cli.training.data.class_names import Names, as_numbers, in_words, is_text, numbered
from onnxgrad_cli.training.data.columns import Chosen, KnownColumns, single
from onnxgrad_cli.training.data.input_types import InputTypes, Range
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.normalization import PIXEL, Normalization
from onnxgrad_cli.training.data.part import Part
from onnxgrad_cli.training.data.pictures import SUFFIXES, Pictures
from onnxgrad_cli.training.data.preprocessing import Preprocessing
from onnxgrad_cli.training.data.reading import Column, Found, check_regular, reading
from onnxgrad_cli.training.data.sample_options import SampleOptions
from onnxgrad_cli.training.data.sequences import Preparation, SequenceOptions, Sequences, following, tokens_of, uneven
from onnxgrad_cli.training.data.states import (
    NOT_RECURRENT,
    Recurrent,
    arrays_batch_first,
    batch_axes,
    with_batch_first,
    zero_states,
)
from onnxgrad_cli.training.data.text import TEXTS, read_text
from onnxgrad_cli.training.data.transform import Transformed
from onnxgrad_cli.training.data.validate import BLOCK, blocks, check, without_samples

T = TypeVar("T")

FORMATS = {
    ".jsonl": "json_lines",
    ".npz": "npz",
    ".csv": "csv_file",
    ".tsv": "csv_file",
    ".parquet": "parquet",
    ".safetensors": "safetensors_file",
}
"""The suffixes of files, with the modules that read them."""

TABLES = ("json_lines", "csv_file")
"""Of these modules those of columns, some of which may be no input's."""


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
        names: label -> the names of its classes, where it has some.
        normal: input -> what brings its numbers to mean 0 and deviation 1.
        augment: what is done to pictures in training alone.
        transform: a user's function of each batch.
        order: input -> the columns of a table that it took as they stood there, or took of other data before.
        resize: what became of picture files of other data before; None where there were none.
        same: inputs whose array is fed whole in each step, the same for all samples.
        axes: input -> the axis of its batch, of those that don't have it first; their arrays do.
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

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: np.ndarray, part: Part | None = None) -> dict[str, np.ndarray]:
        """Some samples, as a run is fed them: contiguous copies in the model's types.

        Args:
            indices: the numbers of the samples, integers of shape (n,).
            part: of a training, what is dealt out, of which random changes follow; None changes nothing at random.

        Raises:
            UsageError: a picture can't be read, or the user's function fails.
        """
        rows = self.rows(indices)
        taken = {name: _take(array, rows) for name, array in self.arrays.items() if name not in self.same}
        whole: dict[str, Any] = dict(taken)
        if self.sequences is not None:
            tokens = self.arrays[self.sequences.tokens]
            batch = rows if part is None or part.batch is None else self.rows(part.batch)
            whole = self.sequences.batch(taken, tokens.longest(batch) if isinstance(tokens, Lists) else 0)
        whole |= {name: self.arrays[name] for name in self.same}
        if part is not None and self.augment is not None:
            whole = self.augment(whole, part)
        whole |= {name: normal(whole[name]) for name, normal in self.normal.items()}
        whole |= {name: np.moveaxis(whole[name], 0, axis) for name, axis in self.axes.items()}
        found = {name: np.asarray(whole[name], dtype, order="C") for name, dtype in self.dtypes.items()}
        return found if self.transform is None else self.transform(found, part)

    def column(self, name: str) -> Iterator[np.ndarray]:
        """The samples of an input as they were read, in blocks."""
        array, rows = self.arrays[name], self.rows(np.arange(len(self)))
        if isinstance(array, Lists) or not array.ndim or name in self.same:
            return
        step = max(BLOCK // max(array.nbytes // max(len(array), 1), 1), 1)
        for start in range(0, len(rows), step):
            taken = _take(array, rows[start : start + step])
            yield np.asarray(taken)

    @property
    def ragged(self) -> bool:
        """Whether samples may be of different lengths, so that some of a batch end before others."""
        return any(isinstance(column, Lists) for column in self.arrays.values())

    def tell_padding(self, tell: Tell) -> None:
        """Tell where a model takes what is padded for tokens: what it says of a sample then follows from its batch."""
        sequences = self.sequences
        column = None if sequences is None or sequences.told_ends else self.arrays[sequences.tokens]
        if sequences is not None and isinstance(column, Lists) and np.ptp(column.lengths):
            tell(
                f"'{sequences.tokens}' has {column.lengths.min()} to {column.shape[1]} tokens in a sample, which are "
                f"padded with {sequences.fill[sequences.tokens]} in each batch; the model takes no mask, and reads "
                "these like others",
                0,
            )

    def digest(self) -> str:
        """Eight digits that tell these samples from others: a CRC-32 of names, types, shapes and all bytes.

        It is read in blocks, so that data in files may be larger than memory.
        """
        check = 0 if self.samples is None else zlib.crc32(self.samples.data)
        for name, column in sorted(self.arrays.items()):
            check = zlib.crc32(f"{name} {column.dtype.str} {column.shape}".encode(), check)
            if isinstance(column, Pictures):
                check = column.digest(check)
                continue
            for array in (column.values, column.offsets) if isinstance(column, Lists) else (column,):
                for _, block in blocks(array):
                    check = zlib.crc32(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data, check)
        return f"{check:08x}"

    def preprocessing(self, terms: Sequence[Term]) -> Preprocessing:
        """What is done to the data before a model sees them, for the losses `terms`."""
        classes = {term.output: self.names[term.label] for term in terms if term.label in self.names}
        forms = [column.resize for column in self.arrays.values() if isinstance(column, Pictures)]
        return Preprocessing(classes, self.normal, forms[0] if forms else self.resize, self.order)

    def prepared_by(self, options: SampleOptions) -> str:
        """What tells runs apart that see the same samples otherwise; "" where they are seen as they are."""
        said: dict[str, object] = {label: list(names) for label, names in self.names.items()}
        said |= {name: each.to_json() for name, each in self.normal.items()}
        transform = None if self.transform is None else self.transform.digest()
        asked = {"augment": options.augment, "balance": options.balance, "normalize": options.normalize}
        said |= {name: each for name, each in {**asked, "transform": transform}.items() if each}
        return strict_json.dumps(said) if said else ""

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
    samples: SampleOptions | None = None,
    known: Preprocessing | None = None,
    unread: Collection[str] = (),
    elsewhere: Collection[str] = (),
    recurrent: Recurrent = NOT_RECURRENT,
    trains: bool = True,
    tell: Tell = silent,
) -> Data:
    """Open data for a training model, and make sure that they fit it.

    Args:
        source: an .npz, .csv, .tsv, .jsonl, .parquet or .safetensors file, a picture, a folder of .npy files, one of
            pictures, in which each class is a folder, one that `datasets.Dataset.save_to_disk` has written, or an ONNX
            test_data_set_N or a folder of these.
        inputs: what is fed, with its types; see `input_types_of`.
        ranges: the whole numbers that inputs may hold; see `ranges_of`.
        prefix: what the names in the data have before those of the inputs, such as 'train_'.
        finite: refuse nan and infinity.
        terms: the losses, which say what labels of tokens are.
        options: how text and lists of tokens become samples.
        samples: how columns become inputs; what is asked of the training data as a whole, such as a normalization or a
            balance, is not done here.
        known: what is known of the data: names of classes, normalizations, the order of columns.
        unread: what labels are called that the data may hold, and that are not wanted.
        elsewhere: what names begin with that are not reported as ignored, because the same file is opened twice.
        recurrent: what recurrent layers read, see `recurrent_values`; initial states that the data lack are zero.
        trains: whether the numbers of names are free where nothing is known of them, as in a training, whose model
            keeps them; elsewhere they are a guess, and refused where names are missing.
        tell: takes what is narrated.

    Raises:
        UsageError: they can't be read, or don't fit; the message names file, input and sample.
    """
    path, asked, how, ranges = Path(source), options or SequenceOptions(), samples or SampleOptions(), ranges or {}
    known, axes = known or Preprocessing(), batch_axes(inputs, recurrent)
    inputs = with_batch_first(inputs, axes)
    labels = {term.label for term in terms}
    source_ = _Source(path, how, labels, how.resize or known.resize or "crop", unread, known.order, tell)
    columns, found, sequences = _gathered(source_, inputs, ranges, prefix, terms, asked, axes)
    columns |= zero_states(columns, inputs, recurrent, tell)
    names, others = _number(path, columns, inputs, ranges, terms, found.names, known, trains, tell), found.others
    made = {*sequences.made, *sequences.pairs} if sequences else set()
    held = {name: column for name, column in columns.items() if name in inputs}
    wanted = {name: value_type for name, value_type in inputs.items() if name not in made}
    named = _as_in_the_data(prefix, held), _as_in_the_data(prefix, wanted), _as_in_the_data(prefix, ranges)
    checked = check(path, Found(named[0], others), *named[1:], finite)
    _refuse_uneven(path, {} if sequences else held)
    ignored = [name for name in others if name not in unread and not name.startswith(tuple(elsewhere))]
    if ignored and asked.tokenizer is None:
        tell(f"ignoring arrays of '{path}' that are not model inputs: {_listed(ignored)}", 0)
    dtypes = {name: helper.tensor_dtype_to_np_dtype(dtype_of(value_type)) for name, value_type in inputs.items()}
    if how.normalize or known.normal:  # batch by batch, from what was read
        arrays = columns
    else:
        arrays = {name: _kept(column, dtypes.get(name, column.dtype)) for name, column in columns.items()}
    return Data(
        path, arrays, dtypes, checked.size, checked.sizes, checked.batch_size, sequences=sequences, names=names,
        normal=_normal(columns, inputs, known, labels), order={**known.order, **found.order}, resize=known.resize,
        same=without_samples(columns, inputs), axes=axes,
    )  # fmt: skip


def _as_in_the_data(prefix: str, by_input: Mapping[str, T]) -> dict[str, T]:
    """What is known of inputs, by the names that they have in the data."""
    return {prefix + name: value for name, value in by_input.items()}


def _normal(
    columns: Mapping[str, Column], inputs: InputTypes, known: Preprocessing, labels: Collection[str]
) -> dict[str, Normalization]:
    """How columns are normalized: as it is known, or pictures that become floats to between 0 and 1."""
    pictures = [name for name, column in columns.items() if isinstance(column, Pictures) and is_float(inputs[name])]
    fitting = {name: each for name, each in known.normal.items() if name in columns and name not in labels}
    return {name: Normalization(PIXEL) for name in pictures} | fitting


@dataclass(frozen=True)
class _Source:
    """Data that are opened: where they are, and what their readers have to know of them besides the inputs."""

    path: Path
    samples: SampleOptions
    labels: Collection[str]
    resize: Resize
    unread: Collection[str]
    order: Chosen
    tell: Tell

    def read(self, inputs: InputTypes, prefix: str = "") -> Found:
        """The columns of `inputs`, by the inputs' names without the prefix."""
        called = {feed: column for column, feed in self.samples.columns.items()}
        there = {called.get(name, prefix + name): name for name in inputs}
        unread = [called.get(name, prefix + name) for name in self.unread]
        order = {called.get(name, prefix + name): columns for name, columns in self.order.items()}
        wanted = {column: inputs[name] for column, name in there.items()}
        found = _read(self.path, wanted, self, KnownColumns(unread, order))
        return Found(
            {there[column]: each for column, each in found.arrays.items()},
            found.others,
            {there[column]: each for column, each in found.names.items()},
            {there[column]: each for column, each in found.order.items()},
        )

    def check_columns(self, inputs: InputTypes) -> None:
        """Refuse columns that are to be inputs which there are not, or that there are not themselves."""
        columns = self.samples.columns
        for feed in columns.values():
            if feed not in inputs and feed not in self.unread:
                raise UsageError(f"`columns`: the model is fed no '{feed}'", suggest(feed, inputs, "inputs and labels"))
        held = names_in(self.path) if columns else None
        for column in columns:
            if held is not None and column not in held:
                hint = suggest(column, held, "names there") if held else "nothing there has a name"
                raise UsageError(f"`columns`: '{self.path}' has no '{column}'", hint)


def _number(
    path: Path, columns: dict[str, Column], inputs: InputTypes, ranges: Mapping[str, Range], terms: Sequence[Term],
    told: Mapping[str, Names], known: Preprocessing, trains: bool, tell: Tell,
) -> dict[str, Names]:  # fmt: skip
    """Number the classes of labels that are names, in `columns`; and the names of the classes of each label."""
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
            raise UsageError(
                f"'{path}': the classes of '{label}' are {in_words(told[label])}, and not {in_words(names or ())}",
                "they are numbered otherwise than those that the model was trained on",
            )
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
    """Refuse names that the model does not know where data alone can't tell their numbers: others may be missing."""
    if len(names) != there:
        apart = f"tells {there} classes apart, and " if there else ""
        raise UsageError(
            f"'{path}': '{label}' has the names {in_words(names)}; the model {apart}does not say what its classes are "
            "called, so nothing tells which these are",
            "save the numbers of the classes in place of names; a model that was trained on names knows them",
        )


def _tell_classes(path: Path, label: str, names: Names, allowed: Range | None, tell: Tell) -> None:
    """Tell the names of classes; as many as the model has are wanted, and no more are taken."""
    there = None if allowed is None or allowed.high is None else allowed.high + 1
    if there is not None and len(names) > there:
        raise UsageError(
            f"'{path}': '{label}' has the {len(names)} classes {in_words(names)}; the model tells {there} apart",
            f"`classes={len(names)}` gives it a last layer for them",
        )
    fewer = f"; the model tells {there} apart" if there is not None and len(names) < there else ""
    tell(f"classes of '{label}': {in_words(names)}{fewer}", 0)


def _gathered(
    source: _Source,
    inputs: InputTypes,
    ranges: Mapping[str, Range],
    prefix: str,
    terms: Sequence[Term],
    options: SequenceOptions,
    axes: Mapping[str, int],
) -> tuple[dict[str, Column], Found, Sequences | None]:
    """The columns of inputs, as what they were read, and how batches are made of sequences if there are some."""
    path, tell = source.path, source.tell
    source.check_columns(inputs)
    tokens = tokens_of(inputs, ranges, terms)
    columns: dict[str, Column] = {}
    if options.tokenizer is not None:
        _check_there(path)
        options, texts = read_text(path, options, tokens, terms, tell, prefix)
        columns |= texts
    elif tokens is not None:
        _refuse_text(path, prefix + tokens)
    mapped = set(source.samples.columns.values())
    gone = {prefix + name for name in columns}  # what follows from tokens is no column that is left over
    gone |= absent(path, {prefix + name for name in following(inputs, tokens, terms) if name not in mapped})
    found = source.read({name: kind for name, kind in inputs.items() if prefix + name not in gone}, prefix)
    arrays = {name: single(array, inputs, name) for name, array in found.arrays.items()}
    columns |= arrays_batch_first(path, arrays, inputs, axes, prefix)
    tokens = tokens or uneven(columns, inputs, terms)
    sequences = None
    if tokens in columns:
        plain = {name: column for name, column in columns.items() if not isinstance(column, Pictures)}
        lists, sequences = Preparation(path, tokens, inputs, terms, options, tell)(plain)
        columns |= lists
    elif tokens is None and options != SequenceOptions():
        raise UsageError(
            "`max_length`, `pack` and `pad_id` are of tokens, and the model has no input of tokens",
            "call it input_ids, or leave these out",
        )
    return {**columns, **_empty(columns, inputs)}, found, sequences


def names_in(source: str | Path) -> list[str] | None:
    """What the arrays or columns of data are called; None where their order tells, as in ONNX test sets.

    Raises:
        UsageError: they can't be read.
    """
    path = Path(source)
    return None if path.is_dir() and onnx_test_sets.folders(path) else _read(path, {}).others


def holds_samples(path: Path) -> bool:
    """Whether a file or folder is of a format of samples to train on, and no .npz, which may hold any arrays."""
    return path.is_dir() or path.suffix.lower() in {*FORMATS, *SUFFIXES, ".parquet"} - {".npz"}


def absent(path: Path, names: Collection[str]) -> set[str]:
    """Of inputs those that data do not name; of data whose order tells, none."""
    held = names_in(path) if names else []
    if held is None:
        return set()
    parts = {name: (f"{name}_", f"{name}[") for name in names}
    return {name for name in names if name not in held and not any(each.startswith(parts[name]) for each in held)}


def holds_text(path: Path, prefix: str = "") -> bool:
    """Whether data have columns of text, which a tokenizer makes tokens of."""
    return not {prefix + name for name in TEXTS}.isdisjoint(names_in(path) or ())


def _refuse_text(path: Path, tokens: str) -> None:
    """Refuse data that hold text in place of tokens."""
    held = names_in(path) or []
    texts = [name for name in held if name in TEXTS]
    if texts and tokens not in held:
        raise UsageError(f"'{path}' has no '{tokens}'", f"for the text in {_listed(texts)} name a `tokenizer`")


def _refuse_uneven(path: Path, columns: Mapping[str, Column]) -> None:
    """Refuse lists of different lengths of which nothing says how long their samples are."""
    for name, column in columns.items():
        if isinstance(column, Lists):
            raise UsageError(
                f"'{path}': '{name}' holds lists of different lengths, and no input does", "pad them to one length"
            )


def _check_there(path: Path) -> None:
    with reading(path, "data", "check its name"):
        there = path.exists()
    if not there:
        raise UsageError(f"no such file or folder: '{path}'")


def _read(path: Path, inputs: InputTypes, source: _Source | None = None, known: KnownColumns | None = None) -> Found:
    """The columns of `inputs`; without a source, those of none are asked for, and the names of all are wanted."""
    _check_there(path)
    known = known or KnownColumns()
    resize: Resize = "crop" if source is None else source.resize
    if path.is_dir():
        if arrow_folder.is_arrow_folder(path):
            return arrow_folder.read(path, inputs, resize, known)
        with reading(path, "a folder of data", "check its permissions"):
            of_pictures = not any(path.rglob("*.npy")) and picture_folder.is_picture_folder(path)
        if of_pictures:
            if source is None:
                return Found({}, [])
            return picture_folder.read(path, inputs, source.labels, resize, source.tell)
        name = "onnx_test_sets" if onnx_test_sets.folders(path) else "npy_folder"
    elif path.suffix.lower() in SUFFIXES:
        check_regular(path)
        return Found({}, []) if source is None else picture_folder.read_one(path, inputs, source.labels, resize)
    elif path.suffix.lower() == ".parquet":
        check_regular(path)
        return parquet.read(path, inputs, resize, known)
    elif path.suffix.lower() in FORMATS:
        check_regular(path)
        name = FORMATS[path.suffix.lower()]
    else:
        hint = (
            "put it in a folder, called as the input" if path.suffix == ".npy" else f"{', '.join(FORMATS)}, or a folder"
        )
        raise UsageError(f"'{path}' is of no format that data are read from", hint)
    more = [known] if name in TABLES else []
    return import_module(f"onnxgrad_cli.training.data.{name}").read(path, inputs, *more)


def _empty(arrays: Mapping[str, Column], inputs: InputTypes) -> dict[str, np.ndarray]:
    """Samples for inputs that data need not have: an empty past has no numbers, as many samples as there may be."""
    size = next((len(array) for array in arrays.values() if array.ndim), 0)
    shapes = {name: (shape_of(value_type) or ())[1:] for name, value_type in inputs.items() if name not in arrays}
    static = {name: [dim for dim in shape if isinstance(dim, int)] for name, shape in shapes.items() if 0 in shape}
    return {
        name: np.zeros([size, *dims], helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name])))
        for name, dims in static.items()
        if len(dims) == len(shapes[name])
    }


def _kept(array: Column, dtype: np.dtype) -> Column:
    """An array in memory is cast once, if it does not grow by it; one in a file stays there."""
    if isinstance(array, (Lists, Pictures)):
        return array
    in_file = isinstance(array, np.memmap)
    return array if in_file or dtype.itemsize > array.itemsize else np.asarray(array, dtype, order="C")


def _take(array: Column, indices: np.ndarray) -> np.ndarray | list[np.ndarray]:
    """Samples of an array; `take` is faster than an index, but copies an array whole that is not laid out plainly."""
    if isinstance(array, (Lists, Pictures)):
        return array.take(indices)
    if not array.ndim:
        return array
    plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    return array.take(indices, axis=0) if plain else array[indices]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
