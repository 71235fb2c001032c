"""Samples of different lengths: what is padded, packed and made of tokens is what PyTorch and batches by hand have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, numpy_helper

from onnxgrad_cli.data import Data, Range, SequenceOptions, held_out, open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Term
from tests.facts import raises

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
PLACES = tensor_type(INT64, ["batch", "length"])
INPUTS = {"input_ids": PLACES, "attention_mask": tensor_type(INT64, ["batch", "total"]), "position_ids": PLACES}
PORTS = {**INPUTS, "label": PLACES}
CAUSAL = [Term("causal-lm", "logits", "label", 1.0, 90, -100, -1)]
CLASSES = [Term("cross-entropy", "logits", "label", 1.0, 3, -100)]
CLASS = {"input_ids": PLACES, "attention_mask": PLACES, "label": tensor_type(INT64, ["batch"])}
ROWS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15]]
Rows = Mapping[str, Sequence[Any]]


def to_json_lines(folder: Path, columns: Rows) -> Path:
    rows = zip(*columns.values(), strict=True)
    text = "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
    (folder / "data.jsonl").write_text(text, "utf-8")
    return folder / "data.jsonl"


def to_parquet(folder: Path, columns: Rows) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(dict(columns)), folder / "data.parquet")
    return folder / "data.parquet"


Writer = Callable[[Path, Rows], Path]
both = pytest.mark.parametrize("write", [to_json_lines, to_parquet])


def opened(path: Path, inputs: Any = PORTS, terms: Sequence[Term] = CAUSAL, **options: Any) -> Data:
    told = options.pop("told", [])
    chosen = SequenceOptions(**options)
    return open_data(
        path, inputs, {"input_ids": Range(0, 89)}, terms=terms, options=chosen, tell=lambda t, _: told.append(t)
    )


def like_torch(rows: Sequence[Sequence[int]], fill: int) -> np.ndarray:
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill).numpy()


@both
def test_lists_are_padded_in_each_batch_and_the_rest_is_made(tmp_path: Path, write: Writer) -> None:
    data = opened(write(tmp_path, {"input_ids": ROWS}), pad_id=3)
    for chosen in ([0, 1, 2, 3], [3, 1], [2]):
        batch, rows = data.batch(np.array(chosen)), [ROWS[i] for i in chosen]
        np.testing.assert_array_equal(batch["input_ids"], like_torch(rows, 3))
        np.testing.assert_array_equal(batch["label"], like_torch(rows, -100))
        np.testing.assert_array_equal(batch["attention_mask"], like_torch([[1] * len(row) for row in rows], 0))
        np.testing.assert_array_equal(batch["position_ids"], like_torch([list(range(len(row))) for row in rows], 0))
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in batch.values())
    assert list(data.batch(np.array([], np.int64))["input_ids"].shape) == [0, 0]  # of a process without a part


@both
def test_labels_of_the_data_are_kept(tmp_path: Path, write: Writer) -> None:
    labels = [[-100, -100, row[2]] if len(row) == 3 else row for row in ROWS]
    batch = opened(write(tmp_path, {"label": labels, "input_ids": ROWS})).batch(np.arange(4))
    np.testing.assert_array_equal(batch["label"], like_torch(labels, -100))
    np.testing.assert_array_equal(batch["input_ids"], like_torch(ROWS, 0))


def test_arrays_of_one_length_get_masks_and_labels_too(tmp_path: Path) -> None:
    ids = np.array([[1, 2, 3, 0], [4, 5, 0, 0], [6, 0, 7, 8]])
    np.savez(tmp_path / "a.npz", input_ids=ids)
    batch = opened(tmp_path / "a.npz").batch(np.arange(3))
    np.testing.assert_array_equal(batch["attention_mask"], np.ones((3, 4)))
    np.testing.assert_array_equal(batch["label"], ids)
    np.testing.assert_array_equal(batch["position_ids"], [[0, 1, 2, 3]] * 3)
    ends = opened(tmp_path / "a.npz", pad_id=0).batch(np.arange(3))  # a 0 inside is a token
    np.testing.assert_array_equal(ends["attention_mask"], [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(ends["label"], [[1, 2, 3, -100], [4, 5, -100, -100], [6, 0, 7, 8]])
    np.savez(tmp_path / "b.npz", input_ids=ids, attention_mask=(ids != 0).astype(int))
    masked = opened(tmp_path / "b.npz").batch(np.arange(3))
    np.testing.assert_array_equal(masked["label"], np.where(ids == 0, -100, ids))


@both
def test_classes_of_texts(tmp_path: Path, write: Writer) -> None:
    data = opened(write(tmp_path, {"input_ids": ROWS, "label": [0, 2, 1, 0]}), CLASS, CLASSES)
    batch = data.batch(np.array([2, 1]))
    np.testing.assert_array_equal(batch["input_ids"], [[10, 11, 12, 13], [8, 9, 0, 0]])
    np.testing.assert_array_equal(batch["attention_mask"], [[1, 1, 1, 1], [1, 1, 0, 0]])
    np.testing.assert_array_equal(batch["label"], [1, 2])


def test_a_class_for_each_token(tmp_path: Path) -> None:
    kinds = [[0, 1, 2], [1, 1], [0, 0, 0, 2], [-100, 1]]
    batch = opened(to_json_lines(tmp_path, {"input_ids": ROWS, "label": kinds}), PORTS, CLASSES).batch(np.arange(4))
    np.testing.assert_array_equal(batch["label"], like_torch(kinds, -100))


def test_what_is_cut(tmp_path: Path) -> None:
    path = to_json_lines(tmp_path, {"input_ids": ROWS})
    batch = opened(path, max_length=3).batch(np.arange(4))
    np.testing.assert_array_equal(batch["label"], like_torch([row[:3] for row in ROWS], -100))
    fixed = {name: tensor_type(INT64, ["batch", 6]) for name in PORTS}
    assert {array.shape for array in opened(path, fixed).batch(np.arange(2)).values()} == {(2, 6)}
    short = {name: tensor_type(INT64, ["batch", 3]) for name in PORTS}
    with raises(UsageError, "wrong_shape", "data.jsonl", "input_ids", "4", "3") as told:
        opened(path, short)
    assert "`max_length=3`" in (told.value.hint or "")
    assert opened(path, short, max_length=3).batch(np.arange(2))["input_ids"].shape == (2, 3)


def test_packed_rows(tmp_path: Path) -> None:
    """Rows hold whole samples in order; no sample's first token is predicted from the sample before it."""
    told: list[str] = []
    rows = [*ROWS, [20, 21, 22, 23, 24, 25, 26], [30]]
    data = opened(to_json_lines(tmp_path, {"input_ids": rows}), max_length=6, pack=True, told=told)
    assert re.findall(r"\d+", told[0]) == ["6", "4", "6"]
    batch = data.batch(np.arange(len(data)))
    packs = [ROWS[0] + ROWS[1], ROWS[2] + ROWS[3], [20, 21, 22, 23, 24, 25]]  # the last sample alone predicts nothing
    np.testing.assert_array_equal(batch["input_ids"], like_torch(packs, 0))
    labels = [[-100, 6, 7, -100, 9], [-100, 11, 12, 13, -100, 15], [-100, 21, 22, 23, 24, 25]]
    np.testing.assert_array_equal(batch["label"], like_torch(labels, -100))
    places = [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1], list(range(6))]
    np.testing.assert_array_equal(batch["position_ids"], like_torch(places, 0))
    np.testing.assert_array_equal(batch["attention_mask"], like_torch([[1] * len(row) for row in packs], 0))
    ports = {name: kind for name, kind in PORTS.items() if name != "position_ids"}
    assert opened(to_json_lines(tmp_path, {"input_ids": rows}), ports, max_length=6, pack=True).arrays.keys() <= {
        *ports
    }


@pytest.mark.parametrize("kind", [TensorProto.BOOL, FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize("packed", [True, False])
def test_by_a_mask_of_pairs_samples_see_themselves_alone(kind: int, packed: bool, tmp_path: Path) -> None:
    """PyTorch's attention over packed or padded rows is that over each sample by itself, with is_causal."""
    lead = ["batch", 1] if kind != FLOAT else ["batch"]
    inputs = {**PORTS, "attention_mask": tensor_type(kind, [*lead, "length", "total"])}
    told: list[str] = []
    options = {"pack": True, "max_length": 6} if packed else {}
    data = opened(to_json_lines(tmp_path, {"input_ids": ROWS}), inputs, told=told, **options)
    text = "4 samples are packed into 2 rows of at most 6 tokens: a token attends only to its own sample"
    assert told == [text] * packed
    batch = data.batch(np.arange(len(data)))
    assert sorted(batch) == sorted(inputs)
    table = torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
    mask, ids = torch.tensor(batch["attention_mask"]), torch.tensor(batch["input_ids"])
    mask = (mask if mask.ndim == 4 else mask[:, None]).to(torch.bool if kind == TensorProto.BOOL else torch.float32)
    attention = torch.nn.functional.scaled_dot_product_attention
    x = table[ids][:, None]
    found = attention(x, x, x, attn_mask=mask)[:, 0]
    expected = []
    for row in ROWS:
        alone = table[torch.tensor(row)][None, None]
        expected.append(attention(alone, alone, alone, is_causal=True)[0, 0])
    packs = [torch.cat(expected[:2]), torch.cat(expected[2:])] if packed else expected
    for got, wanted in zip(found, packs, strict=True):
        torch.testing.assert_close(got[: len(wanted)], wanted)
    assert torch.isfinite(found).all()


def test_a_mask_of_pairs_is_made_where_its_meaning_is_known(tmp_path: Path) -> None:
    """Not of integers, nor for a loss that predicts no tokens; and without positions it is told where places begin."""
    path, told = to_json_lines(tmp_path, {"input_ids": ROWS}), []
    pairs = tensor_type(INT64, ["batch", 1, "length", "total"])
    with pytest.raises(UsageError, match="attention_mask"):
        opened(path, {**PORTS, "attention_mask": pairs})
    inputs = {"input_ids": PLACES, "label": PLACES, "attention_mask": tensor_type(FLOAT, ["batch", "length", "length"])}
    opened(path, inputs, pack=True, max_length=6, told=told)
    assert told[0].endswith("only to its own sample, but its position is counted from the start of the row")
    with pytest.raises(UsageError, match="attention_mask"):
        opened(
            to_json_lines(tmp_path, {"input_ids": ROWS, "label": [0, 1, 2, 0]}),
            {**inputs, "label": tensor_type(INT64, ["batch"])}, CLASSES,
        )  # fmt: skip


def test_samples_without_a_judged_token_are_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    labels = [[5, 6, 7], [8, -100], [-100] * 4, [-100, 15]]  # nothing predicts the first token
    data = opened(to_json_lines(tmp_path, {"input_ids": ROWS, "label": labels}), told=told)
    np.testing.assert_array_equal(data.batch(np.arange(2))["input_ids"], like_torch([ROWS[0], ROWS[3]], 0))
    assert len(data) == 2 and told[0].startswith("2 of 4 samples")
    with raises(UsageError, "no_data", "data.jsonl"):
        opened(to_json_lines(tmp_path, {"input_ids": ROWS, "label": [[-100] * len(row) for row in ROWS]}))


def test_parts_and_digests(tmp_path: Path) -> None:
    data = opened(to_json_lines(tmp_path, {"input_ids": ROWS * 5}))
    training, validation = held_out(data, 0.25)
    assert (len(training), len(validation)) == (15, 5)
    assert validation.batch(np.arange(5))["input_ids"].shape[0] == 5
    other = opened(to_json_lines(tmp_path, {"input_ids": [*ROWS * 4, [5, 6], [7, 8, 9], *ROWS[2:]]}))
    assert len({data.digest(), training.digest(), other.digest(), opened(other.source, max_length=3).digest()}) == 4
    assert opened(other.source).digest() == other.digest()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"input_ids": ROWS, "label": [*ROWS[:3], [1, 2, 3]]},
            ("wrong_shape", "data.jsonl", "3", "0", "2", "input_ids", "3", "label"),
        ),
        ({"input_ids": [*ROWS, []]}, ("no_data", "data.jsonl", "input_ids", "4", "0")),
        ({"input_ids": [*ROWS, [1, 90]]}, ("wrong_value", "data.jsonl", "input_ids", "90", "4", "0", "1", "0", "89")),
        ({"input_ids": [*ROWS, [1.5]]}, ("wrong_type", "data.jsonl", "input_ids", "float64", "int64")),
        ({"input_ids": ROWS, "label": [1, 2, 3, 4]}, ("wrong_shape", "data.jsonl", "label", "4")),
    ],
)
def test_lists_that_do_not_fit(tmp_path: Path, columns: Rows, said: tuple[str, ...]) -> None:
    with raises(UsageError, *said):
        opened(to_json_lines(tmp_path, columns))


def test_sets_that_tell_inputs_by_their_order(tmp_path: Path) -> None:
    """Nothing is made where it may be there: tensors without names are the inputs in their order."""
    home = tmp_path / "test_data_set_0"
    home.mkdir()
    mask, ids = np.array([[1, 1, 0]]), np.array([[5, 6, 0]])
    for at, array in enumerate((mask, ids, ids)):
        (home / f"input_{at}.pb").write_bytes(numpy_helper.from_array(array).SerializeToString())
    inputs = {"attention_mask": PLACES, "input_ids": PLACES, "label": PLACES}
    batch = opened(home, inputs).batch(np.arange(1))
    assert (batch["attention_mask"] == mask).all() and (batch["input_ids"] == ids).all()


def test_lists_where_none_are_taken(tmp_path: Path) -> None:
    path = to_json_lines(tmp_path, {"x": ROWS})
    for kind, said in ((tensor_type(FLOAT, ["n"]), ()), (tensor_type(INT64, ["n", "k", 1]), ("2", "4", "int64", "1"))):
        with raises(UsageError, "wrong_shape", "data.jsonl", "x", *said):
            open_data(path, {"x": kind})
    for options in ({"max_length": 4}, {"pad_id": 0}):
        with raises(UsageError, "conflict", "max_length", "pack", "pad_id"):
            opened(path, {"x": tensor_type(FLOAT, ["n"])}, (), **options)


def test_packing_needs_tokens_alone(tmp_path: Path) -> None:
    with raises(UsageError, "missing_value", "pack"):
        SequenceOptions(pack=True)
    path = to_json_lines(tmp_path, {"input_ids": ROWS, "label": [0, 1, 2, 0]})
    with raises(UsageError, "conflict", "pack", "label"):
        opened(path, CLASS, CLASSES, pack=True, max_length=8)


def test_whole_numbers_of_different_lengths_are_tokens_whatever_they_are_called(tmp_path: Path) -> None:
    """Of two tables, and of none that is known to be indexed."""
    inputs = {"words": PLACES, "tags": PLACES, "label": tensor_type(INT64, ["batch"])}
    tags = [[1] * len(row) for row in ROWS]
    path, told = to_json_lines(tmp_path, {"tags": tags, "words": ROWS, "label": [0, 2, 1, 0]}), []
    data = open_data(path, inputs, {}, terms=CLASSES)
    data.tell_padding(lambda text, _: told.append(text))
    np.testing.assert_array_equal(data.batch(np.arange(4))["words"], like_torch(ROWS, 0))
    np.testing.assert_array_equal(data.batch(np.arange(2))["tags"], like_torch(tags[:2], 0))
    assert len(told) == 1 and told[0].startswith("'words'") and re.findall(r"\d", told[0]) == ["2", "4", "0"]


def test_padding_that_a_mask_or_the_loss_leaves_out_is_no_word_worth(tmp_path: Path) -> None:
    told: list[str] = []
    for inputs, terms in ((CLASS, CLASSES), ({"input_ids": PLACES, "label": PLACES}, CAUSAL)):
        path = to_json_lines(tmp_path, {"input_ids": ROWS, **({"label": [0, 2, 1, 0]} if terms == CLASSES else {})})
        opened(path, inputs, terms).tell_padding(lambda text, _: told.append(text))
    assert told == []


def test_labels_of_different_lengths_beside_samples_of_one_are_refused(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(FLOAT, ["batch", 2]), "label": PLACES}
    path = to_json_lines(tmp_path, {"x": [[1, 2]] * 4, "label": ROWS})
    with raises(UsageError, "wrong_shape", "data.jsonl", "label"):
        open_data(path, inputs, {}, terms=CLASSES)
