"""Samples of an epoch, of each process and of the validation: each once, none in two parts, none lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto

from onnxgrad_cli.data import (
    Batches,
    Data,
    balance,
    fraction_of,
    held_out,
    open_data,
)
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from tests.data.leading_facts import raises_first
from tests.data.test_dataset import X, Y, samples, to_npz
from tests.data.test_preprocessing import PORTS, opened
from tests.facts import raises

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def folder(path: Path, count: int, batch: int | str = "n") -> Data:
    """Samples whose inputs say which they are."""
    np.save(path / "x.npy", np.arange(count)[:, None] + np.array([0, 0.25, 0.5]))
    np.save(path / "y.npy", np.arange(count))
    np.save(path / "t.npy", np.array(2.0))
    ports = {"x": tensor_type(FLOAT, [batch, 3]), "y": tensor_type(INT64, [batch]), "t": tensor_type(FLOAT, [])}
    return open_data(path, ports)


def seen(data: Data, size: int = 8, *, shuffle: bool = True) -> list[int]:
    """The samples of an epoch, in its order; their inputs belong together."""
    found = []
    for part in Batches(data, size, shuffle=shuffle):
        batch = data.batch(part.indices)
        np.testing.assert_array_equal(batch["x"], batch["y"][:, None] + np.array([0, 0.25, 0.5], np.float32))
        assert batch["x"].dtype == np.float32 and batch["t"] == 2
        found += batch["y"].tolist()
    return found


@pytest.mark.parametrize(
    "count, fraction, wanted", [(50, 0.2, 10), (50, 0.5, 25), (7, 0.1, 1), (2, 0.5, 1), (9, 0.9, 8)]
)
def test_every_sample_is_in_one_part(tmp_path: Path, count: int, fraction: float, wanted: int) -> None:
    training, validation = held_out(folder(tmp_path, count), fraction, seed=3)
    assert (len(training), len(validation)) == (count - wanted, wanted)
    assert len(seen(training)) == len(training)
    assert sorted(seen(training) + seen(validation)) == list(range(count))


def test_the_seed_chooses(tmp_path: Path) -> None:
    data = folder(tmp_path, 100)
    parts = [seen(held_out(data, 0.2, seed)[1], shuffle=False) for seed in (0, 0, 1, 2)]
    assert parts[0] == parts[1] == sorted(parts[0])
    assert len({tuple(part) for part in parts}) == 3
    first = next(iter(Batches(data, 20, seed=0))).indices
    assert set(first) != set(parts[0])  # the choice is not the beginning of an epoch


def test_all_samples_are_as_likely(tmp_path: Path) -> None:
    data = folder(tmp_path, 20)
    counts = np.zeros(20)
    for seed in range(400):
        counts[seen(held_out(data, 0.25, seed)[1])] += 1
    assert counts.min() > 60 and counts.max() < 140  # 100 ± 4.6 standard deviations


def test_nothing_is_copied(tmp_path: Path) -> None:
    data = folder(tmp_path, 50)
    assert isinstance(data.arrays["x"], np.memmap)
    for part in held_out(data, 0.2):
        assert part.arrays is data.arrays


def test_a_part_can_be_cut_again(tmp_path: Path) -> None:
    rest, test = held_out(folder(tmp_path, 60), 0.25)
    training, validation = held_out(rest, 0.2)
    assert [len(part) for part in (training, validation, test)] == [36, 9, 15]
    assert sorted(seen(training) + seen(validation) + seen(test)) == list(range(60))


@pytest.mark.parametrize("count, fraction, wanted", [(100, 0.2, 16), (100, 0.3, 32), (16, 0.5, 8), (100, 0.9, 88)])
def test_whole_batches_for_a_model_that_takes_no_others(
    tmp_path: Path, count: int, fraction: float, wanted: int
) -> None:
    training, validation = held_out(folder(tmp_path, count, batch=8), fraction)
    assert len(seen(validation, shuffle=False)) == len(validation) == wanted
    assert len(seen(training)) == (count - wanted) // 8 * 8


@pytest.mark.parametrize("count, batch, fraction", [(1, "n", 0.5), (10, "n", 0.01), (10, "n", 0.99), (15, 8, 0.5)])
def test_a_part_without_samples_is_refused(tmp_path: Path, count: int, batch: int | str, fraction: float) -> None:
    data = folder(tmp_path, count, batch)
    with raises_first(UsageError, "wrong_value", data.source.name, str(count), str(fraction)) as told:
        held_out(data, fraction)
    assert told.value.hint and ("batch of 8" if batch == 8 else "one sample") in told.value.hint


@pytest.mark.parametrize(
    "text, found", [("0.2", 0.2), ("2e-1", 0.2), (0.5, 0.5), ("val.npz", None), ("0.3", None), (Path("val"), None)]
)
def test_a_share_is_told_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | float | Path, found: float | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("0.3").mkdir()
    assert fraction_of(text) == found


@pytest.mark.parametrize("text", ["0", "1", "20", "-0.5", "inf"])
def test_a_number_that_is_no_share(text: str) -> None:
    with pytest.raises(UsageError) as told:
        fraction_of(text)
    assert told.value.code == "wrong_value" and text in told.value.message and "0.2" in (told.value.hint or "")


random = np.random.default_rng(0)


N = 20


def test_an_epoch_has_every_sample_once_and_no_two_are_alike() -> None:
    batches = Batches(samples(100), 8, seed=1)
    assert len(batches) == 13
    epochs = [[part for part in batches] for _ in range(3)]
    orders = [np.concatenate([part.indices for part in epoch]) for epoch in epochs]
    assert [len(part.indices) for part in epochs[0]] == [8] * 12 + [4]
    assert all(part.whole == len(part.indices) for part in epochs[0])
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert (batches.epoch, batches.position) == (3, 0)
    again = Batches(samples(100), 8, seed=1)
    np.testing.assert_array_equal(np.concatenate([part.indices for part in again]), orders[0])
    other = Batches(samples(100), 8, seed=2)
    assert not np.array_equal(np.concatenate([part.indices for part in other]), orders[0])


def test_without_shuffling_and_without_the_last() -> None:
    parts = [part.indices.tolist() for part in Batches(samples(10), 4, shuffle=False, drop_last=True)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("taken", [0, 1, 6, 7, 8, 13, 14, 17])
def test_goes_on_from_any_place(taken: int) -> None:
    def endless(batches: Batches) -> Any:
        while True:
            yield from batches

    whole = endless(Batches(samples(50), 8, seed=3))
    wanted = [next(whole).indices.tolist() for _ in range(30)]
    batches = Batches(samples(50), 8, seed=3)
    run = endless(batches)
    for _ in range(taken):
        next(run)
    resumed = Batches(samples(50), 8, seed=3)
    resumed.restore(json.loads(json.dumps(batches.state())))
    run = endless(resumed)
    assert [next(run).indices.tolist() for _ in range(30 - taken)] == wanted[taken:]


def test_another_order_is_refused() -> None:
    state = Batches(samples(50), 8, seed=3).state()
    for count, size, seed, said in (
        (51, 8, 3, ("50", "51")),
        (50, 9, 3, ("8", "9")),
        (50, 8, 4, ("3", "4")),
    ):
        with raises(UsageError, "mismatch", *said):
            Batches(samples(count), size, seed).restore(state)
    with raises(OnnxgradError, "unreadable_file", "0", "7", "0", "7"):
        Batches(samples(50), 8, 3).restore({**state, "position": 7})
    with pytest.raises(UsageError):
        Batches(samples(50), 8, 3).restore({})


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_parts_of_ranks_make_the_whole(world: int) -> None:
    whole = list(Batches(samples(53), 10, seed=5))
    parts = [list(Batches(samples(53), 10, seed=5, rank=rank, world=world)) for rank in range(world)]
    for batch, *shares in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([share.indices for share in shares]), batch.indices)
        assert {share.whole for share in shares} == {len(batch.indices)}
        lengths = [len(share.indices) for share in shares]
        assert max(lengths) - min(lengths) <= 1


def test_a_place_holds_for_any_number_of_ranks() -> None:
    one = Batches(samples(50), 8)
    next(iter(one))
    two = Batches(samples(50), 8, rank=1, world=2)
    two.restore(one.state())
    np.testing.assert_array_equal(next(iter(two)).indices, next(iter(one)).indices[4:])


def test_a_model_with_a_fixed_batch(tmp_path: Path) -> None:
    inputs = {"x": tensor_type(FLOAT, [8, 3]), "y": tensor_type(INT64, ["batch"])}
    data = open_data(to_npz(tmp_path, {"x": X, "y": Y}), inputs)
    assert data.batch_size == 8
    told: list[str] = []
    batches = Batches(data, 8, tell=lambda text, level: told.append(text))
    assert [len(part.indices) for part in batches] == [8, 8]
    assert "the last 4 samples" in told[0]
    with pytest.raises(UsageError, match="batches of 8 samples, not of 16"):
        Batches(data, 16)
    assert len(Batches(data, 16, rank=1, world=2)) == 1
    with raises(UsageError, "no_data", "data.npz", "20", "32"):
        Batches(samples(20, 32), 32)


@pytest.mark.parametrize("size, rank, world", [(0, 0, 1), (-1, 0, 1), (2, 0, 3), (8, 2, 2)])
def test_batches_that_can_not_be(size: int, rank: int, world: int) -> None:
    with pytest.raises(UsageError):
        Batches(samples(50), size, rank=rank, world=world)


def test_classes_are_drawn_alike_often_as_by_pytorchs_sampler(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    np.savez(tmp_path / "a.npz", x=np.zeros((1000, 3)), y=labels)
    data = opened(tmp_path / "a.npz")
    weights = balance(data, "y", None, lambda text, level: None)
    batches = Batches(data, 100, 5, weights=weights)
    drawn = [labels[part.indices] for _ in range(3) for part in batches]
    counts = np.bincount(np.concatenate(drawn))
    torch.manual_seed(0)
    sampler = torch.utils.data.WeightedRandomSampler((1 / np.bincount(labels))[labels].tolist(), 3000)
    wanted = np.bincount(labels[list(sampler)])
    assert np.abs(counts - 1000).max() < 100 and np.abs(wanted - 1000).max() < 100
    again = Batches(data, 100, 5, weights=weights)
    assert all((labels[part.indices] == row).all() for part, row in zip(again, drawn, strict=False))
    with raises(UsageError, "wrong_type", "balance", "x"):
        balance(data, "x", None, lambda text, level: None)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_yes_and_no_are_classes_to_balance(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As the losses of yes and no take them: floats, in the output's shape."""
    inputs = {"x": PORTS["x"], "y": tensor_type(TensorProto.FLOAT, ["N", *shape[1:]])}
    for labels, fit in (([0, 1, 0, 0, 0, 1], True), ([0, 1, 0, 0.5, 0, 1], False)):
        np.savez(tmp_path / "a.npz", x=np.zeros((6, 3)), y=np.array(labels).reshape(shape))
        data = open_data(tmp_path / "a.npz", inputs)
        if fit:
            weights = balance(data, "y", None, lambda text, level: None)
            np.testing.assert_allclose(weights, [1 / 8, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 4])
        else:
            with raises(UsageError, "wrong_type", "balance", "y"):
                balance(data, "y", None, lambda text, level: None)


def test_balance_never_draws_samples_whose_label_does_not_count(tmp_path: Path) -> None:
    inputs = {"x": PORTS["x"], "y": tensor_type(TensorProto.INT64, ["N"])}
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3)), y=np.array([0, 0, -100, 1, 0, -100]))
    lines: list[str] = []
    weights = balance(open_data(tmp_path / "a.npz", inputs), "y", -100, lambda text, level: lines.append(text))
    np.testing.assert_allclose(weights, [1 / 6, 1 / 6, 0, 1 / 2, 1 / 6, 0])
    assert [re.findall(r"-?\d+", line) for line in lines] == [["2", "1", "3"], ["2", "-100"]]


def test_one_class_is_not_balanced_unsaid(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 3)), y=np.zeros(6, np.int64))
    told: list[str] = []
    balance(opened(tmp_path / "a.npz"), "y", None, lambda text, level: told.append(text))
    assert len(told) == 1 and told[0].startswith("caution: ")
