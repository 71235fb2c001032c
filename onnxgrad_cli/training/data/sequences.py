"""Samples that are sequences of tokens: padded in each batch, and what follows from the tokens made where data lack it.

A language model is fed more than tokens: which places hold any (a mask), where they stand, what each is to predict. All
of it follows from the tokens, so that data need not hold it. Sequences are padded behind their ends, to the longest of
the batch: the mask is 0 there, and labels are those that do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from onnx import TensorProto, helper

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.keywords import KnownKeywords
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import dtype_of, is_float, shape_of
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.data.input_types import InputTypes, Range
from onnxgrad_cli.training.data.lists import Lists, padded
from onnxgrad_cli.training.data.pair_masks import pair_mask

Made = Literal["mask", "positions", "zeros"]
"""What is made of the length of a sequence: ones, the numbers of its places, zeros."""

CAUSAL = "causal-lm"
"""The loss whose labels are the tokens themselves."""

TOKENS = "input_ids"
"""What exporters of language models call the input of tokens."""

KNOWN: Mapping[str, Made] = {
    "attention_mask": "mask", "input_mask": "mask", "position_ids": "positions",
    "token_type_ids": "zeros", "segment_ids": "zeros",
}  # fmt: skip
"""What exporters call inputs that follow from tokens."""

SAMPLES = "sample of each token"
"""A column of packed rows that is no input: the number of the sample that each token is of."""

Columns = Mapping[str, np.ndarray | Lists]


@dataclass(frozen=True)
class SequenceOptions(KnownKeywords):
    """How text and lists of tokens become samples.

    Attributes:
        tokenizer: a tokenizer.json, or the folder it is in, by which text becomes tokens; None: data hold tokens.
        max_length: of how many tokens a sample is at most; what lies behind is left out. None: of any number.
        pack: put samples one after the other into rows of at most `max_length` tokens.
        pad_id: the token behind the end of a sample; None: the tokenizer's own, else 0.

    Raises:
        UsageError: a number or a type does not fit.
    """

    tokenizer: Path | None = None
    max_length: int | None = None
    pack: bool = False
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None:
            checks.at_least("max_length", self.max_length, 2, whole=True)
        checks.flag("pack", self.pack)
        if self.pack and self.max_length is None:
            raise UsageError("`pack` needs to know how many tokens a row may have", "add `max_length=TOKENS`")
        if self.pad_id is not None:
            checks.at_least("pad_id", self.pad_id, 0, whole=True)


@dataclass(frozen=True)
class Sequences:
    """How sequences become the arrays of a batch.

    Attributes:
        tokens: the input of tokens.
        made: inputs that are made of the lengths of its samples.
        fill: input -> what stands behind the end of a sequence.
        length: how many places the model takes; None: any number.
        pairs: masks that say of each pair of places whether one sees the other, which are made too -> type and rank.
        told_ends: whether the model knows where a sequence ends: by a mask, or as it looks back alone.
    """

    tokens: str
    made: Mapping[str, Made]
    fill: Mapping[str, int]
    length: int | None = None
    pairs: Mapping[str, tuple[np.dtype, int]] = field(default_factory=dict)
    told_ends: bool = True

    def batch(self, taken: Mapping[str, np.ndarray | list[np.ndarray]], longest: int = 0) -> dict[str, np.ndarray]:
        """The arrays of a batch: sequences padded, and what data lack made of their lengths.

        Args:
            taken: of each input in the data its samples: one array, or one for each sample, (places,).
            longest: the number of places, where it is that of samples which other processes take.
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
            name: padded(column, longest, self.fill.get(name, 0)) if isinstance(column, list) else column
            for name, column in every.items()
        }


def _made(kind: Made, places: int) -> np.ndarray:
    if kind == "positions":
        return np.arange(places)
    return np.full(places, kind == "mask", np.int64)


# -- what the model takes ----------------------------------------------------------------------------------------------


def tokens_of(inputs: InputTypes, ranges: Mapping[str, Range], terms: Sequence[Term]) -> str | None:
    """The input of tokens, [samples, places] of whole numbers: by its name, or the only one that indexes a table."""
    labels = {term.label for term in terms}
    found = [name for name in inputs if name not in labels and name not in KNOWN and _has_places(inputs, name)]
    indexing = [name for name in found if name in ranges]
    return TOKENS if TOKENS in found else indexing[0] if len(indexing) == 1 else None


def uneven(columns: Mapping[str, object], inputs: InputTypes, terms: Sequence[Term]) -> str | None:
    """The first input of places whose lists differ in length: where nothing else tells, these are the tokens."""
    labels = {term.label for term in terms}
    held = [name for name in inputs if isinstance(columns.get(name), Lists) and name not in labels]
    return next((name for name in held if _has_places(inputs, name)), None)


def _has_places(inputs: InputTypes, name: str) -> bool:
    return not is_float(inputs[name]) and len(shape_of(inputs[name]) or ()) == 2


def made_of_tokens(inputs: InputTypes, held: Columns) -> dict[str, Made]:
    """The inputs that data lack and that follow from tokens."""
    return {
        name: kind
        for name, kind in KNOWN.items()
        if name in inputs and name not in held and len(shape_of(inputs[name]) or ()) == 2
    }


def pairs_of_tokens(inputs: InputTypes, held: Columns, terms: Sequence[Term]) -> dict[str, tuple[np.dtype, int]]:
    """The masks of pairs of places that data lack and that follow from tokens, with their types and ranks.

    Where the loss predicts tokens, a place sees those before it. Of a mask of integers nobody knows what 1 means.
    """
    if not any(term.name == CAUSAL for term in terms):
        return {}
    return {
        name: (np.dtype(helper.tensor_dtype_to_np_dtype(dtype_of(inputs[name]))), len(shape_of(inputs[name]) or ()))
        for name, kind in KNOWN.items()
        if kind == "mask" and name in inputs and name not in held and _is_of_pairs(inputs, name)
    }


def _is_of_pairs(inputs: InputTypes, name: str) -> bool:
    """Whether an input is a mask (batch, places, places), or (batch, 1, places, places), of floats or truth values."""
    shape = shape_of(inputs[name]) or ()
    known = is_float(inputs[name]) or dtype_of(inputs[name]) == TensorProto.BOOL
    return known and (len(shape) == 3 or (len(shape) == 4 and (shape[1] == 1 or isinstance(shape[1], str))))


def following(inputs: InputTypes, tokens: str | None, terms: Sequence[Term]) -> list[str]:
    """The inputs that data need not have, for they follow from tokens."""
    if tokens is None:
        return []
    made = [*made_of_tokens(inputs, {}), *pairs_of_tokens(inputs, {}, terms)]
    return [*made, *(term.label for term in terms if term.name == CAUSAL)]


# -- from what was read to samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """What makes samples of the columns that were read.

    Attributes:
        source: the file, for messages.
        tokens: the column of tokens.
        inputs: what is fed.
        terms: the losses, which say what labels are.
        options: what was asked for.
        tell: takes what is narrated.
    """

    source: Path
    tokens: str
    inputs: InputTypes
    terms: Sequence[Term]
    options: SequenceOptions
    tell: Tell

    def __call__(self, columns: Columns) -> tuple[dict[str, np.ndarray | Lists], Sequences]:
        """Columns as they are kept, and how their batches are made.

        Raises:
            UsageError: sequences are longer than the model takes, empty, or not as long as their labels.
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
        causal = any(term.name == CAUSAL for term in self.terms)  # which sees nothing of what lies behind
        return dict(columns), Sequences(self.tokens, made, fill, length, pairs, masked or causal)

    def _lists(self, columns: Columns) -> dict[str, Lists]:
        return {name: column for name, column in columns.items() if isinstance(column, Lists)}

    def _labels(self, columns: Columns) -> Columns:
        """The labels of a loss that predicts tokens, where data have none: the tokens that a mask does not hide."""
        tokens, hidden = columns[self.tokens], columns.get("attention_mask")
        found: dict[str, np.ndarray | Lists] = {}
        for term in self.terms:
            if term.name == CAUSAL and term.label not in columns:
                found[term.label] = tokens
                if isinstance(hidden, np.ndarray) and isinstance(tokens, np.ndarray) and hidden.shape == tokens.shape:
                    found[term.label] = np.where(hidden == 0, np.asarray(term.ignore_index, np.int64), tokens)
        return found

    def _as_lists(self, columns: Columns) -> Columns:
        """Columns of a number for each place as lists, where one is of lists already or they are to be cut."""
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
            found = {
                name: column.cut_at(ends) if len(column) == len(ends) else column for name, column in found.items()
            }
        return {**columns, **found}

    def _is_along_tokens(self, name: str) -> bool:
        """Whether an input has a number for each place of the tokens."""
        shape, tokens = (shape_of(self.inputs[each]) or () for each in (name, self.tokens))
        labels = {term.label for term in self.terms if term.ignore_index is not None}
        return len(shape) == 2 and (name in KNOWN or name in labels or shape[1] == tokens[1])

    def _check_lengths(self, columns: Columns, names: Sequence[str]) -> None:
        """Make sure that what is said of each token is said of as many as there are, and that there are some."""
        tokens = columns[self.tokens]
        if not isinstance(tokens, Lists):
            return
        lengths = tokens.lengths
        if not len(tokens) or (lengths == 0).any():
            row = int((lengths == 0).argmax()) if len(tokens) else 0
            raise UsageError(
                f"'{self.source}': '{self.tokens}' has no tokens in sample {row} (the first is 0)", "drop it"
            )
        for name in names:
            other = columns[name].lengths  # type: ignore[union-attr]
            if len(other) == len(lengths) and (other != lengths).any():
                row = int((other != lengths).argmax())
                raise UsageError(
                    f"'{self.source}': sample {row} (the first is 0) has {lengths[row]} elements in '{self.tokens}' "
                    f"and {other[row]} in '{name}'",
                    "what is said of tokens is as long as these are",
                )

    def _packed(self, columns: Columns) -> Columns:
        """The samples one after the other in rows of at most `max_length` tokens: no values move, only ends go."""
        labels = {term.label: term.ignore_index for term in self.terms if term.name == CAUSAL}
        others = [name for name in columns if name != self.tokens and name not in labels and name not in KNOWN]
        if others or not labels:
            raise UsageError(
                f"`pack` goes with the loss {CAUSAL} and data of tokens alone"
                + f", not with '{others[0]}'" * bool(others),
                "leave it out",
            )
        longest = self.options.max_length
        assert longest is not None  # as the options say
        lists = {name: column.cut_off(longest) for name, column in self._lists(columns).items()}
        begins = lists[self.tokens].offsets
        for name, ignored in labels.items():
            assert ignored is not None
            values = lists[name].values.astype(np.int64)
            values[begins[:-1]] = ignored  # no token before it is of its sample
            lists[name] = Lists(values, begins)
        if "position_ids" in self.inputs and "position_ids" not in lists:
            places = np.arange(begins[-1]) - np.repeat(begins[:-1], np.diff(begins))
            lists["position_ids"] = Lists(places, begins)
        rows = _ends_of_rows(begins, longest)
        sees = "also sees the samples before its own in a row"
        if pairs_of_tokens(self.inputs, columns, self.terms):
            lists[SAMPLES] = Lists(np.repeat(np.arange(len(begins) - 1), np.diff(begins)), begins)
            sees = "sees those of its own sample alone"
            sees += "" if "position_ids" in self.inputs else ", and its place is counted from the begin of the row"
        text = f"{len(begins) - 1:,} samples are packed in {len(rows) - 1:,} rows of at most {longest} tokens: a token"
        self.tell(f"{text} {sees}", 0)
        return {name: Lists(column.values, rows) for name, column in lists.items()}

    def _judged(self, columns: Columns) -> Columns:
        """Samples of which a loss judges something: the mean over no tokens is no number."""
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
            raise UsageError(f"'{self.source}': no sample has a token that is judged", "check labels and `max_length`")
        self.tell(f"{(~keep).sum():,} of {len(keep):,} samples have no token that is judged: they are left out", 0)
        rows = np.flatnonzero(keep)
        return {
            name: column.only(rows) if isinstance(column, Lists) else column[rows] if column.ndim else column
            for name, column in columns.items()
        }

    def _length(self, tokens: np.ndarray | Lists) -> int | None:
        """How many places the model takes, where sequences are to be padded to a number that it has fixed."""
        places = (shape_of(self.inputs[self.tokens]) or ())[1]
        if not isinstance(places, int) or not isinstance(tokens, Lists):
            return None
        if tokens.shape[1] > places:
            raise UsageError(
                f"'{self.source}': '{self.tokens}' has {tokens.shape[1]} tokens in a sample, the model takes {places}",
                f"cut them with `max_length={places}`, or export the model with a symbolic length",
            )
        return places


def _rows(array: np.ndarray) -> Lists:
    return Lists.cut(np.asarray(array).reshape(-1), np.full(len(array), array.shape[1], np.int64))


def _ends(tokens: np.ndarray, pad: int) -> np.ndarray:
    """How long each row (N, places) is without the padding behind its end, int64 (N,)."""
    real = np.asarray(tokens) != pad
    return np.where(real.any(1), tokens.shape[1] - real[:, ::-1].argmax(1), 0)


def _ends_of_rows(offsets: np.ndarray, longest: int) -> np.ndarray:
    """Of the ends of samples those at which a row of at most `longest` tokens ends, in order; 0 first."""
    found, ends = [0], offsets.tolist()
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - found[-1] > longest:
            found.append(end)
    return np.array(found, np.int64)
