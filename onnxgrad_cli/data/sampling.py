"""Choose samples: hold some out, balance classes, shuffle, form batches, and divide each batch among processes.

The order of the samples in an epoch depends only on the seed and the index of the epoch. A position in a run is
therefore two integers, the epoch and the batch. A stopped run continues in the same order, even with a different number
of processes. The choice of held-out samples depends only on the seed, the fraction and the number of samples. A resumed
run therefore holds out the same samples.

`balance` returns sampling weights with which all classes are drawn equally often. Each sample weighs 1 / (size of its
class), as is usual with PyTorch's WeightedRandomSampler. An epoch of N samples then consists of N draws with
replacement, so some samples are drawn several times and others never. The loss function does not change.

If a run trains on several data sets at once (`NamedSet`), each step takes a batch of each set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data.batch_shard import BatchShard
from onnxgrad_cli.data.dataset import Data
from onnxgrad_cli.data.ragged import ONE_BY_ONE
from onnxgrad_cli.errors import mismatch, no_data, unreadable, wrong_shape, wrong_type, wrong_value


class Batches:
    """Batches of samples, epoch after epoch.

    Attributes:
        epoch: the number of complete epochs.
        position: the number of batches of the current epoch that were yielded.
    """

    def __init__(
        self,
        data: Data,
        size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        weights: np.ndarray | None = None,
        tell: Tell = silent,
    ) -> None:
        """Args:
            data: the samples.
            size: the number of samples of a batch, over all processes.
            seed: the seed of the random order.
            shuffle: shuffle each epoch; if False, use the order of the data.
            drop_last: leave out the last batch of an epoch if it is short.
            rank: the index of this process, from 0.
            world: the number of processes.
            weights: the probability of drawing each sample, float64 (N,), with sum 1; None takes each sample once per
                epoch.
            tell: receives log messages.

        Raises:
            UsageError: the data have too few samples, there are more processes than samples in a batch, or the model
                does not take batches of this size.
        """
        if not 1 <= world <= size or not 0 <= rank < world:
            raise wrong_value(f"a batch of {size} samples can't be split among {world} processes", "use a larger batch")
        _check_size(data, size, world)
        self.samples, self.size, self.seed, self.shuffle = len(data), size, seed, shuffle
        self.rank, self.world, self._weights = rank, world, weights
        rest = self.samples % size
        self.drop_last = drop_last or data.batch_size is not None
        if self.drop_last and self.samples < size:
            raise no_data(f"'{data.source}' has {self.samples} samples, fewer than a batch of {size}", "add samples")
        if rest and self.drop_last and not drop_last:
            whose = "each epoch" if shuffle else f"'{data.source}'"
            tell(f"the model takes batches of {data.batch_size}: the last {rest} samples of {whose} are left out", 0)
        self.epoch = self.position = 0
        self._ordered = -1, np.arange(0)  # (an epoch, the order of the samples in this epoch)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.samples // self.size if self.drop_last else -(-self.samples // self.size)

    @property
    def dealt(self) -> int:
        """The number of batches that were yielded in all epochs."""
        return self.epoch * len(self) + self.position

    def __iter__(self) -> Iterator[BatchShard]:
        """Yield this process's part of each remaining batch of the current epoch, then go to the next epoch."""
        epoch, count = self.epoch, len(self)
        for position in range(self.position, count):
            self.epoch, self.position = (epoch + 1, 0) if position + 1 == count else (epoch, position + 1)
            yield self.at(epoch * count + position)

    def at(self, number: int) -> BatchShard:
        """Return this process's part of the batch with the index `number`, counted from 0 over all epochs."""
        epoch, position = divmod(number, len(self))
        if epoch != self._ordered[0]:
            self._ordered = epoch, self._order(epoch)
        batch = self._ordered[1][position * self.size : (position + 1) * self.size]
        first, end = (len(batch) * rank // self.world for rank in (self.rank, self.rank + 1))
        return BatchShard(batch[first:end], len(batch), epoch, position * self.size + first, batch)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.samples)
        draw = np.random.Generator(np.random.PCG64((self.seed, epoch)))
        if self._weights is None:
            return draw.permutation(self.samples)
        return draw.choice(self.samples, self.samples, p=self._weights)

    def state(self) -> dict[str, int | bool]:
        """Return the position after the yielded batches, and the settings that determine the order, for JSON."""
        return {"epoch": self.epoch, "position": self.position, **self._made_of()}

    def restore(self, state: Mapping[str, int | bool]) -> None:
        """Continue from a position that `state` returned.

        Raises:
            UsageError: the position belongs to a different order: the number of samples, the batch size, the seed or
                another setting differs.
            OnnxgradError: there is no such position in the data.
        """
        for name, value in self._made_of().items():
            if state.get(name) != value:
                message = f"the run was started with {name}={state.get(name)}, not with {name}={value}"
                raise mismatch(message, "continue with the same data and options")
        epoch, position = int(state.get("epoch", -1)), int(state.get("position", -1))
        if epoch < 0 or not 0 <= position < len(self):
            place = f"epoch {epoch}, batch {position}, counted from 0, but an epoch has {len(self)} batches"
            raise unreadable(f"the checkpoint is damaged: it continues at {place}", "use another copy of it")
        self.epoch, self.position = epoch, position

    def _made_of(self) -> dict[str, int | bool]:
        return {name: getattr(self, name) for name in ("samples", "size", "seed", "shuffle", "drop_last")}


def _check_size(data: Data, size: int, world: int) -> None:
    if size > world and data.padding is not None and data.padding.obstacle:
        problem = f"samples of different sizes, which can't be in one batch: {data.padding.obstacle}"
        raise wrong_shape(f"'{data.source}' has {problem}", ONE_BY_ONE)
    if data.batch_size is not None and size != data.batch_size * world:
        each = f" in each of {world} processes" if world > 1 else ""
        hint = f"use batches of {data.batch_size * world}, or build the model with `dims` or `shapes` for another size"
        raise wrong_shape(f"the model takes batches of {data.batch_size} samples{each}, not of {size / world:g}", hint)


def balance(data: Data, label: str, ignore_index: int | None, tell: Tell) -> np.ndarray:
    """Return the probability of drawing each sample so that all classes are equally frequent, float64 (N,), with sum 1.

    Args:
        data: the training data.
        label: the name of the label, which holds class numbers, or 1 and 0.
        ignore_index: the label of samples that are never drawn; None draws all samples.
        tell: receives log messages about the sizes of the classes and the ignored samples.

    Raises:
        UsageError: the label does not name one class per sample.
    """
    labels = _classes(data, label)
    if labels is None:
        hint = "leave `balance` out"
        raise wrong_type(f"`balance`: the label '{label or 'of the loss'}' does not hold one class per sample", hint)
    counted = np.ones(len(labels), bool) if ignore_index is None else labels != ignore_index
    classes, places, counts = np.unique(labels[counted], return_inverse=True, return_counts=True)
    if len(classes) > 1:
        tell(f"{len(classes)} classes of {counts.min():,} to {counts.max():,} samples are drawn equally often", 0)
    else:
        tell("caution: all samples have the same class: there is nothing to balance", 0)
    if ignored := int((~counted).sum()):
        tell(f"{ignored:,} samples are not drawn: their label {ignore_index} does not count in the loss", 0)
    probabilities = np.zeros(len(labels))
    probabilities[counted] = (1.0 / counts / len(classes))[places]
    return probabilities


def _classes(data: Data, label: str) -> np.ndarray | None:
    """Return the class of each sample, (N,): integers, or 1 and 0.

    Return None if labels are not one class per sample.
    """
    column = data.arrays.get(label)
    if not isinstance(column, np.ndarray) or column.ndim not in (1, 2) or column[:1].size > 1:
        return None
    labels = np.asarray(column[data.rows(np.arange(len(data)))]).reshape(-1)
    whole = data.dtypes[label].kind in "iu"
    return labels if whole or bool(np.isin(labels, (0, 1)).all()) else None


def held_out(data: Data, fraction: float, seed: int = 0) -> tuple[Data, Data]:
    """Hold out a random part of the data for validation.

    Args:
        data: the samples to split.
        fraction: the fraction of samples to hold out, between 0 and 1. Their number is rounded to an integer, or to
            whole batches if the model takes batches of a fixed size.
        seed: the seed of the choice, which is independent of the order of training.

    Returns:
        The training data and the validation data, each in the order of `data`.

    Raises:
        UsageError: one part would have no sample, or less than a batch of a fixed size.
    """
    unit = data.batch_size or 1
    count = round(fraction * len(data) / unit) * unit
    if not unit <= count <= len(data) - unit:
        message = f"'{data.source}' has {len(data)} samples: a fraction of {fraction:g} for validation would be {count}"
        least = "one sample" if unit == 1 else f"a batch of {unit}"
        raise wrong_value(message, f"choose another fraction, or add samples: both parts need at least {least}")
    stream = np.random.SeedSequence(seed).spawn(1)[0]
    order = np.random.Generator(np.random.PCG64(stream)).permutation(len(data))
    training, validation = (
        replace(data, size=len(part), samples=np.sort(data.rows(part))) for part in (order[count:], order[:count])
    )
    return training, validation


def fraction_of(text: str | Path | float) -> float | None:
    """Parse the fraction of the training data to hold out. Return None if `text` names a file or folder instead.

    Raises:
        UsageError: it is a number but not between 0 and 1, and no file or folder has this name.
    """
    try:
        found = float(str(text))
    except ValueError:
        return None
    if math.isnan(found) or Path(str(text)).exists():
        return None
    if not 0 < found < 1:
        hint = "use a fraction between 0 and 1, such as 0.2"
        raise wrong_value(f"{text} of the data can't be held out for validation", hint)
    return found


@dataclass(frozen=True)
class NamedSet:
    """A data set with a name.

    Attributes:
        name: the name.
        data: the samples.
        batches: the order of the samples, in batches.
        inputs: name of an array in the data -> input of the training model that it is fed to.
    """

    name: str
    data: Data
    batches: Batches
    inputs: Mapping[str, str]

    def batch(self, part: BatchShard) -> dict[str, np.ndarray]:
        """Return a batch: input of the training model -> array."""
        return {self.inputs[name]: array for name, array in self.data.batch(part.indices, part).items()}


@dataclass(frozen=True)
class DataSets:
    """Several data sets that are trained on together.

    An epoch is one pass over the first set. The other sets are repeated. Their batches depend only on the number of
    batches taken from the first set so far, so a checkpoint stores no positions in the other sets.

    Attributes:
        first: the first set.
        others: the other sets.
    """

    first: NamedSet
    others: Sequence[NamedSet]

    def batch(self, indices: np.ndarray, part: BatchShard) -> dict[str, np.ndarray]:
        """Return the arrays of a step, which takes a batch of each set: input of the training model -> array.

        Args:
            indices: not used, because `part` has the indices. `Data.batch` has the same parameters.
            part: the batch of the first set.
        """
        order = self.first.batches
        number = part.epoch * len(order) + part.first // order.size
        found = self.first.batch(part)
        for other in self.others:
            found |= other.batch(other.batches.at(number))
        return found


def seed_of(seed: int, position: int) -> int:
    """Return the seed of a data set's random numbers, given the seed of the run and the position of the set.

    The first set uses the seed of the run.
    """
    spawned = np.random.SeedSequence(seed, spawn_key=(2, position)).generate_state(1)
    return seed if position == 0 else int(spawned[0])
