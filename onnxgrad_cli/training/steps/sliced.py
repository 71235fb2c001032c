"""A step in three parts: the gradients of a batch, what the optimizer does once, and its updates, slice by slice.

It takes the same steps as the whole in one run, in less memory and time: gradients lie where the batch has left room,
the next weights take the place of the last ones, and what an update computes on its way stays in the processor's cache.
Each thread updates weights of its own, in a row of memory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli import metadata
from onnxgrad_cli.execution.session import Buffer, feed
from onnxgrad_cli.ir.types import itemsize
from onnxgrad_cli.passes.optimizer.scan import scan_slices
from onnxgrad_cli.passes.optimizer.slices import Update, slice_optimizer
from onnxgrad_cli.passes.optimizer.split import narrowed, split

if TYPE_CHECKING:
    import onnxruntime
    from onnxruntime import OrtValue

SLICE = 1 << 15
"""The elements of a slice. AdamW on 4 million takes 16 ms in slices of this size, 17 in those of half of it, 20 in
those of a quarter; 44 in runs for each 262,144, 51 in one (medians of 25 rounds, in turns)."""

LARGE = 1 << 16
"""The elements from which a weight is worth runs of its own."""

MANY = 1 << 21
"""The elements of such weights together from which slices are worth it: AdamW on 2 million takes 8 ms of a core, and 18
in one run (on one million 4 and 7), but a perceptron's step on a batch of one with 1.9 million
took up to 1.3 times as long on an idle machine, for it runs more sessions. MobileNetV2's peak falls by 5 %."""

WORKERS = 8
"""How many threads update weights at most: memory gives no more of them their data in time."""

SHIFT = SLICE * 8
"""Bytes that a slice takes at most."""

Address = tuple[int, int, int]
"""Where a tensor begins in memory, its element type, and the bytes of an element."""


@dataclass(frozen=True)
class Parts:
    """The models of a step: see `Slices`; `gradient` gives the loss, the next statistics, and what the others read.

    Attributes:
        shares: the updates, parted among threads.
    """

    gradient: ModelProto
    loss: str
    common: ModelProto
    shares: tuple[tuple[Update, ...], ...]

    @property
    def rows(self) -> list[list[str]]:
        """Weights and state whose two buffers may overlap, as a thread replaces them in order: weights, their slots."""
        found: list[list[str]] = []
        for share in self.shares:
            updates = [list(update.outputs.values()) for update in share]
            found += [[names[i] for names in updates if i < len(names)] for i in range(max(map(len, updates)))]
        return found


def parts_of(model: ModelProto, values: Mapping[str, np.ndarray], threads: int | None) -> Parts | None:
    """The parts of a whole training step; None where little is updated element by element.

    Args:
        model: as `build` has made it with an optimizer; not changed.
        values: its weights.
        threads: how many update weights; None is one for each of the processor's.
    """
    sizes = [values[name].size for name, role in metadata.describe(model).inputs.items() if role == "weight"]
    if sum(size for size in sizes if size >= LARGE) < MANY:
        return None
    halves = split(model)
    slices = slice_optimizer(halves.optimizer, LARGE)
    if slices is None:
        return None
    roles = metadata.describe(halves.gradient)
    read = {value.name for value in slices.common.graph.input}
    read.update(name for update in slices.updates for name in (*update.vectors.values(), *update.scalars.values()))
    wanted = {roles.loss, *roles.successors.values(), *read.intersection(roles.outputs)}
    shares = _shared(slices.updates, values, min(threads or os.cpu_count() or 1, WORKERS))
    return Parts(narrowed(halves.gradient, wanted), roles.loss, slices.common, shares)


def _shared(
    updates: Sequence[Update], values: Mapping[str, np.ndarray], workers: int
) -> tuple[tuple[Update, ...], ...]:
    """The updates in shares of about the same size: the largest first, each to whoever has least."""
    shares: list[list[Update]] = [[] for _ in range(workers)]
    sizes = [0] * workers
    for update in sorted(updates, key=lambda update: -values[update.weight].size):
        least = sizes.index(min(sizes))
        shares[least].append(update)
        sizes[least] += values[update.weight].size
    return tuple(tuple(share) for share in shares if share)


class SlicedStep:
    """The sessions of a step's parts, alternating between two sides of weights and state."""

    def __init__(
        self,
        parts: Parts,
        sides: Sequence[Mapping[str, Buffer]],
        successors: Mapping[str, str],
        scalars: Mapping[str, Buffer],
        start: Callable[[ModelProto, int | None], onnxruntime.InferenceSession],
    ) -> None:
        """Open the sessions.

        Args:
            parts: their models.
            sides: weights and state, read and written alternately; those of `parts.rows` may overlap but for `SHIFT`.
            successors: weight or state -> the output that replaces it.
            scalars: the loss, which is written, and the learning rate, by their names.
            start: opens a session with a number of threads; None is that of the step.
        """
        self._loss = scalars[parts.loss]
        self._sides = [{name: buffer.value for name, buffer in {**side, **scalars}.items()} for side in sides]
        self._written = [{successors.get(name, name): value for name, value in side.items()} for side in self._sides]
        self._addresses = [{name: _address(value) for name, value in side.items()} for side in self._sides]
        self._gradient, self._common = _Part(start(parts.gradient, None)), _Part(start(parts.common, None))
        opened: dict[bytes, onnxruntime.InferenceSession] = {}

        def once(model: ModelProto) -> onnxruntime.InferenceSession:
            kind = model.SerializeToString()
            opened[kind] = opened.get(kind) or start(model, 1)
            return opened[kind]

        def sliced(update: Update) -> _Sliced:
            return _Sliced(update, sides[0][update.weight].array.size, once)

        self._shares = [[sliced(update) for update in share] for share in parts.shares]
        self._workers = ThreadPoolExecutor(len(self._shares))
        self._made: dict[str, OrtValue] = {}
        self.sessions = [part.session for part in (self._gradient, self._common)]
        self.sessions += opened.values()

    def begin(self, feeds: Mapping[str, np.ndarray], now: int) -> float:
        """Find gradients, and the next running statistics on the side that is not `now`; returns the loss."""
        self._made = {}  # of the last batch: its memory is free before there are others
        self._made = self._gradient.run(feeds, self._sides[now], self._written[1 - now])
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """Write the rest of the side that is not `now`; the other one is lost."""
        made = self._made | self._common.run({}, {**self._sides[now], **self._made}, self._written[1 - now])
        read = self._addresses[now] | {name: _address(value) for name, value in made.items()}

        def run(share: Sequence[_Sliced]) -> None:
            for update in reversed(share) if now else share:
                update.run(read, self._addresses[1 - now], backwards=bool(now))

        if len(self._shares) == 1:
            return run(self._shares[0])
        running = [self._workers.submit(run, share) for share in self._shares]
        wait(running)  # for all of them, also where one fails
        for each in running:
            each.result()


class _Part:
    """A session that is bound anew for each run."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session, self.binding = session, session.io_binding()
        self._inputs = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]

    def run(
        self, feeds: Mapping[str, np.ndarray], read: Mapping[str, OrtValue], written: Mapping[str, OrtValue]
    ) -> dict[str, OrtValue]:
        """Run, and give what has no place in `written`."""
        self.binding.clear_binding_outputs()  # of the last run, whose memory is free now
        for name in self._inputs:
            if name in feeds:
                feed(self.binding, name, feeds[name])
            else:
                self.binding.bind_ortvalue_input(name, read[name])
        for name in self._outputs:
            if name in written:
                self.binding.bind_ortvalue_output(name, written[name])
            else:
                self.binding.bind_output(name)
        self.session.run_with_iobinding(self.binding)
        results = zip(self._outputs, self.binding.get_outputs(), strict=True)
        return {name: value for name, value in results if name not in written}


class _Sliced:
    """The update of one weight and its slots: full slices in one run, and what is left over in another."""

    def __init__(self, update: Update, size: int, once: Callable[[ModelProto], onnxruntime.InferenceSession]) -> None:
        """Open the sessions.

        Args:
            update: the update.
            size: the elements of the weight.
            once: gives the session on a model, the same one for equal models.
        """
        self._update, self._full, self._left = update, size // SLICE, size % SLICE
        scans = [scan_slices(update.model, update.vectors, SLICE, backwards) for backwards in (False, True)]
        self._scans = [_Bound(once(model)) for model in scans] if self._full else []
        self._rest = _Bound(once(update.model)) if self._left else None

    def run(self, read: Mapping[str, Address], written: Mapping[str, Address], backwards: bool) -> None:
        """Update slice after slice, from the last one on where `backwards`."""
        end = self._full * SLICE
        if self._rest and backwards:
            self._rest.run(self._update, read, written, end, (self._left,))
        if self._full:
            self._scans[backwards].run(self._update, read, written, 0, (self._full, SLICE))
        if self._rest and not backwards:
            self._rest.run(self._update, read, written, end, (self._left,))


class _Bound:
    """A session with a binding of its own, for runs beside those of other bindings."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session, self._binding = session, session.io_binding()

    def run(
        self,
        update: Update,
        read: Mapping[str, Address],
        written: Mapping[str, Address],
        start: int,
        shape: tuple[int, ...],
    ) -> None:
        """Update the elements from `start` on that fill a shape."""
        for inner, name in update.scalars.items():
            at, kind, _ = read[name]
            self._binding.bind_input(inner, "cpu", 0, kind, (), at)
        for inner, name in update.vectors.items():
            at, kind, width = read[name]
            self._binding.bind_input(inner, "cpu", 0, kind, shape, at + start * width)
        for inner, name in update.outputs.items():
            at, kind, width = written[name]
            self._binding.bind_output(inner, "cpu", 0, kind, shape, at + start * width)
        self._session.run_with_iobinding(self._binding)


def _address(value: OrtValue) -> Address:
    kind = value.element_type()
    return value.data_ptr(), kind, itemsize(kind)
