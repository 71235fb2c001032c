"""What memory a step of a trainer takes, foretold from the training model alone.

It is what lies in memory between steps, weights and state in their buffers, and what a run makes on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.cost import known_sizes, live_bytes, steps_of
from onnxgrad_cli.ir.skeleton import without_initializers
from onnxgrad_cli.ir.types import nbytes
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.training.steps.sliced import parts_of

SESSION = 48 * 10**6
"""Bytes that sessions take for themselves."""

LOST = 0.2
"""What runs take beyond the values alive, as a share of these: memory that lies free between them, and what kernels
take for themselves. A limit is to be kept, so both are chosen rather too large: on perceptrons the foretold peak was
1.03 to 1.5 times the measured one."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes that a step takes at its peak, beyond what the process and its data take.

    Attributes:
        held: weights, the optimizer's state and constants, with the buffers into which a step writes the next ones.
        values: what a run makes on its way, at the most: kept results, gradients, what lies between.
        unknown: symbols of which nobody has told a size, and which so count as the least that the network takes.
    """

    held: int
    values: int
    unknown: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """All together."""
        return self.held + int(self.values * (1 + LOST)) + SESSION


def step_memory(built: TrainingModel, sizes: Mapping[str, int]) -> StepMemory:
    """Foretell what memory a step of `Trainer` takes on the processor.

    Args:
        built: a training model with an optimizer.
        sizes: symbol -> size, that of the batch among them.
    """
    graph = built.graph
    _, assumed, facts = known_sizes(graph, sizes)
    replaced = describe(built.model).successors
    state = {name: facts.bytes(name) for name in replaced}
    constants = sum(nbytes(tensor) for name, tensor in graph.initializers.items() if name not in replaced)
    shapes = {name: np.broadcast_to(np.float32(0), facts[name].shape) for name in replaced}
    sliced = parts_of(without_initializers(built.model, replaced), shapes)
    in_place = sliced.in_place if sliced else set()
    twice = sum(size for name, size in state.items() if name not in in_place)
    held = sum(state.values()) + twice + constants
    run = sliced.gradient.graph if sliced else graph.proto.graph
    steps = steps_of(run.node if sliced else graph.nodes, repeat(""))
    course = live_bytes(steps, [value.name for value in run.output], facts, set(replaced.values()))
    return StepMemory(held, max(course), tuple(assumed))
