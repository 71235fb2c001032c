"""Train on several data sets at once: each step takes a batch of each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.data.dataset import Data
from onnxgrad_cli.data.part import BatchShard
from onnxgrad_cli.data.sampling import Batches


@dataclass(frozen=True)
class NamedSet:
    """A data set with a name.

    Attributes:
        name: its name.
        data: its samples.
        batches: the order of its samples, in batches.
        inputs: array of the data -> the input of the training model that takes it.
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

    An epoch is one pass over the first set. The other sets are cycled: their batches depend only on the number of
    batches of the first set so far, so a checkpoint needs no position in them.

    Attributes:
        first: the first set.
        others: the other sets.
    """

    first: NamedSet
    others: Sequence[NamedSet]

    def batch(self, indices: np.ndarray, part: BatchShard) -> dict[str, np.ndarray]:
        """Return a batch of each set together: input of the training model -> array.

        Args:
            indices: the indices of the samples of the first set; those of `part`.
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

    The first set has the seed of the run.
    """
    spawned = np.random.SeedSequence(seed, spawn_key=(2, position)).generate_state(1)
    return seed if position == 0 else int(spawned[0])
