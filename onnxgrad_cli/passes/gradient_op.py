"""Write the backward part as a single node, the standard's Gradient operator.

This compact form is for exchange between tools: the node states which derivative is meant, but not how to compute it.
No runtime has a kernel for Gradient; `onnxgrad expand` replaces it by plain operators.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from onnxgrad_cli.autodiff.reverse import differentiate, or_zero
from onnxgrad_cli.common.checks import conflicts
from onnxgrad_cli.common.escape import decoded
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.ir.domains import PREVIEW
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.node_values import is_gradient
from onnxgrad_cli.ir.types import dtype_of
from onnxgrad_cli.options import GradientNodeOptions
from onnxgrad_cli.record import StepRecord


def xs_zs_y(node: Node) -> tuple[list[str], list[str], str]:
    """Return the tensor names in the attributes xs, zs and y of a Gradient node. Absent attributes are empty.

    Names that are not valid UTF-8 match no tensor. They are returned in a printable form for messages.
    """
    given = {attribute.name: attribute for attribute in node.attribute}
    xs, zs = (list(map(decoded, given[key].strings)) if key in given else [] for key in ("xs", "zs"))
    return xs, zs, decoded(given["y"].s) if "y" in given else ""


def rename_named(node: Node, identifier: Callable[[str], str]) -> None:
    """Rename the tensors that the attributes of a Gradient node name. Other nodes are not changed."""
    for attribute in node.attribute if is_gradient(node) else ():
        attribute.strings[:] = [identifier(decoded(name)).encode() for name in attribute.strings]
        if attribute.HasField("s"):
            attribute.s = identifier(decoded(attribute.s)).encode()


def append_gradient_node(graph: Graph, options: GradientNodeOptions, training: StepRecord) -> None:
    """With --as-gradient-op, instead of yield and backward: append one Gradient node.

    First differentiate on trial, so that errors of a later expansion are raised now.
    """
    _refuse_what_it_can_not_say(options)
    training.forward_nodes = len(graph.nodes)
    xs = [*training.trained, *training.grad_of_input]
    _rehearse(graph, training, xs)
    needed = graph.ancestors([training.loss]).difference(xs)
    zs = [name for name in dict.fromkeys((*graph.input_names, *training.state)) if name in needed]
    narrow = [n for n in (*xs, *zs, training.loss) if dtype_of(graph.types.get(n)) == TensorProto.BFLOAT16]
    if narrow:
        raise conflict(
            "`as_gradient_op`: the standard's Gradient operator doesn't support bfloat16, which is the type of "
            f"'{narrow[0]}'",
            "leave out the option",
        )
    training.gradients.update((name, graph.fresh(f"{name}_grad")) for name in xs)
    graph.types.update((gradient, graph.types[name]) for name, gradient in training.gradients.items())
    node = make_node(
        "Gradient",
        [*xs, *zs],
        [training.gradients[name] for name in xs],
        name=graph.fresh("Gradient"),
        domain=PREVIEW,
        xs=xs,
        zs=zs or None,
        y=training.loss,
    )
    graph.nodes.append(node)
    graph.use_domain(PREVIEW)


def _refuse_what_it_can_not_say(options: GradientNodeOptions) -> None:
    itself = "a Gradient node replaces the backward nodes"
    for option, is_set, why in (
        (f"yield_={options.yield_!r}", options.yield_ != "ones", "a Gradient node always starts from ones"),
        ("loss_scale", options.loss_scale is not None, "a Gradient node always starts from ones"),
        ("recompute", options.recompute is not None, "the runtime decides which values a Gradient node stores"),
        ("lora_dora", options.lora_dora, f"{itself}, which DoRA needs for the norms of the weights"),
        (f"quantization={options.quantization!r}", options.quantization != "refuse", itself),
    ):
        conflicts("`as_gradient_op`", {f"`{option}`": is_set}, f"leave out one of them: {why}")


def _rehearse(graph: Graph, training: StepRecord, xs: list[str]) -> None:
    """Differentiate as a later expansion would, only for the errors and cautions. The nodes are discarded."""
    op = Op(graph)
    found = differentiate(graph, {training.loss: op.fill(1.0, op.val(training.loss))}, xs, op, training)
    for name in xs:
        or_zero(op, name, found[name], training)
