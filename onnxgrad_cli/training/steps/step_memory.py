"""What memory a step of a trainer takes, foretold without taking one.

It is what lies in memory between steps, weights and state in their buffers, and what a run makes on its way: of the
model as onnxruntime's optimizer leaves it, for that runs other nodes in another order than the file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from onnx import ModelProto
from onnx.helper import make_tensor_value_info

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.cost.facts import Fact, Facts, is_known, known_sizes
from onnxgrad_cli.cost.steps import steps_of
from onnxgrad_cli.execution.session import as_run
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.skeleton import without_initializers
from onnxgrad_cli.ir.types import nbytes, tensor_type
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.passes.optimizer.split import narrowed
from onnxgrad_cli.training.steps.arena import after_runs
from onnxgrad_cli.training.steps.compiled import MEMORY, is_compiled
from onnxgrad_cli.training.steps.sliced import parts_of

PROCESS = 20 * 10**6
"""Bytes that the first sessions of a process take: 13 MB of code that nothing has read before, threads and their
memory. Measured on networks of hardly any values."""

NODE = 5_400
"""Bytes that a session takes for each node: networks of 51 to 1,326 nodes took 1.6 MB and that, to 0.3 MB."""

SLICED = 4 * 10**6
"""Bytes that the sessions of a sliced step take besides."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes that a step takes at its peak, beyond what the process and its data take.

    Attributes:
        held: weights, the optimizer's state and constants, with the buffers into which a step writes the next ones.
        values: what a run makes on its way, at the most: kept results, gradients, what lies between.
        sessions: what onnxruntime takes for itself, and LLVM where it compiles the updates.
        unknown: symbols of which nobody has told a size, and which so count as the least that the network takes.
    """

    held: int
    values: int
    sessions: int
    unknown: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """All together."""
        return self.held + self.values + self.sessions


def step_memory(built: TrainingModel, sizes: Mapping[str, int], threads: int | None = None) -> StepMemory:
    """Foretell what memory a step of `Trainer` takes on the processor; sessions are opened for it, and nothing is run.

    Args:
        built: a training model with an optimizer.
        sizes: symbol -> size, that of the batch among them.
        threads: how many the step uses; see `Trainer`.

    Raises:
        OnnxgradError: onnxruntime refuses the model.
    """
    graph, roles = built.graph, describe(built.model)
    _, assumed, facts = known_sizes(graph, sizes)
    replaced = roles.successors
    model = without_initializers(built.model, replaced)
    state = {name: facts.bytes(name) for name in replaced}
    constants = sum(nbytes(tensor) for name, tensor in graph.initializers.items() if name not in replaced)
    shapes = {name: np.broadcast_to(np.float32(0), facts[name].shape) for name in replaced}
    sliced = parts_of(model, shapes)
    in_place = sliced.in_place if sliced else set()
    twice = sum(size for name, size in state.items() if name not in in_place)
    held = sum(state.values()) + twice + constants
    part = sliced.gradient if sliced else narrowed(model, {roles.loss, *replaced.values()})
    run = as_run(part, graph.path, threads)
    sized = as_run(part, graph.path, threads, {**sizes, **assumed})
    known = _sizes_in(run, sized, graph, facts, {**sizes, **assumed})
    values = after_runs(steps_of(run.graph.node, repeat("")), _outputs(run), known, set(replaced.values())).touched
    sessions = PROCESS + NODE * len(part.graph.node) + SLICED * bool(sliced)
    if sliced and any(map(is_compiled, sliced.updates)):
        sessions += MEMORY
    return StepMemory(held, values, sessions, tuple(assumed))


def _outputs(model: ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def _sizes_in(run: ModelProto, sized: ModelProto, graph: Graph, facts: Facts, sizes: Mapping[str, int]) -> Facts:
    """The size of every value of a model as onnxruntime runs it.

    Args:
        run: the model.
        sized: the same with sizes in the place of symbols, where what shapes are computed of is so computed already.
        graph, facts: the model that they were made of, and the sizes that are known there.
        sizes: symbol -> size.
    """
    made = {name for node in sized.graph.node for name in node.output if name}
    known = {name: fact for name in sorted(made & graph.types.keys()) if (fact := _fact(name, facts)) is not None}
    stated = (make_tensor_value_info(name, fact.dtype, fact.shape) for name, fact in known.items() if not fact.guessed)
    sized.graph.value_info.extend(stated)
    found = infer_shapes(sized).graph
    result = Graph(run)
    result.types.update(graph.types)
    result.types.update((value.name, value.type) for value in found.value_info if is_known(value.type))
    result.types.update((tensor.name, tensor_type(tensor.data_type, tensor.dims)) for tensor in found.initializer)
    _reordered(result)
    return known_sizes(result, sizes)[2]


def _fact(name: str, facts: Facts) -> Fact | None:
    try:
        return facts[name]
    except LookupError:
        return None


def _reordered(graph: Graph) -> None:
    """Give onnxruntime's own values with channels in blocks the types of those that they are made of or written to."""
    for node in graph.nodes:
        same = {"ReorderInput": (node.input, node.output), "ReorderOutput": (node.output, node.input)}
        if node.op_type in same:
            known, unknown = same[node.op_type]
            graph.types.setdefault(unknown[0], graph.types[known[0]])
