"""Estimate the memory of a trainer's step without taking a step.

The estimate is the sum of the buffers with weights and state and the values that a run allocates. The values are taken
from the graph that onnxruntime has optimized, because its nodes and their order differ from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from onnx import ModelProto
from onnx.helper import make_tensor_value_info

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.cost.facts import Facts, is_known, known_sizes
from onnxgrad_cli.cost.steps import steps_of
from onnxgrad_cli.execution.session import as_run
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.onnx_inference import infer_shapes
from onnxgrad_cli.ir.types import nbytes, tensor_type
from onnxgrad_cli.ir.weightless_copy import without_initializers
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.passes.optimizer.split import narrowed
from onnxgrad_cli.training.steps.arena import after_runs
from onnxgrad_cli.training.steps.compiled import MEMORY, is_compiled
from onnxgrad_cli.training.steps.sliced import parts_of

PROCESS = 20 * 10**6
"""Bytes that the first sessions of a process take: 13 MB of loaded code pages, and the memory of onnxruntime's threads.

Measured on networks whose values take almost no memory.
"""

NODE = 5_400
"""Bytes that a session takes per node. Sessions of 51 to 1,326 nodes took 1.6 MB more than this, within 0.3 MB."""

SLICED = 4 * 10**6
"""Additional bytes of the sessions of a sliced step."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes that a step takes at its peak, in addition to the process and its data.

    Attributes:
        held: weights, the optimizer's state and constants, including the second buffers, to which a step writes the new
            values.
        values: the peak of the values that a run allocates: kept activations, gradients and intermediate results.
        sessions: the memory of onnxruntime itself, and of LLVM if it compiles the updates.
        unknown: symbols without a given size; the estimate uses the smallest size that the network accepts.
    """

    held: int
    values: int
    sessions: int
    unknown: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The sum of `held`, `values` and `sessions`."""
        return self.held + self.values + self.sessions


def step_memory(built: TrainingModel, sizes: Mapping[str, int], threads: int | None = None) -> StepMemory:
    """Estimate the memory of a step of `Trainer` on the CPU. This opens onnxruntime sessions, but does not run them.

    Args:
        built: a training model with an optimizer.
        sizes: symbol -> size, including the symbol of the batch.
        threads: the number of CPU threads of the step; None for onnxruntime's default.

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
    outputs = [value.name for value in run.graph.output]
    values = after_runs(steps_of(run.graph.node, repeat("")), outputs, known, set(replaced.values())).touched
    sessions = PROCESS + NODE * len(part.graph.node) + SLICED * bool(sliced)
    if sliced and any(map(is_compiled, sliced.updates)):
        sessions += MEMORY
    return StepMemory(held, values, sessions, tuple(assumed))


def _sizes_in(run: ModelProto, sized: ModelProto, graph: Graph, facts: Facts, sizes: Mapping[str, int]) -> Facts:
    """Return the sizes of all values of a model that onnxruntime has optimized.

    Args:
        run: the optimized model.
        sized: the same model, but optimized after its symbols were replaced by sizes, so that shape computations are
            folded.
        graph, facts: the original model, and the known sizes of its values.
        sizes: symbol -> size.
    """
    made = {name for node in sized.graph.node for name in node.output if name}
    known = {name: fact for name in sorted(made & graph.types.keys()) if (fact := facts.known(name)) is not None}
    stated = (make_tensor_value_info(name, fact.dtype, fact.shape) for name, fact in known.items() if not fact.guessed)
    sized.graph.value_info.extend(stated)
    found = infer_shapes(sized).graph
    result = Graph(run)
    result.types.update(graph.types)
    result.types.update((value.name, value.type) for value in found.value_info if is_known(value.type))
    result.types.update((tensor.name, tensor_type(tensor.data_type, tensor.dims)) for tensor in found.initializer)
    _reordered(result)
    return known_sizes(result, sizes)[2]


def _reordered(graph: Graph) -> None:
    """Give each value in onnxruntime's blocked channel layout the type of the same value in the ordinary layout."""
    for node in graph.nodes:
        same = {"ReorderInput": (node.input, node.output), "ReorderOutput": (node.output, node.input)}
        if node.op_type in same:
            known, unknown = same[node.op_type]
            graph.types.setdefault(unknown[0], graph.types[known[0]])
