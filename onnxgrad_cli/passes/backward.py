"""The backward pass: append the gradient of every node between the loss and the requested weights and inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnxgrad_cli.autodiff.reverse import as_declared, differentiate, or_zero
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node
from onnxgrad_cli.ir.node_values import depending_on
from onnxgrad_cli.options import BackwardOptions
from onnxgrad_cli.passes.prepare.lsq import balanced
from onnxgrad_cli.record import BackwardRecord
from onnxgrad_cli.targets import find_target


def append_backward(graph: Graph, options: BackwardOptions, training: BackwardRecord) -> None:
    """Append the gradient of each node between the loss and the trained weights.

    Each gradient is named after its weight or input.
    """
    op = Op(graph)
    op.role = "backward"
    training.straight_through = options.straight_through
    training.forward_stays = options.training_info
    target = find_target(options.target)
    op.constant_axes = target.constant_axes
    training.kernel_variants.prefer = target.prefer
    training.kernel_variants.requested = options.tuned
    wanted = [*training.trained, *training.grad_of_input]
    seeds = {end: op.val(cotangent) for end, cotangent in training.yielded.items()}
    given = set(graph.types)
    cotangents = differentiate(graph, seeds, wanted, op, training)
    if training.learned_scales:
        cotangents |= balanced(op, cotangents, training.learned_scales)
    given |= graph.initializers.keys()
    op.forward, op.scope = "", "grad/result"
    training.gradients.update((name, graph.fresh(f"{name}_grad")) for name in wanted)
    after = next(iter(seeds.values())) if options.yield_ == "keep" else None  # the backward part starts at the YieldOp
    results = {
        training.gradients[name]: as_declared(op, name, or_zero(op, name, cotangents.pop(name), training, after))
        for name in wanted
    }
    named = {value.name for value in results.values()}
    for name, value in cotangents.items():
        if value is not None and value.name not in given and value.name not in named:
            results[graph.fresh(f"{name}_grad")] = value
            named.add(value.name)
    op.rename_all(results)
    for name, gradient in training.gradients.items():
        graph.types[gradient] = graph.types[name]
    nodes = op.nodes
    if options.recompute is None:  # recomputation relies on the order of the rules, and delays nodes itself
        nodes = _cotangents_last(nodes, {*results, *(seed.name for seed in seeds.values())})
    graph.nodes.extend(nodes)
    op.forget()


def _cotangents_last(nodes: Sequence[Node], cotangents: Collection[str]) -> list[Node]:
    """Return the nodes of the backward part reordered: nodes that need only forward values, such as masks, come first.

    If a node has several operands, onnxruntime first computes the operand whose node is last in the file (`run_order`).
    If a mask came after the cotangent that it is multiplied by, the mask would be computed before everything that the
    cotangent needs, and would stay in memory during that time. In a deep network, all masks would then be in memory, in
    addition to the values that they are computed from. This order reduces the memory of ResNet-50 to 0.87 times, and
    that of U-Net to 0.86 times.
    """
    late = depending_on(nodes, cotangents)
    return sorted(nodes, key=lambda node: not late.isdisjoint(node.output))
