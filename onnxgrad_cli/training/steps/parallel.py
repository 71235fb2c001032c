"""Data-parallel training: each process computes the gradients of its part of a batch, then all take the same step.

The gradient of a mean over a batch is the weighted mean of the gradients of its parts. The weight of a part is its
share of the number of elements in the mean. So the processes take the same steps as one process with the whole batch,
except for rounding and two kinds of layers. BatchNormalization in training mode uses the statistics of each part, and
its running statistics are averaged over the processes. Dropout draws different numbers in each process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.errors import OnnxgradError, conflict, mismatch
from onnxgrad_cli.execution.session import CPU, Buffer
from onnxgrad_cli.ir.types import shape_of
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training.distributed.communicator import Communicator
from onnxgrad_cli.training.steps.base import UNEQUAL, samples_in
from onnxgrad_cli.training.steps.split_trainer import SplitTrainer

BUCKET = 16 << 20
"""Size of a message in bytes. Small tensors share a message, and a large model is not copied into one message."""

SEED_STEP = 7919
"""The difference between the seeds of the processes with rank r and r + 1."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are summed in one message.

    Attributes:
        slices: name of a tensor -> its range in the message.
        message: the flattened and concatenated tensors.
    """

    slices: dict[str, slice]
    message: np.ndarray


class ParallelTrainer(SplitTrainer):
    """A trainer in one of several processes that train together.

    It has the interface of `Trainer`. All processes must call its methods at the same time.

    Attributes:
        volume: the bytes that each process sends per step to be summed.
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
        """Split a training model into a gradient model and an optimizer model, and open a session on each.

        Args:
            built: a training model with an optimizer, the same in all processes.
            communicator: connects the processes.
            provider: the full name of the execution provider, such as 'CPUExecutionProvider'.
            threads: the number of CPU threads; None for onnxruntime's default.
            seed: the seed of random operators such as Dropout. Each process derives its own seed from it.
            bucket: the size of a message in bytes.

        Raises:
            UsageError: the loss can't be computed from parts of a batch, or the processes have different weights.
        """
        self._communicator = communicator
        self._sum = built.options.reduction == "sum"
        self._divisors = divisors_of(built, "process", "train in one process")
        also = sorted({name for name in self._divisors if name})
        halves, seed = split(built.model, also), seed + SEED_STEP * communicator.rank
        super().__init__(halves, also=also, path=built.graph.path, provider=provider, threads=threads, seed=seed)
        agree(communicator, {name: buffer.read() for name, buffer in self.buffers.items()}, "weights")
        tensors = {name: self._between[name] for name in self._crossing if name not in self._scalars}
        tensors |= {name: self.buffers[name] for name in self._statistics}
        self._buckets = list(_pack(tensors, bucket))
        terms = len(self._divisors)
        self.volume = sum(each.message.nbytes for each in self._buckets) + 8 * (2 * terms + 3)

    def _begin(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Compute the gradients of this process's part of the batch, and sum them over the processes.

        The loss and the running statistics are summed, too.
        """
        if samples_in(feeds):
            super()._begin(feeds)
        share, mean = self._shares(feeds)
        loss = self._between[self.roles.loss]
        total = np.array([float(loss.read()) * share if share else 0.0])
        self._communicator.all_reduce(total)
        loss.write(np.asarray(math.nan) if self._uncounted else total[0])
        after = self._sides[1 - self._now]
        for bucket in self._buckets:
            for name, where in bucket.slices.items():
                buffer, weight = (self._between[name], share) if name in self._between else (after[name], mean)
                bucket.message[where] = buffer.read().reshape(-1) if weight else 0
                bucket.message[where] *= weight
            self._communicator.all_reduce(bucket.message)
            for name, where in bucket.slices.items():
                buffer = self._between[name] if name in self._between else after[name]
                buffer.write(bucket.message[where].reshape(buffer.array.shape))
        return float(loss.read())

    def _shares(self, feeds: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Return the weights of this process's part of the batch: in sums of gradients, and in means over samples.

        Raises:
            OnnxgradError: there are several losses with different divisors, and the shares of a part in them differ.
        """
        own = [float(samples_in(feeds)), *self._divisors_of(self._divisors, self._between, feeds)]
        total = np.array(own)
        self._communicator.all_reduce(total)
        for name, whole in zip(self._divisors, total[1:], strict=True):
            if name in self._crossing:  # the optimizer accumulates gradients over several runs with this divisor
                self._between[name].write(whole)
        shares = [part / whole for part, whole in zip(own[1:], total[1:].tolist(), strict=True) if whole]
        self._uncounted = not self._sum and len(shares) < len(self._divisors)
        of_samples = own[0] / total[0]
        if self._sum:
            return float(own[0] > 0), of_samples
        apart = np.array([len(shares) > 1 and np.ptp(shares) > 1e-6], np.float64)
        if len(self._divisors) > 1:
            self._communicator.all_reduce(apart)
        if apart[0]:
            hint = "use `reduction='sum'`, or a single loss"
            raise OnnxgradError(
                f"{UNEQUAL}: the losses of its parts don't add up to the loss of a batch", hint, code="conflict"
            )
        return shares[0] if shares else of_samples, of_samples  # if all labels are ignored, penalties have gradients


def agree(communicator: Communicator, arrays: Mapping[str, np.ndarray], what: str) -> None:
    """Check that all processes have the same arrays.

    Raises:
        UsageError: the arrays of a process differ. The message calls the arrays `what`.
    """
    check = 0
    for name, array in sorted(arrays.items()):
        check = zlib.crc32(array.tobytes(), zlib.crc32(name.encode(), check))
    differs = np.array([communicator.broadcast(check) != check], np.float64)
    communicator.all_reduce(differs)
    if differs[0]:
        raise mismatch(f"the processes have different {what}", "start all processes with the same options and files")


def _pack(tensors: Mapping[str, Buffer], size: int) -> Iterator[Bucket]:
    """Yield tensors packed into messages of about `size` bytes. 16-bit tensors are summed in float32."""
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


def divisors_of(built: TrainingModel, part: str, alternative: str) -> list[str]:
    """Return, for each loss, the name of the output with its divisor, so that loss = sum / divisor.

    The name is "" if the divisor is proportional to the batch size.

    Args:
        built: the training model.
        part: the word in messages for a worker, which computes a part of each batch, such as 'process'.
        alternative: a way to train without parts, as text for hints.

    Raises:
        UsageError: the loss of a batch can't be computed from its parts.
    """
    options, training = built.options, built.training
    first_axes = [shape[0] for value in built.model.graph.input if (shape := shape_of(value.type))]
    for position, (spec, output) in enumerate(zip(options.losses, training.predictions, strict=True)):
        why = ""
        if position in training.scalars:
            why = "is one number for a batch"
        elif position in training.mixing:
            why = f"may depend on the other samples of a batch, or on their number ({training.mixing[position]})"
        if why and any(isinstance(size, str) for size in first_axes):
            message = f"the loss '{spec.name}' on '{output}' {why}: it can't be computed from parts of the batch"
            raise conflict(message, f"choose a loss that has a value for each sample, or {alternative}")
    if options.reduction == "sum" and (options.l1 or options.l2):
        hint = f"use `reduction='mean'`, or {alternative}"
        raise conflict(f"`l1` and `l2` would be added once for each {part}", hint)
    return [training.divisors.get(position, "") for position in range(len(options.losses))]
