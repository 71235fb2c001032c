"""Samples held out for validation: chosen by the seed, none in both parts, none lost, nothing copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.data import Batches, Data, fraction_of, held_out, open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.training.evaluate import EvalResult, Evaluator

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
    with pytest.raises(UsageError, match=f"has {count} samples: a fraction of {fraction} for validation") as told:
        held_out(folder(tmp_path, count, batch), fraction)
    assert told.value.hint and ("a batch of 8" if batch == 8 else "one sample") in told.value.hint


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
    with pytest.raises(UsageError, match=f"{text} of the data") as told:
        fraction_of(text)
    assert "between 0 and 1" in (told.value.hint or "")


def test_the_loss_of_whole_batches_is_a_mean(tmp_path: Path) -> None:
    """A model that takes batches of 8 is evaluated on 16 samples of 20; the mean is over those."""

    class Session:
        sums, weights = False, (1.0,)

        def __call__(self, feeds: dict[str, np.ndarray], weights: object) -> EvalResult:
            return EvalResult({}, [float(feeds["x"][:, 0].mean())], [None], 0.0)

    data = folder(tmp_path, 20, batch=8)
    evaluator = Evaluator(Session(), data, Batches(data, 8, shuffle=False), [])  # type: ignore[arg-type]
    assert evaluator({}) == {"loss": np.arange(16).mean()}
