"""The base of all trainers: weights and state between steps, in two sets of buffers.

A step reads one set and writes the other, so that no update overwrites what a node may still read; then the two sets
are swapped, and nothing is copied. What a step updates when all has been read is in both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, TypeProto, helper

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest
from onnxgrad_cli.execution.session import Buffer, load_onnxruntime, trim
from onnxgrad_cli.files import ModelSource, check_target, followed, load_model, own_model, save_model
from onnxgrad_cli.ir.nodes import with_bodies
from onnxgrad_cli.ir.randomness import RANDOM
from onnxgrad_cli.ir.types import dtype_of, in_words, shape_of
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.training.adapters.merge import merge
from onnxgrad_cli.training.schedules import Schedule
from onnxgrad_cli.verification.written import check_opens

ALIGNED = 64
"""Bytes; the address of a buffer in a block is a multiple of this."""

RATE = 1e-3
"""The learning rate where none is given."""


class NotFinite(OnnxgradError):
    """The loss is no finite number; weights and state are what they were before the step."""


def _alone(value_type: TypeProto) -> TypeProto:
    """A copy: as part of a model, the type would keep the memory of all of it."""
    copy = TypeProto()
    copy.CopyFrom(value_type)
    return copy


def _by_batch(inputs: Mapping[str, TypeProto]) -> list[list[str]]:
    """Inputs whose first axis is the same symbol: onnxruntime would broadcast one sample to all."""
    found: dict[str, list[str]] = {}
    for name, value_type in inputs.items():
        first = (shape_of(value_type) or ("?",))[0]
        if isinstance(first, str) and first != "?":
            found.setdefault(first, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _in_one_block(like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Uninitialized arrays of these shapes and types, in one piece of memory.

    Pieces of their own would lie among what was read of the file, whose memory then is not given back to the system: of
    BERT-small 43 MB.
    """
    sizes = {name: -(-array.nbytes // ALIGNED) * ALIGNED for name, array in like.items()}
    block = np.empty(sum(sizes.values()) + ALIGNED, np.uint8)
    start = -block.ctypes.data % ALIGNED
    found = {}
    for name, array in like.items():
        found[name] = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        start += sizes[name]
    return found


class TrainerBase:
    """A trainer without its step: weights and state, how they are read and replaced, and what a batch must be.

    Attributes:
        roles: what the inputs and outputs of a step are for.
        inputs: what a step must be fed: the model's inputs and the labels.
        steps: how many were taken.
    """

    def __init__(
        self,
        roles: Roles,
        inputs: Mapping[str, TypeProto],
        values: dict[str, np.ndarray],
        provider: str,
        in_place: Collection[str] = (),
    ) -> None:
        """Allocate the buffers, and write the first values into them.

        Args:
            roles, inputs: see the class.
            values: weights and state before the first step; what steps do not replace has one buffer. Each value is
                copied and removed from the mapping at once, which is empty in the end.
            provider: the execution provider in whose memory the buffers lie.
            in_place: what a step replaces where it lies.
        """
        self.roles, self.steps = roles, 0
        self.inputs = {name: _alone(value_type) for name, value_type in inputs.items()}
        self._successors = roles.successors
        self._together = _by_batch(self.inputs)
        names = list(values)
        places = _in_one_block({name: values[name] for name in in_place})
        first: dict[str, Buffer] = {}
        for name in names:
            array = values.pop(name)
            if name in places:
                places[name][...] = array
            first[name] = Buffer(places[name] if name in places else array.copy(), provider)
            del array
        trim()
        twice = self._successors.keys() - set(in_place)
        second = {name: Buffer(np.empty_like(first[name].array), provider) for name in twice}
        self._sides = [{name: side[name] for name in names} for side in (first, first | second)]
        self._now = 0

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """The present weights and state where they lie; after the next step they lie elsewhere."""
        return self._sides[self._now]

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of the trained weights."""
        return {name: buffer.read() for name, buffer in self.buffers.items() if self.roles.inputs[name] == "weight"}

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the rest that steps replace: the optimizer's slots, running statistics."""
        return {name: self.buffers[name].read() for name in self._successors if self.roles.inputs[name] != "weight"}

    def load(self, values: Mapping[str, np.ndarray], steps: int | None = None) -> None:
        """Go on from other weights and state.

        Args:
            values: by name, of the shapes and types they have; what is not there stays as it is.
            steps: how many were taken to get there.

        Raises:
            UsageError: a name is unknown, or a shape or type is another.
        """
        for name, array in values.items():
            if name not in self.buffers:
                raise UsageError(
                    f"the training model has no weight or state '{name}'", suggest(name, self.buffers, "weights")
                )
            here = self.buffers[name].array
            if np.shape(array) != here.shape or np.asarray(array).dtype != here.dtype:
                raise UsageError(
                    f"'{name}' is {np.asarray(array).dtype}{list(np.shape(array))}, "
                    f"the model has {here.dtype}{list(here.shape)}",
                    "it was trained as another model",
                )
        for name, array in values.items():
            self.buffers[name].write(array)
        self.steps = self.steps if steps is None else steps

    def save(self, out: str | Path, model: str | Path, *, force: bool = False, keep_mode: bool = False) -> list[Path]:
        """Write an inference model with the present weights and running statistics, adapters merged into them.

        Args:
            out: the file to write.
            model: the inference model that the training model was built of.
            force: replace a file that onnxgrad did not write.
            keep_mode: leave BatchNormalization and Dropout in the mode in which the model came; else they are in
                inference mode.

        Returns:
            The files written, the model first.

        Raises:
            UsageError: a file would be replaced that must not be.
            OnnxgradError: a file can't be read or written, or it is another model.
            CheckFailed: onnxruntime does not open what would be written, and opens the original.
        """
        original, path = load_model(model)
        out = followed(checks.path("out", out))
        check_target(out, original, path, force)
        trained = self._merged(original, path, keep_mode)
        return save_model(trained, out, path, force, check=check_opens(trained, original, path))

    def merged(self, model: ModelSource, keep_mode: bool = False) -> tuple[ModelProto, Path | None]:
        """The inference model that `save` would write, and the file that its external data are relative to.

        Args:
            model: the inference model that the training model was built of.
            keep_mode: see `save`.

        Raises:
            OnnxgradError: a file can't be read, or it is another model.
        """
        original, path = own_model(model)
        return self._merged(original, path, keep_mode), path

    def _merged(self, original: ModelProto, path: Path | None, keep_mode: bool) -> ModelProto:
        roles = self.roles
        return merge(original, roles.adapters, self.weights(), path, self.state(), keep_mode, roles.quantized)

    def step(self, feeds: Mapping[str, np.ndarray], learning_rate: float | Schedule = RATE) -> float:
        """Take a step on a batch.

        Args:
            feeds: an array for each of `inputs`, in its type.
            learning_rate: of this step, or the schedule that says it by the steps that were taken.

        Returns:
            The loss before the step.

        Raises:
            UsageError: an input is missing or unknown, or does not fit.
            NotFinite: the loss is infinite or no number; then no step was taken.
        """
        raise NotImplementedError

    def _check(self, feeds: Mapping[str, np.ndarray]) -> None:
        if feeds.keys() == self.inputs.keys():
            self._check_arrays(feeds)
            return
        missing = [name for name in self.inputs if name not in feeds]
        if missing:
            raise UsageError(f"the batch has no '{missing[0]}'", f"a step is fed {', '.join(self.inputs)}")
        unknown = next(name for name in feeds if name not in self.inputs)
        raise UsageError(f"the training model has no input '{unknown}'", suggest(unknown, self.inputs, "inputs"))

    def _check_arrays(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Refuse what onnxruntime would read as other numbers: it takes bytes as they lie, and broadcasts."""
        for name, array in feeds.items():
            if not isinstance(array, np.ndarray):
                raise UsageError(
                    f"'{name}' is a {type(array).__name__}, no array", f"give numpy.asarray({name}, dtype)"
                )
            if not array.dtype.isnative:
                hint = f"give {name}.astype({name}.dtype.newbyteorder('='))"
                raise UsageError(f"the bytes of '{name}' are in the order of another machine: {array.dtype}", hint)
        for names in self._together:
            if len({feeds[name].shape[:1] for name in names}) > 1:
                given = ", ".join(f"{name} {list(feeds[name].shape)}" for name in names)
                raise UsageError(f"the batch has other numbers of samples: {given}", "the first axis is the sample")

    def _rate_now(self, learning_rate: float | Schedule) -> np.ndarray:
        rate = learning_rate.rate(self.steps) if isinstance(learning_rate, Schedule) else learning_rate
        return np.asarray(rate)

    def _draw(self, seed: int | None) -> None:
        """Let the step draw random numbers of its own; None draws none."""
        if seed is not None:
            load_onnxruntime().set_seed(_spread(seed + 1_000_003 * self.steps))

    def _failed(self, feeds: Mapping[str, np.ndarray], error: Exception) -> OnnxgradError:
        given = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in feeds.items())
        wanted = ", ".join(f"{name} {in_words(value_type)}" for name, value_type in self.inputs.items())
        hint = f"it was fed {given}; it takes {wanted}"
        return OnnxgradError(f"the step fails: {str(error).strip()}", "; ".join([hint, *self._other_axes(feeds)]))

    def _other_axes(self, feeds: Mapping[str, np.ndarray]) -> Iterator[str]:
        """What to do about labels that don't fit the axis on which a loss takes the classes."""
        for term in self.roles.losses:
            sizes = zip(shape_of(self.inputs.get(term.label)) or (), np.shape(feeds.get(term.label, ())), strict=False)
            if (
                term.ignore_index is not None
                and term.class_axis == 1
                and any(isinstance(d, int) and d != n for d, n in sizes)
            ):
                yield f"if the last axis of '{term.output}' is that of the classes: `loss_options=class-axis=-1`"

    def _take(self, loss: float) -> float:
        """Go on to what the step has written, or stay where its loss is no finite number."""
        if not math.isfinite(loss):
            raise NotFinite(f"the loss is {loss}", "a smaller learning rate, or other data; the weights are as before")
        self._now = 1 - self._now
        self.steps += 1
        return loss


def drawing(model: ModelProto) -> list[str]:
    """The operators besides Dropout that draw random numbers in a model."""
    return sorted({node.op_type for node in with_bodies(model.graph.node)} & RANDOM - {"Dropout"})


def _spread(number: int) -> int:
    """A seed of 31 bits that tells nothing of the next number's.

    onnxruntime's generator is linear in its seed: with seeds in equal steps, what a unit draws in one step of a
    training follows from what it drew in the last. The finalizer of SplitMix64; G. L. Steele et al., Fast splittable
    pseudorandom number generators, OOPSLA 2014.
    """
    found = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    found = (found ^ found >> 27) * 0x94D049BB133111EB % 2**64
    return (found ^ found >> 31) % 2**31


def loosen(model: ModelProto, seed: int) -> int | None:
    """Let what is drawn depend on the seed of the run alone; None where no Dropout draws anew at each step."""
    if drawing(model):
        load_onnxruntime().set_seed(_spread(seed))  # they draw on from where the session has begun
    found = [node for node in with_bodies(model.graph.node) if node.op_type == "Dropout"]
    for node in found:
        for attribute in [a for a in node.attribute if a.name == "seed"]:
            node.attribute.remove(attribute)
    return seed if found else None


def numpy_type(value_type: TypeProto) -> np.dtype:
    """The type of the elements of a tensor, as numpy knows it."""
    return helper.tensor_dtype_to_np_dtype(dtype_of(value_type))
