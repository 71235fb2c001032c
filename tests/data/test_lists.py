"""Columns of lists: the same lists as Python's, cut, chosen and padded as Python and PyTorch do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onnxgrad_cli.data.lists import Lists, padded

random = np.random.default_rng(0)
LENGTHS = [[3, 0, 5, 1], [0, 0], [], [4], [0, 7, 0]]


def column(lengths: list[int]) -> tuple[Lists, list[list[int]]]:
    rows = [random.integers(0, 100, length).tolist() for length in lengths]
    return Lists.cut(np.array([x for row in rows for x in row], np.int64), np.array(lengths, np.int64)), rows


def as_lists(lists: Lists) -> list[list[int]]:
    return [row.tolist() for row in lists.take(range(len(lists)))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_what_was_cut(lengths: list[int]) -> None:
    lists, rows = column(lengths)
    assert as_lists(lists) == rows and lists.lengths.tolist() == lengths
    assert lists.shape == (len(rows), max(map(len, rows), default=0)) and lists.size == sum(lengths)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("most", [0, 1, 3, 9])
def test_lists_are_truncated(lengths: list[int], most: int) -> None:
    lists, rows = column(lengths)
    assert as_lists(lists.cut_off(most)) == [row[:most] for row in rows]
    each = random.integers(0, 6, len(rows))
    assert as_lists(lists.cut_at(each)) == [row[:stop] for row, stop in zip(rows, each, strict=True)]


def test_lists_are_chosen_in_any_order() -> None:
    lists, rows = column([3, 0, 5, 1])
    for chosen in ([2, 0, 0], [1], [], [3, 2, 1, 0]):
        places = np.array(chosen, np.int64)
        assert as_lists(lists.only(places)) == [rows[i] for i in chosen]
        assert lists.longest(places) == max((len(rows[i]) for i in chosen), default=0)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("elements", [1, 6, 1000])
def test_blocks_hold_every_element_and_no_other(lengths: list[int], elements: int) -> None:
    lists, rows = column(lengths)
    blocks = list(lists.blocks(elements))
    assert bool(blocks) == any(lengths)
    seen = {start + i: set(row.tolist()) for start, block in blocks for i, row in enumerate(block)}
    first = {int(lists.values[0])} if lists.size else set()
    assert not blocks or seen == {i: set(row) or first for i, row in enumerate(rows)}
    assert all(block.shape[0] == 1 or block.shape[0] * lists.shape[1] <= elements for _, block in blocks)


def test_padding_is_pytorchs() -> None:
    rows = [random.integers(0, 9, length) for length in (2, 0, 4)]
    expected = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=-100)
    np.testing.assert_array_equal(padded(rows, [4], -100), expected.numpy())
    assert padded([], [3], 0).shape == (0, 3)
