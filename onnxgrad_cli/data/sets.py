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
