"""A step in three parts: the gradients of a batch, what the optimizer does once, and its updates, slice by slice.

It takes the same steps as the whole in one run, in less memory and time: gradients lie where the batch has left room,
weights and state are updated in place, and what an update computes on its way stays in the processor's cache.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, helper

from onnxgrad_cli import metadata
from onnxgrad_cli.execution.session import Buffer, feed
from onnxgrad_cli.passes.optimizer.slices import Update, slice_optimizer
from onnxgrad_cli.passes.optimizer.split import narrowed, split
from onnxgrad_cli.training.steps.compiled import CompiledUpdate, update_of
from onnxgrad_cli.training.steps.elementwise import InPlace, Scratch

if TYPE_CHECKING:
    import onnxruntime
    from onnxruntime import OrtValue

SLICE, ALONE = 1 << 18, 1 << 16
"""The elements of a slice where several threads update weights, and where one does. Shorter ones stay nearer to the
core, but threads meet more often at Python's lock: AdamW on 1.9 million numbers in slices of a quarter takes 1.24 of
the time in two threads; in those four times as long, 1.3 of it. One thread takes 0.72 to 1.0 of the time in a quarter,
by the caches of the processor."""

LARGE = 2
"""The elements from which a weight is updated so: to update all of MobileNetV2's 158 weights so takes 10.3 ms, and 14.1
where those below 65,536 stay in a session."""

MANY = 1 << 19
"""The elements of such weights together from which slices are worth it: a step of a perceptron with 0.6 million takes
0.84 of the time so, one with a quarter of a million 1.04, for it runs a session more."""

WORKERS = 8
"""How many threads update weights at most: memory gives no more of them their data in time."""


@dataclass(frozen=True)
class Parts:
    """The models of a step: see `Slices`; `gradient` gives the loss, the next statistics, and what the others read."""

    gradient: ModelProto
    loss: str
    common: ModelProto
    updates: tuple[Update, ...]

    @property
    def in_place(self) -> set[str]:
        """Weights and state that are updated in place."""
        return {name for update in self.updates for name in update.outputs.values()}


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
    read.update(name for update in slices.updates for name in (*update.vectors, *update.scalars))
    wanted = {roles.loss, *roles.successors.values(), *read.intersection(roles.outputs)}
    return Parts(narrowed(halves.gradient, wanted), roles.loss, slices.common, slices.updates)


class SlicedStep:
    """The sessions of a step's parts, alternating between two sides of what is not updated in place."""

    def __init__(
        self,
        parts: Parts,
        sides: Sequence[Mapping[str, Buffer]],
        successors: Mapping[str, str],
        scalars: Mapping[str, Buffer],
        start: Callable[[ModelProto], onnxruntime.InferenceSession],
        threads: int | None,
    ) -> None:
        """Open the sessions.

        Args:
            parts: their models.
            sides: weights and state, read and written alternately; those of `parts.in_place` are the same on both.
            successors: weight or state -> the output that replaces it.
            scalars: the loss, which is written, and the learning rate, by their names.
            start: opens a session.
            threads: how many update weights; None is one for each of the processor's.
        """
        self._loss = scalars[parts.loss]
        self._sides = [{name: buffer.value for name, buffer in {**side, **scalars}.items()} for side in sides]
        self._written = [{successors.get(name, name): value for name, value in side.items()} for side in self._sides]
        self._gradient, self._common = _Part(start(parts.gradient)), _Part(start(parts.common))
        self.sessions = [self._gradient.session, self._common.session]
        sizes = {name: buffer.array.size for name, buffer in sides[0].items()}
        workers = min(threads or os.cpu_count() or 1, WORKERS)
        length = SLICE if workers > 1 else ALONE
        self._updates = [
            (update, begin, min(begin + length, sizes[weight]))
            for weight, update in ((update.weight, update_of(update)) for update in parts.updates)
            for begin in range(0, sizes[weight], length)
        ]
        self._read = {name for update in parts.updates for name in (*update.vectors, *update.scalars)}
        self._views = {kind: VIEWS[kind] for kind in {type(update) for update, *_ in self._updates}}
        self._seen = [{kind: _viewed(view, side) for kind, view in self._views.items()} for side in self._sides]
        workers = min(workers, len(self._updates))
        self._scratch = [Scratch(length) for _ in range(workers)]
        self._others = ThreadPoolExecutor(workers)
        self._made: dict[str, OrtValue] = {}

    def begin(self, feeds: Mapping[str, np.ndarray], now: int) -> float:
        """Find gradients, and the next running statistics on the side that is not `now`; returns the loss."""
        self._made = {}  # of the last batch: its memory is free before there are others
        self._made = self._gradient.run(feeds, self._sides[now], self._written[1 - now])
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """Write the rest of the side that is not `now`, and what is updated in place."""
        made = self._made | self._common.run({}, {**self._sides[now], **self._made}, self._written[1 - now])
        read = {name: value for name, value in made.items() if name in self._read}
        values = {kind: self._seen[now][kind] | _viewed(view, read) for kind, view in self._views.items()}
        left = deque(self._updates)

        def work(scratch: Scratch) -> None:
            with np.errstate(all="ignore"):
                while True:
                    try:
                        update, begin, end = left.popleft()
                    except IndexError:  # there are none left
                        return
                    update.run(values[type(update)], begin, end, scratch)

        running = [self._others.submit(work, scratch) for scratch in self._scratch[1:]]
        try:
            work(self._scratch[0])
        finally:
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


def _array(value: OrtValue) -> np.ndarray:
    """The elements of a tensor where they lie, as long as it is there; of one element, a scalar."""
    kind, shape = np.dtype(helper.tensor_dtype_to_np_dtype(value.element_type())), value.shape()
    size = math.prod(shape)
    memory = (ctypes.c_byte * (size * kind.itemsize)).from_address(value.data_ptr())
    return np.frombuffer(memory, kind).reshape(-1 if size > 1 else ())


VIEWS: Mapping[type, Callable[[OrtValue], Any]] = {InPlace: _array, CompiledUpdate: lambda value: value.data_ptr()}
"""How the kinds of updates see a tensor."""


def _viewed(view: Callable[[OrtValue], Any], values: Mapping[str, OrtValue]) -> dict[str, Any]:
    return {name: view(value) for name, value in values.items()}
