"""Data-parallel training: each process differentiates its part of a batch, and all take the same step with the sum.

The gradient of a mean over a batch is the mean of its parts' gradients, each weighted by what its part is of the
divisor of the mean. So all processes together take the steps that one would take with the whole batch, but for
rounding; and but for what looks at a batch as a whole: BatchNormalization in training takes the statistics of the
part, and what it keeps of them is averaged. Dropout draws other numbers in each process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.session import CPU, Buffer
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training.distributed.communicator import Communicator
from onnxgrad_cli.training.steps.split import SplitTrainer

BUCKET = 16 << 20
"""Bytes that are summed at once: many small tensors share a message, and a large model is not held a second time."""

SEED_STEP = 7919
"""What lies between the seeds of two processes."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are summed in one message.

    Attributes:
        slices: name -> where the tensor lies in the message.
        message: the tensors, flat and one after the other.
    """

    slices: dict[str, slice]
    message: np.ndarray


class ParallelTrainer(SplitTrainer):
    """One of several processes that train together; used as `Trainer` is, by all of them at the same time.

    Attributes:
        volume: the bytes that each process gives to sums at a step.
    """

    def __init__(
        self,
        built: TrainingModel,
        communicator: Communicator,
        *,
        provider: str = CPU,
        threads: int | None = None,
        seed: int = 0,
        bucket: int = BUCKET,
    ) -> None:
        """Open sessions on the halves of a training model.

        Args:
            built: a training model with an optimizer, the same in all processes.
            communicator: connects them.
            provider, threads, seed: see `Trainer`.
            bucket: how many bytes are summed at once.

        Raises:
            UsageError: its loss can't be put together from parts of a batch, or the processes have other weights.
        """
        self._communicator = communicator
        self._sum = built.options.reduction == "sum"
        self._divisors = _divisors(built)
        also = sorted({name for name in self._divisors if name})
        super().__init__(
            split(built.model, also),
            also=also,
            path=built.graph.path,
            provider=provider,
            threads=threads,
            seed=seed + SEED_STEP * communicator.rank,
        )
        agree(communicator, {name: buffer.read() for name, buffer in self.buffers.items()}, "weights")
        tensors = {name: self._between[name] for name in self._crossing if name not in self._scalars}
        tensors |= {name: self.buffers[name] for name in self._statistics}
        self._buckets = list(_pack(tensors, bucket))
        terms = len(self._divisors)
        self.volume = sum(each.message.nbytes for each in self._buckets) + 8 * (2 * terms + 3)

    def _differentiate(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Differentiate this process's part of the batch; loss, gradients and statistics become those of the whole."""
        count = next((len(array) for array in feeds.values() if array.ndim), 1)
        if count:
            super()._differentiate(feeds)
        share, mean = self._shares(count, feeds)
        loss = self._between[self.roles.loss]
        total = np.array([float(loss.read()) * share if share else 0.0])
        self._communicator.all_reduce(total)
        loss.write(total[0])
        after = self._sides[1 - self._now]
        for bucket in self._buckets:
            for name, where in bucket.slices.items():
                buffer, weight = (self._between[name], share) if name in self._between else (after[name], mean)
                bucket.message[where] = buffer.read().reshape(-1) if weight else 0
                bucket.message[where] *= weight
            self._communicator.all_reduce(bucket.message)
            for name, where in bucket.slices.items():
                buffer = self._between[name] if name in self._between else after[name]
                buffer.write(bucket.message[where].reshape(buffer.array.shape).astype(buffer.array.dtype))

    def _shares(self, count: int, feeds: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """What this part is of the batch: for the gradients, and for means over samples.

        A loss without a divisor is a mean over as many elements as its label has.

        Raises:
            OnnxgradError: several losses are divided by other numbers, of which this part has other shares.
        """
        own = [float(count)]
        for name, term in zip(self._divisors, self.roles.losses, strict=True):
            elements = feeds[term.label].size if term.label else count
            own.append(float(self._between[name].read() if name and count else elements if count else 0))
        total = np.array(own)
        self._communicator.all_reduce(total)
        for name, whole in zip(self._divisors, total[1:], strict=True):
            if name in self._crossing:  # gradients are gathered over several runs by it
                self._between[name].write(whole)
        of_all = [part / whole if whole else math.nan for part, whole in zip(own, total.tolist(), strict=True)]
        if self._sum:
            return float(count > 0), of_all[0]
        apart = np.array([np.ptp(of_all[1:]) > 1e-6], np.float64)
        if len(self._divisors) > 1:
            self._communicator.all_reduce(apart)
        if apart[0]:
            raise OnnxgradError(
                "the losses are means over other numbers of elements, as labels are left out or weighted: parts of a "
                "batch don't add up to it",
                "take `reduction='sum'`, or one loss",
            )
        return of_all[1], of_all[0]


def _divisors(built: TrainingModel) -> list[str]:
    """For each loss the value that its sum is divided by; "" where that is as the number of samples.

    Raises:
        UsageError: parts of a batch don't add up to the loss of the whole.
    """
    options, training = built.options, built.training
    first_axes = [shape[0] for value in built.model.graph.input if (shape := shape_of(value.type))]
    for position, (spec, output) in enumerate(zip(options.losses, training.predictions, strict=True)):
        if position in training.scalars and any(isinstance(size, str) for size in first_axes):
            raise UsageError(
                f"the loss '{spec.name}' on '{output}' is one number for a batch: it can't be computed from the parts "
                "of a batch",
                "choose a loss that has a value for each sample, or train in one process",
            )
    if options.reduction == "sum" and (options.l1 or options.l2):
        raise UsageError(
            "`l1` and `l2` would be added in each process", "take `reduction='mean'`, or `optimizer_options`"
        )
    return [training.divisors.get(position, "") for position in range(len(options.losses))]


def agree(communicator: Communicator, arrays: Mapping[str, np.ndarray], what: str) -> None:
    """Make sure that all processes have the same arrays.

    Raises:
        UsageError: one has others.
    """
    check = 0
    for name, array in sorted(arrays.items()):
        check = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), check))
    differs = np.array([communicator.broadcast(check) != check], np.float64)
    communicator.all_reduce(differs)
    if differs[0]:
        raise UsageError(
            f"the processes have different {what}", "start all of them with the same options, on the same files"
        )


def _pack(tensors: Mapping[str, Buffer], size: int) -> Iterator[Bucket]:
    """Tensors in messages of about `size` bytes; those of 16 bits are summed in float32."""
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        slices: dict[str, slice] = {}
        end = 0
        for name, buffer in tensors.items():
            if (buffer.array.dtype == np.float64) != (dtype == np.float64):
                continue
            if slices and (end + buffer.array.size) * dtype.itemsize > size:
                yield Bucket(slices, np.zeros(end, dtype))
                slices, end = {}, 0
            slices[name] = slice(end, end + buffer.array.size)
            end += buffer.array.size
        if slices:
            yield Bucket(slices, np.zeros(end, dtype))
