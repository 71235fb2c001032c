"""A step in three parts: the gradients of a batch, what the optimizer does once, and its updates, slice by slice.

It takes the same steps as the whole in one run, in less memory and time: gradients lie where the batch has left room,
the next weights take the place of the last ones, and what an update computes on its way stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxgrad_cli import metadata
from onnxgrad_cli.execution.session import Buffer, feed
from onnxgrad_cli.ir.types import itemsize
from onnxgrad_cli.passes.optimizer.slices import Slices, Update, slice_optimizer
from onnxgrad_cli.passes.optimizer.split import narrowed, split

if TYPE_CHECKING:
    import onnxruntime
    from onnxruntime import OrtValue

SLICE = 1 << 18
"""The elements of a slice. AdamW on 25 million takes 38 ms in slices of this size, 44 in those of half of it, 47 in
those of four times it, 80 in one (two threads)."""

LARGE = SLICE // 4
"""The elements from which a weight is worth runs of its own."""

MANY = 1 << 22
"""The elements of such weights together from which slices are worth it: with fewer, a step of LSTMs and perceptrons
takes 1.02 to 1.07 times as long, as each session wakes its threads anew."""

SHIFT = SLICE * 8
"""Bytes that a slice takes at most."""

Address = tuple[int, int, int]
"""Where a tensor begins in memory, its element type, and the bytes of an element."""


@dataclass(frozen=True)
class Parts:
    """The models of a step: see `Slices`; `gradient` gives the loss, the next statistics, and what the others read."""

    gradient: ModelProto
    loss: str
    slices: Slices

    @property
    def rows(self) -> list[list[str]]:
        """Weights and state whose two buffers may overlap, as they are replaced in order: weights, their slots."""
        updates = [list(update.outputs.values()) for update in self.slices.updates]
        return [[names[i] for names in updates if i < len(names)] for i in range(max(map(len, updates)))]


def parts_of(model: ModelProto, values: Mapping[str, np.ndarray]) -> Parts | None:
    """The parts of a whole training step; None where little is updated element by element.

    Args:
        model: as `build` has made it with an optimizer; not changed.
        values: its weights.
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
    return Parts(narrowed(halves.gradient, wanted), roles.loss, slices)


class SlicedStep:
    """The sessions of a step's parts, alternating between two sides of weights and state."""

    def __init__(
        self,
        parts: Parts,
        sides: Sequence[Mapping[str, Buffer]],
        successors: Mapping[str, str],
        scalars: Mapping[str, Buffer],
        start: Callable[[ModelProto], onnxruntime.InferenceSession],
    ) -> None:
        """Open the sessions.

        Args:
            parts: their models.
            sides: weights and state, read and written alternately; those of `parts.rows` may overlap but for `SHIFT`.
            successors: weight or state -> the output that replaces it.
            scalars: the loss, which is written, and the learning rate, by their names.
            start: opens a session.
        """
        self._loss = scalars[parts.loss]
        self._sides = [{name: buffer.value for name, buffer in {**side, **scalars}.items()} for side in sides]
        self._written = [{successors.get(name, name): value for name, value in side.items()} for side in self._sides]
        self._addresses = [{name: _address(value) for name, value in side.items()} for side in self._sides]
        self._gradient, self._common = _Part(start(parts.gradient)), _Part(start(parts.slices.common))
        opened: dict[bytes, _Part] = {}
        self._updates = []
        for update in parts.slices.updates:
            kind = update.model.SerializeToString()
            opened[kind] = opened.get(kind) or _Part(start(update.model))
            self._updates.append(_Sliced(update, sides[0][update.weight].array.size, opened[kind]))
        self._made: dict[str, OrtValue] = {}
        self.sessions = [part.session for part in (self._gradient, self._common, *opened.values())]

    def begin(self, feeds: Mapping[str, np.ndarray], now: int) -> float:
        """Find gradients, and the next running statistics on the side that is not `now`; returns the loss."""
        self._made = {}  # of the last batch: its memory is free before there are others
        self._made = self._gradient.run(feeds, self._sides[now], self._written[1 - now])
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """Write the rest of the side that is not `now`; the other one is lost."""
        made = self._made | self._common.run({}, {**self._sides[now], **self._made}, self._written[1 - now])
        read = self._addresses[now] | {name: _address(value) for name, value in made.items()}
        for update in reversed(self._updates) if now else self._updates:
            update.run(read, self._addresses[1 - now], backwards=bool(now))


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
    """The update of one weight and its slots."""

    def __init__(self, update: Update, size: int, part: _Part) -> None:
        self._update, self._size, self._part = update, size, part

    def run(self, read: Mapping[str, Address], written: Mapping[str, Address], backwards: bool) -> None:
        """Update slice after slice, from the last one on where `backwards`."""
        binding, update = self._part.binding, self._update
        for inner, name in update.scalars.items():
            at, kind, _ = read[name]
            binding.bind_input(inner, "cpu", 0, kind, (), at)
        starts = range(0, self._size, SLICE)
        for start in reversed(starts) if backwards else starts:
            shape = (min(SLICE, self._size - start),)
            for inner, name in update.vectors.items():
                at, kind, width = read[name]
                binding.bind_input(inner, "cpu", 0, kind, shape, at + start * width)
            for inner, name in update.outputs.items():
                at, kind, width = written[name]
                binding.bind_output(inner, "cpu", 0, kind, shape, at + start * width)
            self._part.session.run_with_iobinding(binding)


def _address(value: OrtValue) -> Address:
    kind = value.element_type()
    return value.data_ptr(), kind, itemsize(kind)
