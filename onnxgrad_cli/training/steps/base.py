"""The base class of all trainers. It keeps weights and state between steps in two sets of buffers.

A step reads one set and writes the other, so that no update overwrites a value that a node still has to read. After the
step the two sets are swapped without copying. Tensors that a step updates in place have one buffer in both sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path

import numpy as np
from onnx import ModelProto, TypeProto, helper

from onnxgrad_cli.adapters.merge import merge
from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import (
    OnnxgradError,
    conflict,
    mismatch,
    missing_value,
    suggest,
    unknown_name,
    wrong_shape,
    wrong_type,
)
from onnxgrad_cli.execution.session import Buffer, load_onnxruntime, trim
from onnxgrad_cli.files import ModelSource, check_target, load_model, own_model, resolve_output, save_model
from onnxgrad_cli.ir.modes import RANDOM
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.types import dtype_of, in_words, shape_of
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.training.schedules import Schedule
from onnxgrad_cli.verification.written_file import check_opens

ALIGNED = 64
"""Alignment of the buffers within a block, in bytes."""

RATE = 1e-3
"""The default learning rate."""

UNEQUAL = "the losses are means over different numbers of elements, because labels are ignored or weighted"
"""The reason why the losses of the parts of a batch don't add up to its loss."""


class NotFinite(OnnxgradError):
    """The loss is infinite or nan. The step has not changed weights and state."""

    code = "not_finite"


def _by_batch(inputs: Mapping[str, TypeProto]) -> list[list[str]]:
    """Return groups of two or more inputs whose first axis has the same symbolic size.

    The caller must check that the arrays of a group have the same number of samples: onnxruntime would broadcast an
    array with a single sample.
    """
    found: dict[str, list[str]] = {}
    for name, value_type in inputs.items():
        first = (shape_of(value_type) or ("?",))[0]
        if isinstance(first, str) and first != "?":
            found.setdefault(first, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _in_one_block(like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return uninitialized arrays with the shapes and dtypes of the given ones, in one block of memory.

    Separate allocations would be scattered among data that were read from the model file. When those data are freed,
    their memory could then not be returned to the system: 43 MB for BERT-small.
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
    """The base class of trainers: everything except the step.

    It stores weights and state, reads, loads and saves them, and checks batches.

    Attributes:
        roles: the roles of the inputs and outputs of the training model.
        inputs: name -> type of each array in a batch: the model's inputs and the labels.
        steps: the number of steps taken so far.
    """

    _rate: Buffer
    _seed: int | None
    _uncounted = False
    _unbroken: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(
        self,
        roles: Roles,
        inputs: Mapping[str, TypeProto],
        values: dict[str, np.ndarray],
        provider: str,
        in_place: Collection[str] = (),
    ) -> None:
        """Allocate the buffers, and write the initial values into them.

        Args:
            roles, inputs: see the attributes of the class.
            values: weights and state before the first step. Tensors that steps do not replace get one buffer. The
                values are removed from the mapping as they are copied, so that it is empty at the end.
            provider: the execution provider that allocates the buffers.
            in_place: the weights and state that a step updates in place.
        """
        self.roles, self.steps = roles, 0
        self.inputs = deepcopy(dict(inputs))  # references to parts of a model would keep it in memory
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
        """The buffers with the current weights and state. The next step switches to other buffers."""
        return self._sides[self._now]

    def weights(self) -> dict[str, np.ndarray]:
        """Return a copy of the trained weights."""
        return {name: buffer.read() for name, buffer in self.buffers.items() if self.roles.inputs[name] == "weight"}

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the optimizer's state and the running statistics, which steps replace as they do weights."""
        return {name: self.buffers[name].read() for name in self._successors if self.roles.inputs[name] != "weight"}

    def load(self, values: Mapping[str, np.ndarray], steps: int | None = None) -> None:
        """Replace weights and state.

        Args:
            values: name -> array of the same shape and dtype. Tensors that are not in it stay unchanged.
            steps: the number of steps that led to these values; None leaves the count of steps unchanged.

        Raises:
            UsageError: a name is unknown, or a shape or dtype differs.
        """
        for name, array in values.items():
            if name not in self.buffers:
                hint = suggest(name, self.buffers, "weights")
                raise unknown_name(f"the training model has no weight or state '{name}'", hint)
            here = self.buffers[name].array
            if np.shape(array) != here.shape or np.asarray(array).dtype != here.dtype:
                message = f"'{name}' is {np.asarray(array).dtype}{list(np.shape(array))}"
                message += f", but the model has {here.dtype}{list(here.shape)}"
                raise mismatch(message, "load values of the same training model")
        for name, array in values.items():
            self.buffers[name].write(array)
        self.steps = self.steps if steps is None else steps

    def save(self, out: str | Path, model: str | Path, *, force: bool = False, keep_mode: bool = False) -> list[Path]:
        """Write an inference model with the current weights and running statistics. Adapters are merged into weights.

        Args:
            out: the file to write.
            model: the inference model that the training model was built from.
            force: replace a file that onnxgrad did not write.
            keep_mode: keep the mode of BatchNormalization and Dropout in `model`. By default they are set to inference
                mode.

        Returns:
            The files written, the model first.

        Raises:
            UsageError: writing would replace an input, or without `force` a file that onnxgrad did not write.
            OnnxgradError: a file can't be read or written, or the training model was not built from `model`.
            CheckFailed: onnxruntime can't open the new model although it opens the original.
        """
        original, path = load_model(model)
        out = resolve_output(checks.path("out", out))
        check_target(out, original, path, force)
        trained = self._merged(original, path, keep_mode)
        return save_model(trained, out, path, force, check=check_opens(trained, original, path))

    def merged(self, model: ModelSource, keep_mode: bool = False) -> tuple[ModelProto, Path | None]:
        """Return the inference model that `save` would write, and the file that its external data are relative to.

        Args:
            model: the inference model that the training model was built from.
            keep_mode: keep the mode of BatchNormalization and Dropout in `model`.

        Raises:
            OnnxgradError: a file can't be read, or the training model was not built from `model`.
        """
        original, path = own_model(model)
        return self._merged(original, path, keep_mode), path

    def _merged(self, original: ModelProto, path: Path | None, keep_mode: bool) -> ModelProto:
        roles = self.roles
        return merge(original, roles.adapters, self.weights(), path, self.state(), keep_mode, roles.quantized)

    def step(
        self, feeds: Mapping[str, np.ndarray], learning_rate: float | Schedule = RATE, uncounted: bool = False
    ) -> float:
        """Take a step on a batch.

        Args:
            feeds: an array of the right dtype for each of `inputs`.
            learning_rate: the learning rate of this step, or a schedule that computes it from `steps`.
            uncounted: True if the loss ignores all labels of the batch. Then the loss is nan, the gradient is 0, and
                the step is taken nevertheless.

        Returns:
            The loss, computed with the weights before the step.

        Raises:
            UsageError: an input is missing or unknown, or does not fit.
            NotFinite: the loss is infinite or nan; then no step was taken, and the old buffers stay in use.
        """
        self._check(feeds)
        self._rate.write(self._rate_now(learning_rate))
        if self._seed is not None:
            load_onnxruntime().set_seed(_spread(self._seed + 1_000_003 * self.steps))
        try:
            loss = self._begin(feeds)
        except OnnxgradError:
            raise
        except Exception as error:  # onnxruntime's exception classes are not public
            raise self._failed(feeds, error) from error
        if not math.isfinite(loss) and not (math.isnan(loss) and (uncounted or self._uncounted)):
            hint = "use a smaller learning rate, or other data; the weights did not change"
            raise NotFinite(f"the loss is {loss}", hint)
        with self._unbroken():
            self._finish()
            self._now = 1 - self._now
            self.steps += 1
        return loss

    def _begin(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Compute the loss and the gradients, and return the loss. The weights do not change."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Write the next weights and state to the inactive buffers, as far as `_begin` has not done so."""
        raise NotImplementedError

    def _check(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Raise an error for missing and unknown inputs, and for arrays that onnxruntime would misinterpret.

        onnxruntime ignores the byte order of an array, and broadcasts inputs with different numbers of samples.
        """
        for name in self.inputs:
            if name not in feeds:
                raise missing_value(f"the batch has no '{name}'", f"a step takes {', '.join(self.inputs)}")
        for name, array in feeds.items():
            if name not in self.inputs:
                hint = suggest(name, self.inputs, "inputs")
                raise unknown_name(f"the training model has no input '{name}'", hint)
            if not isinstance(array, np.ndarray):
                hint = f"pass numpy.asarray({name}, dtype)"
                raise wrong_type(f"'{name}' must be an array, but is of type {type(array).__name__}", hint)
            if not array.dtype.isnative:
                hint = f"pass {name}.astype({name}.dtype.newbyteorder('='))"
                raise wrong_type(f"'{name}' has the byte order of another machine: {array.dtype}", hint)
        for names in self._together:
            if len({feeds[name].shape[:1] for name in names}) > 1:
                given = ", ".join(f"{name} {list(feeds[name].shape)}" for name in names)
                message = f"the inputs have different numbers of samples: {given}"
                raise wrong_shape(message, "the first axis must be the batch")

    def _rate_now(self, learning_rate: float | Schedule) -> np.ndarray:
        """Return the learning rate of this step. If the schedule cycles the momentum, write it into the state."""
        if not isinstance(learning_rate, Schedule):
            return np.asarray(learning_rate)
        momentum = learning_rate.momentum(self.steps)
        if momentum is not None:
            slots = self.roles.slots.items()
            cycled = OPTIMIZERS.lookup(self.roles.optimizer).cycled
            name = next((name for name, slot in slots if not slot.of and slot.kind == cycled), None)
            if name is None:
                hint = "build it with `cycle_momentum=True`"
                raise conflict("the schedule changes the momentum, which in the training model is a constant", hint)
            self.buffers[name].write(np.asarray(momentum))
        return np.asarray(learning_rate.rate(self.steps))

    def _divisors_of(
        self, names: Sequence[str], results: Mapping[str, Buffer], feeds: Mapping[str, np.ndarray]
    ) -> list[float]:
        """Return, for each loss, the number by which its mean over a batch is divided.

        A loss without an output for its divisor is a mean over the elements of its label, or over the samples if it
        takes a mask.

        Args:
            names: for each loss, the name of the output with its divisor; "" if it has none.
            results: the buffers of the outputs, which the run on the batch has written if the batch has samples.
            feeds: the batch.
        """
        count = samples_in(feeds)
        sizes = [feeds[term.label].size if term.label and not term.mask else count for term in self.roles.losses]
        own = zip(names, sizes, strict=True)
        return [float(results[name].read() if name and count else size) for name, size in own]

    def _failed(self, feeds: Mapping[str, np.ndarray], error: Exception) -> OnnxgradError:
        given = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in feeds.items())
        wanted = ", ".join(f"{name} {in_words(value_type)}" for name, value_type in self.inputs.items())
        hint = f"it got {given}, but takes {wanted}"
        return OnnxgradError(f"the step fails: {str(error).strip()}", "; ".join([hint, *self._other_axes(feeds)]))

    def _other_axes(self, feeds: Mapping[str, np.ndarray]) -> Iterator[str]:
        """Yield hints for labels whose shape suggests that the loss expects the classes along another axis."""
        for term in self.roles.losses:
            sizes = zip(shape_of(self.inputs.get(term.label)) or (), np.shape(feeds.get(term.label, ())), strict=False)
            if (
                term.ignore_index is not None
                and term.class_axis == 1
                and any(isinstance(d, int) and d != n for d, n in sizes)
            ):
                yield f"if the classes are on the last axis of '{term.output}', build with `loss_options=class-axis=-1`"


def samples_in(feeds: Mapping[str, np.ndarray]) -> int:
    """Return the number of samples in a batch; 1 if its arrays have no axes."""
    return next((len(array) for array in feeds.values() if array.ndim), 1)


def drawing(model: ModelProto) -> list[str]:
    """Return the operators of a model, other than Dropout, that draw random numbers."""
    return sorted({node.op_type for node in with_bodies(model.graph.node)} & RANDOM - {"Dropout"})


def _spread(number: int) -> int:
    """Return a 31-bit seed for a number. The seeds of successive numbers look independent.

    onnxruntime's generator is linear in its seed. If the seeds of steps were equally spaced, the random value that a
    Dropout draws for an element in one step would determine the value in the next step. This function is the finalizer
    of SplitMix64; G. L. Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    found = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    found = (found ^ found >> 27) * 0x94D049BB133111EB % 2**64
    return (found ^ found >> 31) % 2**31


def loosen(model: ModelProto, seed: int) -> int | None:
    """Make random numbers depend only on the seed of the run: remove the seeds of Dropout nodes.

    Returns:
        The seed if the model has a Dropout node, so that the caller must seed onnxruntime before each step; otherwise
        None.
    """
    if drawing(model):
        load_onnxruntime().set_seed(_spread(seed))  # these operators are seeded once, when the session is created
    found = [node for node in with_bodies(model.graph.node) if node.op_type == "Dropout"]
    for node in found:
        for attribute in [a for a in node.attribute if a.name == "seed"]:
            node.attribute.remove(attribute)
    return seed if found else None


def numpy_type(value_type: TypeProto) -> np.dtype:
    """Return the numpy dtype of a tensor type."""
    return helper.tensor_dtype_to_np_dtype(dtype_of(value_type))
