"""The pass behind --recompute: forward values are recomputed in the backward part instead of being stored for it.

Less memory is paid for with more operations. `dataflow` finds what the backward part reads, `plan` chooses what is
recomputed, `rewrite` writes the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.training_cost import Cost, cost
from onnxgrad_cli.errors import Caution, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.options import RecomputeSpec, RematerializationOptions
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.passes.rematerialization import rewrite
from onnxgrad_cli.passes.rematerialization.dataflow import LONGEST_CHAIN, Dataflow
from onnxgrad_cli.passes.rematerialization.layers import ends_of_layers
from onnxgrad_cli.passes.rematerialization.plan import Plan, plan_blocks, plan_budget, plan_elementwise, trade
from onnxgrad_cli.passes.rematerialization.request import AUTO, BLOCK, OPTIMAL, SIZED
from onnxgrad_cli.passes.rematerialization.solver import plan_optimal
from onnxgrad_cli.record import Recomputed, Training

OFFERS = 40
"""How many plans the report shows beside the one that was taken, at most."""


def recompute(graph: Graph, options: RematerializationOptions, training: Training) -> bool:
    """Compute values again, as the options ask for; returns whether any are."""
    spec = options.recompute
    assert spec is not None
    results = [training.loss, *training.gradients.values(), *training.state.values()]
    graph.remove_unused([*results, *training.yielded.values()])  # zero gradients alone need no seed, passes do
    before = cost(graph, training)
    sizes = Facts(graph, {**before.sizes, **before.assumed})
    offers = trade(_flow(graph, options, training), sizes, before.kept_bytes)
    plan = _plan(graph, options, training, spec, sizes, before)
    count = rewrite.write_recomputation(plan)
    after = cost(graph, training)
    added = after.flops_backward - before.flops_backward
    training.recomputed = Recomputed(str(spec), count, before.kept_bytes, after.kept_bytes, added, _thinned(offers))
    for text in _shortfalls(spec, training.recomputed, before.assumed):
        training.cautions.append(Caution("note", "", f"`recompute={spec}`: {text}"))
    return count > 0


def _plan(
    graph: Graph, options: RematerializationOptions, training: Training, spec: RecomputeSpec, sizes: Facts, before: Cost
) -> Plan:
    """The plan that `spec` asks for; `before` is what the model costs without recomputation, of values of `sizes`."""
    by_layers = spec.kind == BLOCK and spec.pattern == AUTO
    boundaries = _boundaries(graph, training, spec) if spec.kind == BLOCK and not by_layers else set()
    longest = None if spec.kind == BLOCK else LONGEST_CHAIN
    flow = _flow(graph, options, training, boundaries, longest, _layers if by_layers else None)
    if spec.kind == BLOCK:
        return plan_blocks(flow, boundaries)
    if spec.kind in SIZED:
        budget = (spec.size, sizes, before.kept_bytes)
        found = plan_budget(flow, *budget)
        return plan_optimal(found, *budget) if spec.kind == OPTIMAL else found
    return plan_elementwise(flow)


def _thinned(offers: Sequence[tuple[int, float]]) -> tuple[tuple[int, int], ...]:
    """Some of the offers, the first and the last among them."""
    every = -(-len(offers) // OFFERS)
    return tuple((kept, int(flops)) for kept, flops in dict.fromkeys((*offers[::every], offers[-1])))


def _flow(
    graph: Graph,
    options: RematerializationOptions,
    training: Training,
    boundaries: Collection[str] = (),
    longest: int | None = LONGEST_CHAIN,
    layers: Callable[[Sequence[Node]], list[int]] | None = None,
) -> Dataflow:
    """The dataflow of a model, and what of it has to be stored; see `Dataflow`."""
    flow = Dataflow(graph, training, boundaries, longest, layers)
    flow.must_store.update(training.state.values(), graph.output_names if options.keep_outputs else ())
    if training.chunks is not None:  # they are gone before the backward part of the rest begins
        own = frozenset().union(*training.chunks.nodes)
        flow.must_store.update(name for node in flow.forward if node.name in own for name in node.output if name)
    return flow


def _shortfalls(spec: RecomputeSpec, done: Recomputed, assumed: Mapping[str, int]) -> Iterator[str]:
    """What was asked for and not reached, in sentences for the cautions.

    Args:
        spec: what was asked for.
        done: what was reached.
        assumed: the sizes with which symbols count that nobody gave one.
    """
    if not done.nodes and (spec.kind not in SIZED or done.kept_before > spec.size):
        yield "there is nothing that could be computed again"
    elif spec.kind in SIZED and done.kept > spec.size:
        yield f"{done.kept:,} bytes stay, for the rest can't be computed again from them; try block:GLOB"
    if spec.kind in SIZED and assumed:
        sizes = ", ".join(f"{symbol} = {size}" for symbol, size in assumed.items())
        yield f"bytes were counted with {sizes}; `dims=NAME=SIZE` gives a size"


def _layers(forward: Sequence[Node]) -> list[int]:
    """Where the layers of the forward part end.

    Raises:
        UsageError: it has none that are alike.
    """
    found = ends_of_layers(forward)
    if not found:
        raise UsageError(
            f"`recompute` block:{AUTO} found no layers that repeat each other",
            "name their ends: block:GLOB, or take elementwise",
        )
    return found


def _boundaries(graph: Graph, training: Training, spec: RecomputeSpec) -> set[str]:
    """The forward nodes and values that the pattern of `--recompute block` names."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if training.yielded.keys() & set(node.input):
            break
        names.update(dict.fromkeys(filter(None, (node.name, *node.output))))
    return set(matching(spec.pattern, list(names), "`recompute` block", "nodes or values"))
