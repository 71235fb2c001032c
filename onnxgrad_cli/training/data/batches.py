"""The order in which samples are seen: shuffled anew each epoch, cut into batches, and these into the parts of ranks.

The order of an epoch follows from the seed and the number of the epoch alone, so that the place in it is two whole
numbers, and a run that was stopped anywhere goes on in the same order, with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.training.data.dataset import Data
from onnxgrad_cli.training.data.part import Part


class Batches:
    """Batches of samples, epoch after epoch.

    Attributes:
        epoch: how many epochs are complete.
        position: how many batches of the present one were dealt out.
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
        data: what the samples are taken of.
        size: of a batch, over all ranks.
        seed: of the order.
        shuffle: shuffle each epoch; else the order is that of the data.
        drop_last: leave out the last batch of an epoch where it is short.
        rank, world: which of how many processes this is.
        weights: how often each sample is drawn, float64 (N,), 1 in all; None: each once an epoch.
        tell: takes what is narrated.

        Raises:
            UsageError: no such batch can be made of the data, or the model does not take it.
        """
        if not 1 <= world <= size or not 0 <= rank < world:
            raise UsageError(f"a batch of {size} can't be shared by {world} processes", "make the batch larger")
        _check_size(data, size, world)
        self.samples, self.size, self.seed, self.shuffle = len(data), size, seed, shuffle
        self.rank, self.world, self._weights = rank, world, weights
        rest = self.samples % size
        self.drop_last = drop_last or data.batch_size is not None
        if self.drop_last and self.samples < size:
            raise UsageError(f"'{data.source}' has {self.samples} samples, fewer than a batch of {size}", "add samples")
        if rest and self.drop_last and not drop_last:
            whose = "each epoch" if shuffle else f"'{data.source}'"
            tell(f"the model takes batches of {data.batch_size}: the last {rest} samples of {whose} are left out", 0)
        self.epoch = self.position = 0

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self.samples // self.size if self.drop_last else -(-self.samples // self.size)

    @property
    def dealt(self) -> int:
        """How many batches were dealt out in all epochs."""
        return self.epoch * len(self) + self.position

    def __iter__(self) -> Iterator[Part]:
        """What is left of the present epoch; after it, the next one is the present."""
        order, count, size = self._order(), len(self), self.size
        for position in range(self.position, count):
            batch = order[position * size : (position + 1) * size]
            ends, epoch = position + 1 == count, self.epoch
            self.epoch, self.position = (epoch + 1, 0) if ends else (epoch, position + 1)
            first, part = self._part(batch)
            yield Part(part, len(batch), epoch, position * size + first, batch)

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.samples)
        draw = np.random.Generator(np.random.PCG64((self.seed, self.epoch)))
        if self._weights is None:
            return draw.permutation(self.samples)
        return draw.choice(self.samples, self.samples, p=self._weights)

    def _part(self, batch: np.ndarray) -> tuple[int, np.ndarray]:
        first, end = (len(batch) * rank // self.world for rank in (self.rank, self.rank + 1))
        return first, batch[first:end]

    def state(self) -> dict[str, int | bool]:
        """The place in the order, after the batches dealt out, and what the order follows from; JSON can hold it."""
        return {"epoch": self.epoch, "position": self.position, **self._made_of()}

    def restore(self, state: Mapping[str, int | bool]) -> None:
        """Go on from a place that `state` has given.

        Raises:
            UsageError: it is a place in another order: of other data, another seed, or another size of batch.
            OnnxgradError: it is no such place.
        """
        for name, value in self._made_of().items():
            if state.get(name) != value:
                raise UsageError(
                    f"the run was begun with {name.replace('_', ' ')} {state.get(name)}, now it is {value}",
                    "go on with the same data and options",
                )
        epoch, position = int(state.get("epoch", -1)), int(state.get("position", -1))
        if epoch < 0 or not 0 <= position < len(self):
            raise OnnxgradError(f"epoch {epoch}, batch {position} is no place in the data", "the checkpoint is damaged")
        self.epoch, self.position = epoch, position

    def _made_of(self) -> dict[str, int | bool]:
        return {name: getattr(self, name) for name in ("samples", "size", "seed", "shuffle", "drop_last")}


def _check_size(data: Data, size: int, world: int) -> None:
    if data.batch_size is not None and size != data.batch_size * world:
        each = f" in each of {world} processes" if world > 1 else ""
        raise UsageError(
            f"the model takes batches of {data.batch_size}{each}, not of {size / world:g}",
            f"take batches of {data.batch_size * world}, or build it with `dims` or `shapes` for another size",
        )
