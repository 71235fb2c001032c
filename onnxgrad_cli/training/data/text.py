"""Text as samples: columns of text become tokens by a tokenizer.json, and only what a model is to answer is judged.

A file of JSON lines, Parquet or a table in text has one of these columns, called as in TRL and most published data:

- `messages`: a conversation, a list of {"role": ..., "content": ...}; what the role assistant says is judged,
- `prompt` and `completion`: the completion is judged; both are text, or both are lists of messages,
- `text`: all of it is judged.

Whole texts are tokenized, and a token is judged that holds a character of what is judged: cut into pieces first, a text
has other tokens than the model is asked with. Text without a chat template ends with the tokenizer's end of text.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.common.packages import load_package
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.training.data.chat import ChatTemplate, Span, chat_template, check_messages
from onnxgrad_cli.training.data.json_lines import objects
from onnxgrad_cli.training.data.lists import Lists
from onnxgrad_cli.training.data.reading import check_regular, reading
from onnxgrad_cli.training.data.sequences import SequenceOptions

FORMATS = (".jsonl", ".parquet", ".csv", ".tsv")
"""Files that hold text."""

TEXTS = CHAT, PROMPT, COMPLETION, TEXT = "messages", "prompt", "completion", "text"
"""The columns of text."""

LARGEST = 2**28
"""Bytes of a tokenizer: those of the largest vocabularies have 35 million."""

MOST_GROWTH = 1000
"""How many times as long a tokenizer may make a text before it cuts it, and how many tokens it may add: published ones
do less than ten times, and add two. A stranger's fill the memory with a word."""

BATCH = 512
"""Texts that are tokenized at once, by several threads."""

PADS = ("pad_token", "eos_token")
"""What stands behind the end of a text, the first that a tokenizer has."""


@dataclass(frozen=True)
class Text:
    """A sample as text, and where in it what is judged begins and ends, in characters."""

    text: str
    judged: Sequence[Span]
    whole: bool = False  # with all marks that the model sees, so that the tokenizer adds none


class Tokenizer:
    """A tokenizer.json, and what the tokenizer_config.json beside it says."""

    def __init__(self, path: Path) -> None:
        """Args:
        path: the file, or the folder it is in.

        Raises:
            UsageError: it can't be read, or is no tokenizer; or the package tokenizers is missing.
        """
        self.path = path / "tokenizer.json" if path.is_dir() else path
        tokenizers = load_package("tokenizers", f"reading '{self.path}'")
        hint = "a tokenizer.json is wanted, as published with models"
        content = _content(self.path)
        with reading(self.path, "a tokenizer", hint):
            try:
                self._tokenizer = tokenizers.Tokenizer.from_str(content)
                self._tokenizer.no_padding()
                self._tokenizer.no_truncation()
                _check_growth(self._tokenizer)
            except BaseException as error:
                raise _as_error(error) from None
        self.settings = _settings(self.path.with_name("tokenizer_config.json"))

    def special(self, name: str) -> int | None:
        """The number of a token that the configuration names, such as 'eos_token'."""
        text = self.settings.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """What each token stands for: text, or the tokenizer's name of one that is none, or a part of a character."""
        try:
            return [self._text(token) for token in tokens]
        except BaseException as error:
            raise _as_error(error) from None

    def _text(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token) if token >= 0 else None
        if name is None:
            return f"[{token}]"
        found: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return found if found.strip() and "\ufffd" not in found else str(name)

    def encode(self, samples: Sequence[Text]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The tokens of each sample, int32 (places,), and whether each is judged, bool (places,)."""
        end = self.special("eos_token")
        for marks in (True, False):
            if any(sample.whole == marks for sample in samples) and not all(s.whole == marks for s in samples):
                raise ValueError("samples of a file are of one kind")
        try:
            found = self._tokenizer.encode_batch([s.text for s in samples], add_special_tokens=not samples[0].whole)
        except BaseException as error:
            raise _as_error(error) from None
        for sample, each in zip(samples, found, strict=True):
            ids, judged = np.array(each.ids, np.int32), _judged(each.offsets, each.special_tokens_mask, sample.judged)
            if not sample.whole and end is not None:
                if not len(ids) or ids[-1] != end:
                    ids, judged = np.append(ids, np.int32(end)), np.append(judged, True)
                judged[-1] = True
            yield ids, judged


def _judged(offsets: Sequence[tuple[int, int]], added: Sequence[int], spans: Sequence[Span]) -> np.ndarray:
    """Whether a token holds a character of a span; those that the tokenizer has added hold none, bool (places,)."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(begins), bool)
    for begin, end in spans:
        found |= (begins < end) & (ends > begin)
    return found & ~np.array(added, bool)


def _as_error(error: BaseException) -> Exception:
    """What the tokenizer raises, as an Exception: a panic of Rust is none."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    return error if isinstance(error, Exception) else ValueError(str(error))


def _check_growth(tokenizer: Any) -> None:
    """Make sure that a text of a few characters becomes no more than a multiple of them.

    Raises:
        ValueError: it may become more.
    """
    growth = math.prod(_growths(strict_json.loads(tokenizer.normalizer.__getstate__()))) if tokenizer.normalizer else 1
    added = tokenizer.num_special_tokens_to_add(False)
    if max(growth, added) > MOST_GROWTH:
        raise ValueError(
            f"it makes texts {growth:.3g} times as long and adds {added:,} tokens: {MOST_GROWTH:,} are read"
        )


def _growths(normalizer: Mapping[str, Any]) -> Iterator[int]:
    """How many times as long each step of a normalizer may make a text."""
    for step in normalizer.get("normalizers", ()):
        yield from _growths(step)
    if normalizer.get("type") in ("Replace", "Prepend"):
        everywhere = "Regex" in (normalizer.get("pattern") or {})  # which may stand between any two characters
        yield max(1, len(normalizer.get("content") or normalizer.get("prepend") or "") + everywhere)


def _content(path: Path) -> str:
    check_regular(path)
    with reading(path, "text", "save it as UTF-8"):
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        return path.read_text(encoding="utf-8")


def _settings(path: Path) -> dict[str, str]:
    """The settings beside a tokenizer that are text: the marks, and the chat template."""
    if not path.exists():
        return {}
    content = _content(path)
    with reading(
        path, "JSON", "a tokenizer_config.json is wanted, as published with models", ValueError, RecursionError
    ):
        found = strict_json.loads(content)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    named = found.get("chat_template")
    if isinstance(named, list):  # several, each with a name
        named = [each.get("template") for each in named if isinstance(each, dict) and each.get("name") == "default"]
        texts["chat_template"] = next(iter(named), None)
    return {key: value for key, value in texts.items() if isinstance(value, str)}


# -- from a file to samples --------------------------------------------------------------------------------------------


def read_text(
    path: Path, options: SequenceOptions, tokens: str | None, terms: Sequence[Term], tell: Tell, prefix: str = ""
) -> tuple[SequenceOptions, dict[str, np.ndarray | Lists]]:
    """The text of a file as tokens, and for a loss that predicts tokens as labels.

    Args:
        path: the file.
        options: with the tokenizer.
        tokens: the input that takes tokens.
        terms: the losses.
        tell: takes what is narrated.
        prefix: what the names of columns have before those above.

    Returns:
        The options, with the token of padding, and the columns.

    Raises:
        UsageError: the file has no text, or not as it should be; or the tokenizer can't be used.
    """
    assert options.tokenizer is not None
    tokenizer = Tokenizer(options.tokenizer)
    if tokens is None:
        raise UsageError("`tokenizer`: the model has no input of tokens", "call the input of tokens input_ids")
    samples = _samples(path, tokenizer, tell, prefix)
    ids, judged = [], []
    while some := list(islice(samples, BATCH)):
        with reading(path, f"text for '{tokenizer.path}'", "try another tokenizer"):
            for found, counts in tokenizer.encode(some):
                ids.append(found)
                judged.append(counts)
    if not ids:
        raise UsageError(f"'{path}' has no samples", "give it some")
    lists = Lists.cut(np.concatenate(ids), np.array([len(each) for each in ids], np.int64))
    columns: dict[str, np.ndarray | Lists] = {tokens: lists}
    for term in terms:
        if term.name == "causal-lm" and term.ignore_index is not None:
            values = np.where(np.concatenate(judged), lists.values, np.int32(term.ignore_index))
            columns[term.label] = Lists(values, lists.offsets)
    pads = (tokenizer.special(name) for name in PADS)
    pad = next((found for found in pads if found is not None), None)
    return replace(options, pad_id=pad if options.pad_id is None else options.pad_id), columns


def _samples(path: Path, tokenizer: Tokenizer, tell: Tell, prefix: str) -> Iterator[Text]:
    records = _records(path, [prefix + name for name in TEXTS])
    template: ChatTemplate | None = None
    kinds: set[bool] = set()
    for where, record in records:
        given = {name.removeprefix(prefix): value for name, value in record.items()}
        messages = _messages(where, given)
        kinds.add(messages is None)
        if len(kinds) > 1:
            raise UsageError(
                f"{where}: there are messages on some lines and plain text on others", "save one of the two"
            )
        if messages is None:
            yield _plain(where, given)
            continue
        template = template or chat_template(tokenizer.path, tokenizer.settings, tell)
        text, spans = template.judged(where, *messages)
        yield Text(text, spans, whole=True)
    if template is not None:
        template.told(tell)


def _messages(where: str, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int] | None:
    """The messages of a sample, and from which one on answers are judged; None where it is plain text."""
    if CHAT in given:
        return check_messages(where, CHAT, given[CHAT]), 0
    if isinstance(given.get(PROMPT), list):
        before = check_messages(where, PROMPT, given[PROMPT])
        return before + check_messages(where, COMPLETION, given.get(COMPLETION)), len(before)
    return None


def _plain(where: str, given: Mapping[str, Any]) -> Text:
    prompt, completion = (given.get(name) for name in (PROMPT, COMPLETION))
    if PROMPT in given or COMPLETION in given:
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise UsageError(f"{where}: '{PROMPT}' and '{COMPLETION}' are not both text", "each line needs both")
        text = prompt + completion
        return Text(text, [(len(prompt), len(text))])
    if not isinstance(given.get(TEXT), str):
        raise UsageError(
            f"{where}: no text", f"a column '{TEXT}', '{PROMPT}' and '{COMPLETION}', or '{CHAT}' is wanted"
        )
    return Text(given[TEXT], [(0, len(given[TEXT]))])


def _records(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The columns `names` of a file, as far as it has them, row after row, each with its place in words."""
    check_regular(path)
    kind = path.suffix.lower()
    if kind == ".jsonl":
        rows = ((f"'{path}', line {number}", row) for number, row in objects(path))
    elif kind == ".parquet":
        rows = (
            (f"'{path}', row {number} (the first is 0)", row) for number, row in enumerate(_of_parquet(path, names))
        )
    elif kind in (".csv", ".tsv"):
        rows = ((f"'{path}', line {number}", row) for number, row in _of_table(path, "\t" if kind == ".tsv" else ","))
    else:
        raise UsageError(f"`tokenizer`: '{path}' is no file of text", f"{', '.join(FORMATS)} hold text")
    return ((where, {name: row[name] for name in names if row.get(name) is not None}) for where, row in rows)


def _of_parquet(path: Path, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    files = load_package("pyarrow.parquet", f"reading '{path}'")
    with reading(path, "a Parquet file", "write it again"):
        file = files.ParquetFile(path)
        there = [name for name in names if name in file.schema_arrow.names]
        for some in file.iter_batches(batch_size=BATCH, columns=there):
            yield from some.to_pylist()


def _of_table(path: Path, mark: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    hint = "save it as UTF-8, with quotes around what holds commas"
    with (
        reading(path, "a table in text", hint, csv.Error, ValueError),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.DictReader(file, delimiter=mark, strict=True)
        for row in reader:
            yield reader.line_num, row
