"""A training step in three parts: gradients, the optimizer's computations common to all weights, and sliced updates.

The results equal those of one run of the whole model, with less memory and time. Gradients reuse the memory of the
forward values, weights and state are updated in place, and the intermediate results of an update stay in the
processor's cache.
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
from onnxgrad_cli.training.steps.in_place_optimizer import InPlace, Scratch

if TYPE_CHECKING:
    import onnxruntime
    from onnxruntime import OrtValue

SLICE, ALONE = 1 << 18, 1 << 16
"""Number of elements per slice: the first if several threads update weights, the second if one thread does.

Shorter slices fit into faster caches, but threads then wait more often for Python's global interpreter lock. With two
threads, AdamW on 1.9 million elements takes 1.24 times as long if slices have a quarter of the size, and 1.3 times as
long if they have four times the size. With one thread, it takes 0.72 to 1.0 of the time with slices of a quarter,
depending on the processor's caches.
"""

MIN_SLICED_ELEMENTS = 2
"""Smallest number of elements of a weight that is updated in slices.

Updating all 158 weights of MobileNetV2 in slices takes 10.3 ms, instead of 14.1 ms if a session updates those below
65,536 elements.
"""

MIN_SLICED_TOTAL = 1 << 19
"""Smallest number of elements in all weights together for which a step is sliced.

A step of a perceptron with 0.6 million weights takes 0.84 of the time in slices. With a quarter of a million weights it
takes 1.04 of the time, because it runs one more session.
"""

WORKERS = 8
"""Largest number of threads that update weights. Memory bandwidth limits the use of more threads."""


@dataclass(frozen=True)
class Parts:
    """The models of a step in three parts, and the updates of its weights.

    Attributes:
        gradient: the model that computes the loss, the next running statistics, and the values that `common` and
            `updates` read.
        loss: the name of the loss.
        common: the model of the computations of the optimizer that are done once per step.
        updates: the updates of the weights.
    """

    gradient: ModelProto
    loss: str
    common: ModelProto
    updates: tuple[Update, ...]

    @property
    def in_place(self) -> set[str]:
        """The weights and state that are updated in place."""
        return {name for update in self.updates for name in update.outputs.values()}


def parts_of(model: ModelProto, values: Mapping[str, np.ndarray]) -> Parts | None:
    """Return the parts of a training step, or None if too few weights have an elementwise update.

    Args:
        model: a training model with an optimizer, as `build` makes it. It is not changed.
        values: the weights of the model.
    """
    sizes = [values[name].size for name, role in metadata.describe(model).inputs.items() if role == "weight"]
    if sum(size for size in sizes if size >= MIN_SLICED_ELEMENTS) < MIN_SLICED_TOTAL:
        return None
    halves = split(model)
    slices = slice_optimizer(halves.optimizer, MIN_SLICED_ELEMENTS)
    if slices is None:
        return None
    roles = metadata.describe(halves.gradient)
    read = {value.name for value in slices.common.graph.input}
    read.update(name for update in slices.updates for name in (*update.vectors, *update.scalars))
    wanted = {roles.loss, *roles.successors.values(), *read.intersection(roles.outputs)}
    return Parts(narrowed(halves.gradient, wanted), roles.loss, slices.common, slices.updates)


class SlicedStep:
    """A step that runs its parts in sessions and threads.

    Tensors that are not updated in place have two buffers, one on each of two sides. A step reads the buffers on one
    side, and writes the buffers on the other side.

    Attributes:
        sessions: the sessions of the gradient and of the common part.
    """

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
            parts: the models of the parts.
            sides: two sets of weights and state, read and written alternately. The tensors in `parts.in_place` are the
                same in both.
            successors: weight or state -> the output that replaces it.
            scalars: the buffers of the loss, which is written, and of the learning rate, by name.
            start: opens a session.
            threads: the number of threads that update weights; None for one per logical core.
        """
        self._loss = scalars[parts.loss]
        self._sides = [{name: buffer.value for name, buffer in {**side, **scalars}.items()} for side in sides]
        self._written = [{successors.get(name, name): value for name, value in side.items()} for side in self._sides]
        self._gradient, self._common = _BoundSession(start(parts.gradient)), _BoundSession(start(parts.common))
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
        """Compute the gradients and return the loss. Write the next running statistics to the side other than `now`."""
        self._made = {}  # frees the gradients of the last batch before those of this batch are allocated
        self._made = self._gradient.run(feeds, self._sides[now], self._written[1 - now])
        return float(self._loss.read())

    def finish(self, now: int) -> None:
        """Compute the remaining values of the side other than `now`, and update the weights in place."""
        made = self._made | self._common.run({}, {**self._sides[now], **self._made}, self._written[1 - now])
        read = {name: value for name, value in made.items() if name in self._read}
        values = {kind: self._seen[now][kind] | _viewed(view, read) for kind, view in self._views.items()}
        left = deque(self._updates)

        def work(scratch: Scratch) -> None:
            with np.errstate(all="ignore"):
                while True:
                    try:
                        update, begin, end = left.popleft()
                    except IndexError:  # all updates are done
                        return
                    update.run(values[type(update)], begin, end, scratch)

        running = [self._others.submit(work, scratch) for scratch in self._scratch[1:]]
        try:
            work(self._scratch[0])
        finally:
            wait(running)  # waits for all threads, even if one fails
        for each in running:
            each.result()


class _BoundSession:
    """A session whose inputs and outputs are bound to other buffers in each run."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self.session, self.binding = session, session.io_binding()
        self._inputs = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]

    def run(
        self, feeds: Mapping[str, np.ndarray], read: Mapping[str, OrtValue], written: Mapping[str, OrtValue]
    ) -> dict[str, OrtValue]:
        """Run the session, and return the outputs that have no buffer in `written`.

        Args:
            feeds: input -> array.
            read: input -> tensor, for inputs that are not in `feeds`.
            written: output -> the tensor that it overwrites.
        """
        self.binding.clear_binding_outputs()  # frees the outputs of the last run
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
    """Return the elements of a tensor as an array without a copy. The array is valid while the tensor exists.

    Returns:
        A flat array, or a 0-d array for a single element.
    """
    kind, shape = np.dtype(helper.tensor_dtype_to_np_dtype(value.element_type())), value.shape()
    size = math.prod(shape)
    memory = (ctypes.c_byte * (size * kind.itemsize)).from_address(value.data_ptr())
    return np.frombuffer(memory, kind).reshape(-1 if size > 1 else ())


VIEWS: Mapping[type, Callable[[OrtValue], Any]] = {InPlace: _array, CompiledUpdate: lambda value: value.data_ptr()}
"""Class of an update -> the function that converts a tensor to a value for the class's `run` method."""


def _viewed(view: Callable[[OrtValue], Any], values: Mapping[str, OrtValue]) -> dict[str, Any]:
    return {name: view(value) for name, value in values.items()}
