"""Say the backward part in one node, the standard's Gradient operator, in place of the nodes that compute it.

The compact form is for exchange: it says what is differentiated and leaves the how to the reader. No runtime has a
kernel for it; `onnxgrad expand` writes it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
from onnx import TensorProto

from onnxgrad_cli.autodiff.definitions.preview import PREVIEW
from onnxgrad_cli.autodiff.reverse import differentiate, or_zero
from onnxgrad_cli.common.visible import decoded
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import Node, make_node
from onnxgrad_cli.ir.types import dtype_of
from onnxgrad_cli.options import GradientNodeOptions
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import StepRecord


def is_gradient(node: Node) -> bool:
    """Whether a node is the Gradient operator of the standard."""
    return node.op_type == "Gradient" and node.domain == PREVIEW


def xs_zs_y(node: Node) -> tuple[list[str], list[str], str]:
    """The tensors that a Gradient node names in its attributes xs, zs and y; those left out are empty.

    What is no UTF-8 is the name of none, and is given so that it can be told.
    """
    given = {attribute.name: attribute for attribute in node.attribute}
    xs, zs = (list(map(decoded, given[key].strings)) if key in given else [] for key in ("xs", "zs"))
    return xs, zs, decoded(given["y"].s) if "y" in given else ""


def rename_named(node: Node, identifier: Callable[[str], str]) -> None:
    """Call what a node names in its attributes, if it is a Gradient, by other names."""
    for attribute in node.attribute if is_gradient(node) else ():
        attribute.strings[:] = [identifier(decoded(name)).encode() for name in attribute.strings]
        if attribute.HasField("s"):
            attribute.s = identifier(decoded(attribute.s)).encode()


def _run(graph: Graph, options: GradientNodeOptions, training: StepRecord) -> bool:
    """Append one Gradient node, after a trial differentiation has refused what its expansion would refuse."""
    _refuse_what_it_can_not_say(options)
    training.forward_nodes = len(graph.nodes)
    xs = [*training.trained, *training.grad_of_input]
    _rehearse(graph, training, xs)
    needed = graph.ancestors([training.loss]).difference(xs)
    zs = [name for name in dict.fromkeys((*graph.input_names, *training.state)) if name in needed]
    _refuse_bfloat16(graph, [*xs, *zs, training.loss])
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
    if graph.opset(PREVIEW) is None:
        graph.proto.opset_import.append(onnx.helper.make_opsetid(PREVIEW, 1))
    return True


def _refuse_what_it_can_not_say(options: GradientNodeOptions) -> None:
    if options.yield_ != "ones":
        raise UsageError(
            f"`as_gradient_op` does not go with `yield_={options.yield_!r}`", "a Gradient starts from ones"
        )
    if options.loss_scale is not None:
        raise UsageError("`as_gradient_op` does not go with `loss_scale`", "a Gradient starts from ones")
    if options.recompute is not None:
        raise UsageError("`as_gradient_op` does not go with `recompute`", "what a Gradient keeps is up to its runtime")
    if options.lora_dora:
        raise UsageError(
            "`as_gradient_op` does not go with `lora_dora`",
            "a Gradient is the derivative itself, in which the norms of weights move: leave one of the two out",
        )
    if options.quantization != "refuse":
        raise UsageError(
            f"`as_gradient_op` does not go with `quantization={options.quantization!r}`",
            "a Gradient is the derivative itself: leave one of the two out",
        )


def _refuse_bfloat16(graph: Graph, names: Iterable[str]) -> None:
    found = [name for name in names if dtype_of(graph.types.get(name)) == TensorProto.BFLOAT16]
    if found:
        raise UsageError(
            f"`as_gradient_op`: the standard's Gradient takes no bfloat16, and '{found[0]}' is of that type",
            "leave the option out",
        )


def _rehearse(graph: Graph, training: StepRecord, xs: list[str]) -> None:
    """Refuse and caution as the expansion will; what is written for that is thrown away."""
    op = Op(graph)
    found = differentiate(graph, {training.loss: op.fill(1.0, op.val(training.loss))}, xs, op, training)
    for name in xs:
        or_zero(op, name, found[name], training)


GRADIENT = Pass("gradient", "with --as-gradient-op, in place of yield and backward: one Gradient node", _run, ("loss",))
