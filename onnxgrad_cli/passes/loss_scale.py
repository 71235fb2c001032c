"""Scale the gradient of the loss up and the gradients of the weights down, so that 16-bit values do not underflow.

float16 has no positive values below 6e-8. The resulting gradients are float32 and unscaled, as without a scale. Source:
P. Micikevicius et al., Mixed Precision Training, ICLR 2018. The dynamic scale is the algorithm of torch.amp.GradScaler.
"""

from __future__ import annotations

from onnx import TensorProto

from onnxgrad_cli.common.settings import value_of
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import missing_value
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.options import DYNAMIC, LossScale, StepOptions, check_loss_scale
from onnxgrad_cli.record import StepRecord


def parse_loss_scale(text: str) -> LossScale:
    """Parse a number above zero, or 'dynamic'.

    Raises:
        UsageError: the text does not have this form.
    """
    found = value_of(text)
    if found == DYNAMIC:
        return DYNAMIC
    return check_loss_scale(float(found) if isinstance(found, int) and not isinstance(found, bool) else found)


def scale_loss(graph: Graph, options: StepOptions, training: StepRecord) -> None:
    """With --loss-scale: multiply the gradient of the loss by a scale, and divide the gradients of weights by it.

    The division is in float32.
    """
    if options.loss_scale == DYNAMIC and not options.optimizer:
        raise missing_value(
            "`loss_scale='dynamic'` requires an optimizer, because it adapts the scale at each step",
            "add `optimizer=NAME`, or set `loss_scale` to a number",
        )
    op = Op(graph)
    op.role, op.scope = "backward", "loss_scale"
    if options.loss_scale == DYNAMIC:
        from onnxgrad_cli.passes.optimizer.step import first_scale  # few builds need this module

        scale = first_scale(op, options, training)
    else:
        scale = op.const(options.loss_scale, TensorProto.FLOAT)
    _scale_up(op, training, scale)
    unscaled = {}
    for gradient in training.gradients.values():
        wide = op.wide(op.val(gradient))
        unscaled[gradient] = wide / op.cast(scale, wide)
    scaled = {gradient: graph.fresh(f"{gradient}_scaled") for gradient in training.gradients.values()}
    rename([*graph.nodes, *op.nodes], scaled)
    graph.types.update((new, graph.types[old]) for old, new in scaled.items())
    op.rename_all(unscaled)
    graph.nodes.extend(op.nodes)


def _scale_up(op: Op, training: StepRecord, scale: Val) -> None:
    """Multiply the cotangent of the loss by `scale` for all nodes that read it."""
    graph, before = op.graph, len(op.nodes)
    where = 1 + next(i for i, node in enumerate(graph.nodes) if node.op_type == "YieldOp")
    after = graph.nodes[where:]
    for name in training.yielded.values():
        seed = op.val(name)
        rename(after, {name: (seed * op.cast(scale, seed)).name})
    graph.nodes[where:where] = op.nodes[before:]
    del op.nodes[before:]
