"""Implement --recompute: recompute forward values in the backward part instead of storing them.

This saves memory at the cost of more operations. `dataflow` finds the values that the backward part reads, `plan`
chooses which are recomputed, and `rewrite` writes the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from onnxgrad_cli.common.checks import bytes_of
from onnxgrad_cli.common.choices import Recomputation
from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.training_cost import Cost, cost
from onnxgrad_cli.errors import Caution, no_data, suggest, unknown_name, wrong_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.options import RecomputeSpec, RematerializationOptions
from onnxgrad_cli.passes.parameters.patterns import matching
from onnxgrad_cli.passes.rematerialization import rewrite
from onnxgrad_cli.passes.rematerialization.dataflow import LONGEST_CHAIN, Dataflow
from onnxgrad_cli.passes.rematerialization.layers import ends_of_layers
from onnxgrad_cli.passes.rematerialization.plan import Plan, plan_blocks, plan_budget, plan_elementwise, trade
from onnxgrad_cli.passes.rematerialization.solver import plan_optimal
from onnxgrad_cli.record import Recomputed, Training

KINDS: tuple[Recomputation, ...] = get_args(Recomputation)
ELEMENTWISE, BLOCK, BUDGET, OPTIMAL = KINDS
SIZED = (BUDGET, OPTIMAL)
AUTO = "auto"
"""The pattern of `block:` that stands for the ends of the network's layers."""

FORM = "`recompute` must be elementwise, block:auto, block:GLOB, budget:SIZE or optimal:SIZE"


def parse_recompute(text: str) -> RecomputeSpec:
    """Parse `elementwise`, `block:auto`, `block:GLOB`, `budget:SIZE` or `optimal:SIZE`, such as budget:512MB.

    Raises:
        UsageError: the text does not have this form.
    """
    word, _, rest = (part.strip() for part in text.partition(":"))
    kind = next((kind for kind in KINDS if kind == word), None)
    if kind is None:
        raise unknown_name(f"{FORM}, not '{text}'", suggest(word, KINDS, "kinds"))
    if bool(rest) != (kind != ELEMENTWISE):
        raise wrong_value(f"{FORM}, not '{text}'", "write, for example, block:'*layer*/output' or budget:512MB")
    size = bytes_of(rest, f"`recompute` {kind}") if kind in SIZED else 0
    return RecomputeSpec(kind, rest if kind == BLOCK else "", size)


OFFERS = 40
"""Largest number of alternative plans that the report shows."""


def recompute(graph: Graph, options: RematerializationOptions, training: Training) -> None:
    """Recompute values as the options request."""
    spec = options.recompute
    assert spec is not None
    results = [training.loss, *training.gradients.values(), *training.state.values()]
    graph.remove_unused([*results, *training.yielded.values()])  # passes read the YieldOp's results
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


def _plan(
    graph: Graph, options: RematerializationOptions, training: Training, spec: RecomputeSpec, sizes: Facts, before: Cost
) -> Plan:
    """Return the plan that `spec` requests. `sizes` has all values' sizes, `before` the cost without recomputation."""
    if spec.kind == BLOCK and spec.pattern == AUTO:
        return plan_blocks(_flow(graph, options, training, longest=None, ends=_layers), ())
    if spec.kind == BLOCK:
        boundaries = _boundaries(graph, training, spec)
        return plan_blocks(_flow(graph, options, training, longest=None, boundaries=boundaries), boundaries)
    flow = _flow(graph, options, training)
    if spec.kind in SIZED:
        budget = (spec.size, sizes, before.kept_bytes)
        found = plan_budget(flow, *budget)
        return plan_optimal(found, *budget) if spec.kind == OPTIMAL else found
    return plan_elementwise(flow)


def _thinned(offers: Sequence[tuple[int, float]]) -> tuple[tuple[int, int], ...]:
    """Return at most about `OFFERS` of the alternative plans, including the first and the last."""
    every = -(-len(offers) // OFFERS)
    return tuple((kept, int(flops)) for kept, flops in dict.fromkeys((*offers[::every], offers[-1])))


def _flow(graph: Graph, options: RematerializationOptions, training: Training, **cut: Any) -> Dataflow:
    """Return the dataflow of a model; next states, kept outputs and values of loss chunks must be stored.

    The keywords set where the forward part is cut into segments, as for `Dataflow`.
    """
    flow = Dataflow(graph, training, **{"longest": LONGEST_CHAIN, **cut})
    flow.must_store.update(training.state.values(), graph.output_names if options.keep_outputs else ())
    if training.chunks is not None:  # their memory is free before the other backward nodes begin
        own = frozenset().union(*training.chunks.nodes)
        flow.must_store.update(name for node in flow.forward if node.name in own for name in node.output if name)
    return flow


def _shortfalls(spec: RecomputeSpec, done: Recomputed, assumed: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for the user about each part of the request that was not fulfilled.

    Args:
        spec: the request.
        done: the result.
        assumed: the sizes that were assumed for symbols without a size.
    """
    if not done.nodes and (spec.kind not in SIZED or done.kept_before > spec.size):
        yield "no value can be computed again"
    elif spec.kind in SIZED and done.kept > spec.size:
        yield (
            f"{done.kept:,} bytes stay stored, because the other values can't be computed again from less; try "
            "block:GLOB"
        )
    if spec.kind in SIZED and assumed:
        sizes = ", ".join(f"{symbol} = {size}" for symbol, size in assumed.items())
        yield f"the bytes were counted with {sizes}; set another size with `dims=NAME=SIZE`"


def _layers(forward: Sequence[Node]) -> list[int]:
    """Return the positions at which the layers of the forward part end.

    Raises:
        UsageError: no layers repeat.
    """
    found = ends_of_layers(forward)
    if not found:
        raise no_data(
            f"`recompute` block:{AUTO} found no repeating layers",
            "name the ends of the layers with block:GLOB, or use elementwise",
        )
    return found


def _boundaries(graph: Graph, training: Training, spec: RecomputeSpec) -> set[str]:
    """Return the forward nodes and values that match the pattern of `--recompute block`."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if training.yielded.keys() & set(node.input):
            break
        names.update(dict.fromkeys(filter(None, (node.name, *node.output))))
    return set(matching(spec.pattern, list(names), "`recompute` block", "nodes or values"))
