"""Convert columns of text to tokens with a tokenizer.json, and compute the loss only on the parts the model must write.

A file of JSON lines, Parquet, CSV or TSV has one of these columns, named as in TRL and most published data:

- `messages`: a conversation, a list of {"role": ..., "content": ...}; the loss is computed on the assistant's messages,
- `prompt` and `completion`: the loss is computed on the completion; both are text, or both are lists of messages,
- `text`: the loss is computed on all tokens.

Each text is tokenized as a whole, because its parts, tokenized separately, would give other tokens. The loss includes a
token if the token contains a character of such a part. The tokenizer's end-of-text token is appended to text without a
chat template.
"""

from __future__ import annotations

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
from onnxgrad_cli.data.chat import ChatTemplate, Span, chat_template, check_messages
from onnxgrad_cli.data.csv_file import rows_of
from onnxgrad_cli.data.json_lines import objects
from onnxgrad_cli.data.lists import Lists
from onnxgrad_cli.data.read_failures import check_regular, reading
from onnxgrad_cli.errors import mismatch, missing_value, no_data, wrong_type
from onnxgrad_cli.metadata import Term
from onnxgrad_cli.options.data import SequenceOptions

FORMATS = (".jsonl", ".parquet", ".csv", ".tsv")
"""The suffixes of files that hold text."""

TEXTS = CHAT, PROMPT, COMPLETION, TEXT = "messages", "prompt", "completion", "text"
"""The names of the columns of text."""

MAX_TOKENIZER_BYTES = 2**28
"""The largest allowed size of a tokenizer file, in bytes. The largest published tokenizers have 35 million bytes."""

MOST_GROWTH = 1000
"""The largest factor by which a normalizer may lengthen a text, and the largest number of tokens added to each text.

Published tokenizers stay below a factor of ten and add two tokens. A malicious tokenizer could otherwise fill the
memory from a single word.
"""

BATCH = 512
"""The number of texts that are tokenized in one call, by several threads."""

PADS = ("pad_token", "eos_token")
"""Settings that name the padding token; the first one that the tokenizer has is used."""


@dataclass(frozen=True)
class Text:
    """A sample of text, with the spans of characters (begin, end) on which the loss is computed."""

    text: str
    judged: Sequence[Span]
    whole: bool = False  # the text contains all special tokens, so the tokenizer adds none


class Tokenizer:
    """A tokenizer.json and the settings in the tokenizer_config.json beside it."""

    def __init__(self, path: Path) -> None:
        """Args:
            path: the tokenizer.json, or its folder.

        Raises:
            UsageError: the file can't be read or is not a tokenizer, or the package tokenizers is missing.
        """
        self.path = path / "tokenizer.json" if path.is_dir() else path
        tokenizers = load_package("tokenizers", f"reading '{self.path}'")
        content = _content(self.path)
        with reading(self.path, "a tokenizer", "use a tokenizer.json as published with models"):
            try:
                self._tokenizer = tokenizers.Tokenizer.from_str(content)
                self._tokenizer.no_padding()
                self._tokenizer.no_truncation()
                _check_growth(self._tokenizer)
            except BaseException as error:
                raise _as_error(error) from None
        self.settings = _settings(self.path.with_name("tokenizer_config.json"))

    def special(self, name: str) -> int | None:
        """Return the id of a special token such as 'eos_token'; None if the settings don't name it."""
        text = self.settings.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """Return the text of each token.

        If the text is blank or only part of a character, return the token's vocabulary entry.
        """
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
        """Yield, for each sample, its token ids, int32 (tokens,), and a mask of the tokens in the loss, bool (tokens,).

        Args:
            samples: the samples. Either all are `whole`, or none is.
        """
        end = self.special("eos_token")
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
    """Return a mask of the tokens that contain a character of a span, bool (tokens,).

    The mask is False for special tokens that the tokenizer added.
    """
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(begins), bool)
    for begin, end in spans:
        found |= (begins < end) & (ends > begin)
    return found & ~np.array(added, bool)


def _as_error(error: BaseException) -> Exception:
    """Return an error of the tokenizer as an Exception, because a panic in Rust is not derived from Exception."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    return error if isinstance(error, Exception) else ValueError(str(error))


def _check_growth(tokenizer: Any) -> None:
    """Check that the factor by which the tokenizer lengthens texts, and the tokens it adds, are at most `MOST_GROWTH`.

    Raises:
        ValueError: the limit is exceeded.
    """
    growth = math.prod(_growths(strict_json.loads(tokenizer.normalizer.__getstate__()))) if tokenizer.normalizer else 1
    added = tokenizer.num_special_tokens_to_add(False)
    if max(growth, added) > MOST_GROWTH:
        grows = f"it makes texts {growth:.3g} times as long and adds {added:,} tokens"
        raise ValueError(f"{grows}, but the limit is {MOST_GROWTH:,}")


def _growths(normalizer: Mapping[str, Any]) -> Iterator[int]:
    """Yield, for each step of a normalizer, the largest factor by which it can lengthen a text."""
    for step in normalizer.get("normalizers", ()):
        yield from _growths(step)
    if normalizer.get("type") in ("Replace", "Prepend"):
        everywhere = "Regex" in (normalizer.get("pattern") or {})  # it may match between any two characters
        yield max(1, len(normalizer.get("content") or normalizer.get("prepend") or "") + everywhere)


def _content(path: Path) -> str:
    check_regular(path)
    with reading(path, "text", "save it as UTF-8"):
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(f"it has more than {MAX_TOKENIZER_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")


def _settings(path: Path) -> dict[str, str]:
    """Read the settings in a tokenizer_config.json that are text: the special tokens and the chat template."""
    if not path.exists():
        return {}
    with reading(path, "JSON", "use a tokenizer_config.json as published with models", ValueError, RecursionError):
        found = strict_json.loads(_content(path))
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    named = found.get("chat_template")
    if isinstance(named, list):  # several templates, each with a name
        named = [each.get("template") for each in named if isinstance(each, dict) and each.get("name") == "default"]
        texts["chat_template"] = next(iter(named), None)
    return {key: value for key, value in texts.items() if isinstance(value, str)}


# -- from a file to samples --------------------------------------------------------------------------------------------


def read_text(
    path: Path, options: SequenceOptions, tokens: str | None, terms: Sequence[Term], tell: Tell, prefix: str = ""
) -> tuple[SequenceOptions, dict[str, np.ndarray | Lists]]:
    """Tokenize the text of a file, and make the labels of a loss that predicts tokens.

    Args:
        path: the file.
        options: the options, with the tokenizer.
        tokens: the name of the token input; None if the model has none.
        terms: the losses.
        tell: receives log messages.
        prefix: the prefix of the names of the columns.

    Returns:
        The options, with the padding token set, and a map: input or label -> its samples.

    Raises:
        UsageError: the file has no text; the text columns are invalid; the model has no token input; or the tokenizer
            can't be used.
    """
    assert options.tokenizer is not None
    tokenizer = Tokenizer(options.tokenizer)
    if tokens is None:
        raise mismatch("`tokenizer`: the model has no input of tokens", "name the input of tokens input_ids")
    samples = _samples(path, tokenizer, tell, prefix)
    ids, judged = [], []
    while some := list(islice(samples, BATCH)):
        with reading(path, f"text for '{tokenizer.path}'", "try another tokenizer"):
            for found, counts in tokenizer.encode(some):
                ids.append(found)
                judged.append(counts)
    if not ids:
        raise no_data(f"'{path}' has no samples", "add samples")
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
            hint = "save messages on all lines, or text on all lines"
            raise wrong_type(f"{where}: some lines have messages, others plain text", hint)
        if messages is None:
            yield _plain(where, given)
            continue
        template = template or chat_template(tokenizer.path, tokenizer.settings, tell)
        text, spans = template.judged(where, *messages)
        yield Text(text, spans, whole=True)
    if template is not None:
        template.told(tell)


def _messages(where: str, given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int] | None:
    """Return the messages of a sample, and the index of the first message in the loss; None for plain text."""
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
            hint = "save both as text on each line"
            raise wrong_type(f"{where}: '{PROMPT}' and '{COMPLETION}' are not both text", hint)
        text = prompt + completion
        return Text(text, [(len(prompt), len(text))])
    if not isinstance(given.get(TEXT), str):
        hint = f"save a column '{TEXT}' or '{CHAT}', or columns '{PROMPT}' and '{COMPLETION}'"
        raise missing_value(f"{where}: there is no text", hint)
    return Text(given[TEXT], [(0, len(given[TEXT]))])


def _records(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield, for each row of a file, a description of its position, and a map: column in `names` -> value."""
    check_regular(path)
    kind = path.suffix.lower()
    if kind == ".jsonl":
        place, rows = "line {}", objects(path)
    elif kind == ".parquet":
        place, rows = "row {} (the first is 0)", enumerate(_of_parquet(path, names))
    elif kind in (".csv", ".tsv"):
        place, rows = "line {}", _of_table(path)
    else:
        raise wrong_type(f"`tokenizer`: '{path}' is not a text file", f"save the text as {', '.join(FORMATS)}")
    for number, row in rows:
        yield f"'{path}', {place.format(number)}", {name: row[name] for name in names if row.get(name) is not None}


def _of_parquet(path: Path, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    files = load_package("pyarrow.parquet", f"reading '{path}'")
    with reading(path, "a Parquet file", "write it again"):
        file = files.ParquetFile(path)
        there = [name for name in names if name in file.schema_arrow.names]
        for some in file.iter_batches(batch_size=BATCH, columns=there):
            yield from some.to_pylist()


def _of_table(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with rows_of(path) as (header, rows):
        for line, row in rows:
            yield line, dict(zip(header, row, strict=False))
