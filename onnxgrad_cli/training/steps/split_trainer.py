"""A training step in two runs: one computes the gradients of a batch, the other takes the optimizer's step with them.

The results equal those of one run of the whole model. A subclass can change the gradients between the two runs, such as
`ParallelTrainer`, which sums the gradients of several processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

from onnxgrad_cli import metadata
from onnxgrad_cli.errors import mismatch, missing_value
from onnxgrad_cli.execution.session import CPU, BoundRuns, Buffer, open_session, take_out
from onnxgrad_cli.metadata import Roles
from onnxgrad_cli.passes.optimizer.split import DIVISOR, Halves, narrowed
from onnxgrad_cli.training.steps.base import TrainerBase, loosen, numpy_type


class SplitTrainer(TrainerBase):
    """A trainer for a training model that was split into two halves: gradients and optimizer."""

    def __init__(
        self,
        halves: Halves,
        values: Mapping[str, np.ndarray] | None = None,
        *,
        also: Iterable[str] = (),
        path: Path | None = None,
        provider: str = CPU,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        """Open sessions on both models, which are not changed.

        Args:
            halves: the result of `split` for a training model.
            values: weights, state and frozen tensors that are not stored in the models, or that replace stored ones.
            also: further scalar outputs of the gradient model that a subclass reads between the two runs.
            path: the file that the models were read from; external data are relative to it.
            provider: the full name of the execution provider, such as 'CPUExecutionProvider'.
            threads: the number of CPU threads; None for onnxruntime's default.
            seed: the seed of random operators such as Dropout; each step has different random numbers.

        Raises:
            UsageError: a weight has no value, or the optimizer reads outputs of the gradient model other than
                gradients, the loss and its divisor.
            OnnxgradError: onnxruntime refuses a model.
        """
        gradients, steps = metadata.describe(halves.gradient), metadata.read(halves.optimizer)
        roles = _joined(gradients, steps)
        self._crossing = _crossing(gradients, steps)
        self._statistics = gradients.successors
        self._scalars = [gradients.loss, *also]
        wanted = {*self._scalars, *self._crossing, *self._statistics.values()}
        gradient, optimizer = narrowed(halves.gradient, wanted), narrowed(halves.optimizer, steps.outputs)
        gradient, optimizer, found = _without_values(gradient, optimizer, roles, values or {}, path)
        graph = halves.gradient.graph
        types = {v.name: v.type for v in (*halves.optimizer.graph.input, *graph.output, *graph.input)}
        super().__init__(roles, {name: types[name] for name in gradients.fed}, found, provider)
        self._seed = loosen(gradient, seed)
        shapes = {name: self.buffers[role.of].array.shape for name, role in gradients.outputs.items() if role.of}
        self._between = {  # the buffers that the gradient model writes: scalars, and values that the optimizer reads
            name: Buffer(np.zeros(shapes.get(name, ()), numpy_type(types[name])), provider)
            for name in dict.fromkeys([*self._scalars, *self._crossing])
        }
        (rate,) = (name for name, role in steps.inputs.items() if role == "learning rate")
        self._rate = Buffer(np.zeros((), numpy_type(types[rate])), provider)
        read = {rate: self._rate, **{name: self._between[name] for name in self._crossing}}

        def runs(half: ModelProto, read: Mapping[str, Buffer], written: Mapping[str, Buffer]) -> list[BoundRuns]:
            """Return two bindings of a session to its buffers, for steps that read side 0 and side 1."""
            session, found = open_session(half, path, provider, threads, alternating=True), []
            for before, after in (self._sides, self._sides[::-1]):
                inputs = {**before, **read}
                outputs = {**{s: after[name] for name, s in self._successors.items()}, **written}
                bound = {value.name: inputs[value.name] for value in half.graph.input if value.name in inputs}
                made = {value.name: outputs[value.name] for value in half.graph.output}
                found.append(BoundRuns(session, bound, made, provider))
            return found

        self._forward = runs(gradient, {}, self._between)
        self._update = runs(optimizer, read, {})

    def _begin(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Write loss and gradients to `_between`, and the next running statistics to the side other than `_now`."""
        self._forward[self._now](feeds)
        return float(self._between[self.roles.loss].read())

    def _finish(self) -> None:
        self._update[self._now]({})


def _crossing(gradients: Roles, steps: Roles) -> list[str]:
    """Return the gradient model's outputs that the optimizer reads: gradients, and possibly the loss and its divisor.

    Raises:
        UsageError: the optimizer reads an output with a different role.
    """
    names = [name for name in steps.inputs if name in gradients.outputs]
    odd = [name for name in names if gradients.outputs[name].role not in ("gradient", "loss", DIVISOR)]
    if odd:
        raise mismatch(f"the optimizer model takes '{odd[0]}' from the gradient model, but that is not a gradient")
    return names


def _without_values(
    gradient: ModelProto, optimizer: ModelProto, roles: Roles, given: Mapping[str, np.ndarray], path: Path | None
) -> tuple[ModelProto, ModelProto, dict[str, np.ndarray]]:
    """Return both halves with weights and state removed, and the values of the removed tensors.

    A value in `given` overrides the stored one.

    Raises:
        UsageError: a weight has no value.
    """
    names = [name for name, role in roles.inputs.items() if role in ("weight", "state") or name in given]
    (gradient, stored), (optimizer, more) = (take_out(half, names, path) for half in (gradient, optimizer))
    known = {**stored, **more, **given}
    found = {name: known[name] for name in names if name in known}
    found |= roles.begun(list(found))
    missing = [name for name in names if name not in found]
    if missing:
        raise missing_value(f"'{missing[0]}' has no value", "pass the arrays of the checkpoint of this model")
    return gradient, optimizer, {name: found[name] for name in names}


def _joined(gradients: Roles, steps: Roles) -> Roles:
    """Return the roles of the whole step. The optimizer's inputs that the gradient model computes are left out."""
    crossing = set(gradients.outputs)
    inputs = {name: role for name, role in steps.inputs.items() if name not in crossing}
    return replace(
        gradients,
        inputs={**gradients.inputs, **inputs},
        outputs={**gradients.outputs, **steps.outputs},
        optimizer=steps.optimizer,
        step=steps.step,
        slots={**gradients.slots, **steps.slots},
    )
