"""Pad token sequences in each batch, and compute inputs such as the attention mask if the data lack them.

In addition to tokens, a language model takes an attention mask, position ids and labels. They can be computed from the
tokens, so the data need not have them. Sequences are right-padded to the longest sequence of the batch. In the padding
the mask is 0, and the labels have the value that the loss ignores.

If several samples are packed into one row, a pair mask keeps each token from attending to other samples. A pair mask
has an entry for each pair of positions, which allows or forbids the first to attend to the second. The pair mask of a
packed row is block-diagonal, with a lower triangle for each sample. Source: M. Krell et al., Efficient Sequence Packing
without Cross-contamination, 2021, arXiv:2107.02027, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.data.input_types import InputTypes, Range
from onnxgrad_cli.data.lists import Lists, padded
from onnxgrad_cli.errors import conflict, no_data, wrong_shape
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.options.data import SequenceOptions

Made = Literal["mask", "positions", "zeros"]
"""The kinds of inputs that are computed from the length of a sequence.

'mask' is all ones, 'positions' is 0, 1, 2, ..., and 'zeros' is all zeros.
"""

CAUSAL = "causal-lm"
"""The name of the loss whose labels are the tokens themselves."""

TOKENS = "input_ids"
"""The name that exporters of language models give to the token input."""

KNOWN: Mapping[str, Made] = {
    "attention_mask": "mask", "input_mask": "mask", "position_ids": "positions",
    "token_type_ids": "zeros", "segment_ids": "zeros",
}  # fmt: skip
"""Name that exporters give to an input that can be computed from the tokens -> the kind of the input."""

SAMPLES = "sample of each token"
"""The key of a further column of packed rows: the index of each token's sample. It is not an input of the model."""

Columns = Mapping[str, np.ndarray | Lists]


@dataclass(frozen=True)
class Sequences:
    """The rules for converting the sequences of a batch to arrays.

    Attributes:
        tokens: the name of the token input.
        made: input that is computed from the lengths of the token sequences -> its kind.
        fill: input -> its padding value; 0 for inputs that are not listed.
        length: the sequence length that the model requires; None if it takes any length.
        pairs: pair mask to compute, which says for each pair of positions if the first may attend to the second -> its
            dtype and rank.
        told_ends: True if padding can't influence the result, because the model takes a mask, or because the loss is
            causal, so that no token attends to the padding after it.
    """

    tokens: str
    made: Mapping[str, Made]
    fill: Mapping[str, int]
    length: int | None = None
    pairs: Mapping[str, tuple[np.dtype, int]] = field(default_factory=dict)
    told_ends: bool = True

    def batch(self, taken: Mapping[str, np.ndarray | list[np.ndarray]], longest: int = 0) -> dict[str, np.ndarray]:
        """Convert the samples of a batch to arrays: pad sequences, and compute the inputs that the data lack.

        Args:
            taken: input -> its samples: one array (N, ...), or a list with an array (length,) for each sample.
            longest: pad to at least this length, because other processes may take longer samples of the same batch.
        """
        lengths = [len(row) for row in taken[self.tokens]]
        every = {**taken, **{name: [_made(kind, length) for length in lengths] for name, kind in self.made.items()}}
        longest = self.length or max([longest, *lengths])
        samples = every.pop(SAMPLES, [np.zeros(length, np.int64) for length in lengths])
        masks = {
            name: pair_mask([np.asarray(row) for row in samples], longest, dtype, rank)
            for name, (dtype, rank) in self.pairs.items()
        }
        return masks | {
            name: padded(column, [longest], self.fill.get(name, 0)) if isinstance(column, list) else column
            for name, column in every.items()
        }


def _made(kind: Made, places: int) -> np.ndarray:
    if kind == "positions":
        return np.arange(places)
    return np.full(places, kind == "mask", np.int64)


# -- inputs of the model -----------------------------------------------------------------------------------------------


def tokens_of(inputs: InputTypes, ranges: Mapping[str, Range], terms: Sequence[Term]) -> str | None:
    """Return the name of the token input, or None.

    It is an input of integers with the shape [samples, positions]. It has the usual name `TOKENS`, or is the only such
    input that indexes a table (`ranges` has the inputs that do).
    """
    labels = {term.label for term in terms}
    found = [name for name in inputs if name not in labels and name not in KNOWN and _has_places(inputs, name)]
    indexing = [name for name in found if name in ranges]
    return TOKENS if TOKENS in found else indexing[0] if len(indexing) == 1 else None


def uneven(columns: Mapping[str, object], inputs: InputTypes, terms: Sequence[Term]) -> str | None:
    """Return the first integer input [samples, positions] whose column holds lists of different lengths, or None.

    The caller uses it as the token input if `tokens_of` finds none.
    """
    labels = {term.label for term in terms}
    held = [name for name in inputs if isinstance(columns.get(name), Lists) and name not in labels]
    return next((name for name in held if _has_places(inputs, name)), None)


def _has_places(inputs: InputTypes, name: str) -> bool:
    return not is_float(inputs[name]) and len(shape_of(inputs[name]) or ()) == 2


def made_of_tokens(inputs: InputTypes, held: Columns) -> dict[str, Made]:
    """Return a map: input that the data lack and that can be computed from the tokens -> its kind."""
    lacking = inputs.keys() - held.keys()
    return {name: kind for name, kind in KNOWN.items() if name in lacking and len(shape_of(inputs[name]) or ()) == 2}


def pairs_of_tokens(inputs: InputTypes, held: Columns, terms: Sequence[Term]) -> dict[str, tuple[np.dtype, int]]:
    """Return a map: pair mask that the data lack -> its dtype and rank.

    A pair mask is an input that says, for each pair of positions, if the first may attend to the second. The map is
    empty unless the loss is `CAUSAL`, with which a token attends to itself and to earlier tokens. Integer masks are
    left out, because it is unknown whether 1 allows or forbids attention.
    """
    if not any(term.name == CAUSAL for term in terms):
        return {}
    return {
        name: (np.dtype(helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))), len(shape_of(inputs[name]) or ()))
        for name, kind in KNOWN.items()
        if kind == "mask" and name in inputs and name not in held and _is_of_pairs(inputs, name)
    }


def _is_of_pairs(inputs: InputTypes, name: str) -> bool:
    """Return True if an input has the shape of a pair mask and holds floats or booleans.

    The shapes are (batch, positions, positions) and (batch, 1, positions, positions); the 1 may be symbolic.
    """
    shape = shape_of(inputs[name]) or ()
    known = is_float(inputs[name]) or dtype_of(inputs[name]) == TensorProto.BOOL
    return known and (len(shape) == 3 or (len(shape) == 4 and (shape[1] == 1 or isinstance(shape[1], str))))


def following(inputs: InputTypes, tokens: str | None, terms: Sequence[Term]) -> list[str]:
    """Return the inputs and labels that the data may lack, because they can be computed from the tokens."""
    if tokens is None:
        return []
    made = [*made_of_tokens(inputs, {}), *pairs_of_tokens(inputs, {}, terms)]
    return [*made, *(term.label for term in terms if term.name == CAUSAL)]


# -- from columns to samples -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """A function that prepares columns of token sequences: it truncates, packs and checks the sequences.

    Attributes:
        source: the file, for messages.
        tokens: the name of the token column.
        inputs: the inputs and labels, with their types.
        terms: the loss terms, with their labels.
        options: the user's options for sequences.
        tell: receives log messages.
    """

    source: Path
    tokens: str
    inputs: InputTypes
    terms: Sequence[Term]
    options: SequenceOptions
    tell: Tell

    def __call__(self, columns: Columns) -> tuple[dict[str, np.ndarray | Lists], Sequences]:
        """Return the prepared columns, and the rules for converting their batches to arrays.

        Raises:
            UsageError: a sequence is empty, is longer than the model takes, or has a different length than its labels;
                or the loss ignores all tokens of all samples.
        """
        columns = self._as_lists({**columns, **self._labels(columns)})
        uneven = [name for name, column in columns.items() if isinstance(column, Lists)]
        self._check_lengths(columns, uneven)
        if self.options.pack:
            columns = self._packed(columns)
        elif self.options.max_length is not None:
            cut = {name: column.cut_off(self.options.max_length) for name, column in self._lists(columns).items()}
            columns = {**columns, **cut}
        columns = self._judged(columns)
        fill = {term.label: term.ignore_index for term in self.terms if term.ignore_index is not None}
        length = self._length(columns[self.tokens])
        made, pairs = made_of_tokens(self.inputs, columns), pairs_of_tokens(self.inputs, columns, self.terms)
        fill = {self.tokens: self.options.pad_id or 0, **fill}
        masked = any(kind == "mask" and name in self.inputs for name, kind in KNOWN.items())
        causal = any(term.name == CAUSAL for term in self.terms)  # no token attends to the padding after it
        return dict(columns), Sequences(self.tokens, made, fill, length, pairs, masked or causal)

    def _lists(self, columns: Columns) -> dict[str, Lists]:
        return {name: column for name, column in columns.items() if isinstance(column, Lists)}

    def _labels(self, columns: Columns) -> Columns:
        """Return a map: label of a `CAUSAL` loss that the data lack -> the tokens as its values.

        Tokens that the attention mask hides get the label that the loss ignores.
        """
        tokens, hidden = columns[self.tokens], columns.get("attention_mask")
        found: dict[str, np.ndarray | Lists] = {}
        for term in self.terms:
            if term.name == CAUSAL and term.label not in columns:
                found[term.label] = tokens
                if isinstance(hidden, np.ndarray) and isinstance(tokens, np.ndarray) and hidden.shape == tokens.shape:
                    found[term.label] = np.where(hidden == 0, np.asarray(term.ignore_index, np.int64), tokens)
        return found

    def _as_lists(self, columns: Columns) -> Columns:
        """Return the columns, with columns that have a number for each token converted to `Lists`.

        Arrays are converted only if another such column holds lists, or if an option truncates or packs sequences or
        sets the padding token. If the user has set the padding token, padding at the ends is removed.
        """
        places = {
            name: column
            for name, column in columns.items()
            if isinstance(column, Lists) or (column.ndim == 2 and self._is_along_tokens(name))
        }
        options = self.options
        asked = options.pack or options.max_length is not None or options.pad_id is not None
        if not asked and not any(isinstance(column, Lists) for column in places.values()):
            return columns
        found = {name: column if isinstance(column, Lists) else _rows(column) for name, column in places.items()}
        tokens = columns[self.tokens]
        if options.pad_id is not None and isinstance(tokens, np.ndarray) and self.tokens in found:
            ends = _ends(tokens, options.pad_id)
            found = {name: each.cut_at(ends) if len(each) == len(ends) else each for name, each in found.items()}
        return {**columns, **found}

    def _is_along_tokens(self, name: str) -> bool:
        """Return True if an input or label has a number for each token."""
        shape, tokens = (shape_of(self.inputs[each]) or () for each in (name, self.tokens))
        labels = {term.label for term in self.terms if term.ignore_index is not None}
        return len(shape) == 2 and (name in KNOWN or name in labels or shape[1] == tokens[1])

    def _check_lengths(self, columns: Columns, names: Sequence[str]) -> None:
        """Check that each sample has tokens, and that the columns `names` have an element for each token of a sample.

        Raises:
            UsageError: a sample has no tokens, or a column has more or fewer elements than tokens in a sample.
        """
        tokens = columns[self.tokens]
        if not isinstance(tokens, Lists):
            return
        lengths = tokens.lengths
        if not len(tokens) or (lengths == 0).any():
            row = int((lengths == 0).argmax()) if len(tokens) else 0
            hint = "drop the sample"
            raise no_data(f"'{self.source}': '{self.tokens}' has no tokens in sample {row} (the first is 0)", hint)
        for name in names:
            other = columns[name].lengths  # type: ignore[union-attr]
            if len(other) == len(lengths) and (other != lengths).any():
                row = int((other != lengths).argmax())
                counts = f"{lengths[row]} elements in '{self.tokens}' and {other[row]} in '{name}'"
                hint = "arrays with a value for each token must be as long as the tokens"
                raise wrong_shape(f"'{self.source}': sample {row} (the first is 0) has {counts}", hint)

    def _packed(self, columns: Columns) -> Columns:
        """Return the samples concatenated into rows of at most `max_length` tokens.

        Tokens are not moved: a row is a range of consecutive samples, so only the offsets are replaced.

        Raises:
            UsageError: the loss is not `CAUSAL`, or the data have columns that can't be packed.
        """
        labels = {term.label: term.ignore_index for term in self.terms if term.name == CAUSAL}
        others = [name for name in columns if name != self.tokens and name not in labels and name not in KNOWN]
        if others or not labels:
            also = f", and can't be combined with '{others[0]}'" if others else ""
            raise conflict(f"`pack` requires the loss {CAUSAL} and data of tokens{also}", "leave it out")
        longest = self.options.max_length
        assert longest is not None  # the options check it
        lists = {name: column.cut_off(longest) for name, column in self._lists(columns).items()}
        begins = lists[self.tokens].offsets
        for name, ignored in labels.items():
            assert ignored is not None
            values = lists[name].values.astype(np.int64)
            values[begins[:-1]] = ignored  # the first token of a sample can't be predicted
            lists[name] = Lists(values, begins)
        if "position_ids" in self.inputs and "position_ids" not in lists:
            places = np.arange(begins[-1]) - np.repeat(begins[:-1], np.diff(begins))
            lists["position_ids"] = Lists(places, begins)
        rows = _ends_of_rows(begins, longest)
        sees = "also attends to the earlier samples in its row"
        if pairs_of_tokens(self.inputs, columns, self.terms):
            lists[SAMPLES] = Lists(np.repeat(np.arange(len(begins) - 1), np.diff(begins)), begins)
            sees = "attends only to its own sample"
            sees += "" if "position_ids" in self.inputs else ", but its position is counted from the start of the row"
        text = (
            f"{len(begins) - 1:,} samples are packed into {len(rows) - 1:,} rows of at most {longest} tokens: a token"
        )
        self.tell(f"{text} {sees}", 0)
        return {name: Lists(column.values, rows) for name, column in lists.items()}

    def _judged(self, columns: Columns) -> Columns:
        """Return the columns without samples in which a loss ignores all tokens: a mean loss over no tokens is NaN.

        Raises:
            UsageError: no sample remains.
        """
        keep = None
        for term in self.terms:
            labels = columns.get(term.label)
            if isinstance(labels, Lists) and term.ignore_index is not None:
                counts = labels.values != term.ignore_index
                if term.name == CAUSAL:
                    counts[labels.offsets[:-1][labels.lengths > 0]] = False  # nothing predicts the first token
                some = np.diff(np.concatenate([[0], np.cumsum(counts)])[labels.offsets]) > 0
                keep = some if keep is None else keep & some
        if keep is None or keep.all():
            return columns
        if not keep.any():
            hint = "check labels and `max_length`"
            raise no_data(f"'{self.source}': no sample has a token that counts in the loss", hint)
        self.tell(f"{(~keep).sum():,} of {len(keep):,} samples are left out: no token of them counts in the loss", 0)
        rows = np.flatnonzero(keep)
        return {
            name: column.only(rows) if isinstance(column, Lists) else column[rows] if column.ndim else column
            for name, column in columns.items()
        }

    def _length(self, tokens: np.ndarray | Lists) -> int | None:
        """Return the sequence length that the model requires, or None if it takes any length or no padding is needed.

        Raises:
            UsageError: a sample has more tokens than the model takes.
        """
        places = (shape_of(self.inputs[self.tokens]) or ())[1]
        if not isinstance(places, int) or not isinstance(tokens, Lists):
            return None
        if tokens.shape[1] > places:
            message = f"'{self.tokens}' has {tokens.shape[1]} tokens in a sample, but the model takes {places}"
            hint = f"cut them with `max_length={places}`, or export the model with a symbolic length"
            raise wrong_shape(f"'{self.source}': {message}", hint)
        return places


def _rows(array: np.ndarray) -> Lists:
    return Lists.cut(np.asarray(array).reshape(-1), np.full(len(array), array.shape[1], np.int64))


def _ends(tokens: np.ndarray, pad: int) -> np.ndarray:
    """Return the length of each row of `tokens` (N, positions), not counting the padding at its end, int64 (N,)."""
    real = np.asarray(tokens) != pad
    return np.where(real.any(1), tokens.shape[1] - real[:, ::-1].argmax(1), 0)


def _ends_of_rows(offsets: np.ndarray, longest: int) -> np.ndarray:
    """Pack whole samples, in order, into rows of at most `longest` tokens. A sample that does not fit begins a new row.

    Return the offsets of the rows, beginning with 0.

    Args:
        offsets: the index of each sample's first token, followed by the total number of tokens, int64 (samples + 1,).
        longest: the largest number of tokens in a row.
    """
    found, ends = [0], offsets.tolist()
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - found[-1] > longest:
            found.append(end)
    return np.array(found, np.int64)


def pair_mask(samples: Sequence[np.ndarray], places: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """Return the pair mask of packed rows: for each pair of positions, if the first may attend to the second.

    The shape is (rows, places, places), or (rows, 1, places, places) for rank 4. A token attends to itself and to the
    earlier tokens of its sample. A padding position attends to itself: a softmax over no positions would be NaN.

    Args:
        samples: for each row an array (tokens,) with the index of each token's sample.
        places: the length to which rows are padded.
        dtype: the dtype of the mask. If it is bool, True allows attention. If it is a float type, the mask is added to
            the attention scores: 0 allows attention, the lowest finite number forbids it.
        rank: 3 or 4.
    """
    seen = np.tile(np.eye(places, dtype=bool), (len(samples), 1, 1))
    for mask, row in zip(seen, samples, strict=True):
        mask[: len(row), : len(row)] |= np.tri(len(row), dtype=bool) & (row[:, None] == row)
    found = seen if dtype.kind == "b" else np.where(seen, 0, _least(dtype)).astype(dtype)
    return found[:, None] if rank == 4 else found


def _least(dtype: np.dtype) -> float:
    finfo: Any = ml_dtypes.finfo  # numpy.finfo doesn't support bfloat16
    return float(finfo(dtype).min)
