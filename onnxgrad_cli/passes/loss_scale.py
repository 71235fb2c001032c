"""Scale the loss gradient up and the gradients of the weights down again, so that 16 bits hold what lies between.

Below 6e-8 float16 knows zero alone. The gradients leave in float32, unscaled, as what they are without a scale.
Source: P. Micikevicius et al., Mixed Precision Training, ICLR 2018; the dynamic scale is that of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.common.settings import value_of
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.sums import total
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.options import DYNAMIC, LossScale, StepOptions, check_loss_scale
from onnxgrad_cli.passes.optimizer.state import States
from onnxgrad_cli.passes.pipeline import Pass
from onnxgrad_cli.record import StepRecord

SCALE, GOOD = "loss_scale", "good_steps"
FIRST, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""GradScaler's: the scale of the first step, its growth after so many good steps, and what it shrinks by after a bad
one."""

LARGEST = 2.0**127
"""The largest power of two in float32."""


def parse_loss_scale(text: str) -> LossScale:
    """A number above zero, or 'dynamic'.

    Raises:
        UsageError: it is neither.
    """
    found = value_of(text)
    if found == DYNAMIC:
        return DYNAMIC
    return check_loss_scale(float(found) if isinstance(found, int) and not isinstance(found, bool) else found)


def _run(graph: Graph, options: StepOptions, training: StepRecord) -> bool:
    asked = options.loss_scale
    assert asked is not None, "the pipeline has this pass where it is asked for"
    if asked == DYNAMIC and not options.optimizer:
        raise UsageError("`loss_scale='dynamic'` needs steps to adapt to", "add `optimizer=NAME`, or name a number")
    op = Op(graph)
    op.role, op.scope = "backward", "loss_scale"
    if asked == DYNAMIC:
        scale = States(graph, options, training).whole(op, SCALE, FIRST, TensorProto.FLOAT)
    else:
        scale = op.const(asked, TensorProto.FLOAT)
    _scale_up(op, training, scale)
    unscaled = {}
    for name, gradient in training.gradients.items():
        wide = op.wide(op.val(gradient))
        unscaled[name] = wide / op.cast(scale, wide)
    scaled = {gradient: graph.fresh(f"{gradient}_scaled") for gradient in training.gradients.values()}
    _rename(graph, op, scaled)
    op.rename_all({training.gradients[name]: value for name, value in unscaled.items()})
    graph.nodes.extend(op.nodes)
    return True


def _scale_up(op: Op, training: StepRecord, scale: Val) -> None:
    """Let what reads the cotangent of the loss read the scaled one."""
    graph, before = op.graph, len(op.nodes)
    where = 1 + next(i for i, node in enumerate(graph.nodes) if node.op_type == "YieldOp")
    after = graph.nodes[where:]
    for name in training.yielded.values():
        seed = op.val(name)
        rename(after, {name: (seed * op.cast(scale, seed)).name})
    graph.nodes[where:where] = op.nodes[before:]
    del op.nodes[before:]


def _rename(graph: Graph, op: Op, names: dict[str, str]) -> None:
    rename([*graph.nodes, *op.nodes], names)
    graph.types.update((new, graph.types[old]) for old, new in names.items())


def are_finite(op: Op, gradients: Iterable[Val]) -> Val:
    """Whether no element is infinite or no number."""
    return total(op, "ReduceL1", *gradients) < np.inf


def scale_in(op: Op, states: States, training: StepRecord) -> tuple[Val, Val]:
    """The states of a dynamic scale: the scale, and a new one for the good steps since it changed."""
    scale = next(name for name, slot in training.slots.items() if slot.kind == SCALE and not slot.of)
    return op.val(scale), states.whole(op, GOOD, 0, TensorProto.INT64)


def adapted(op: Op, scale: Val, good_steps: Val, good: Val) -> dict[str, Val]:
    """What the scale and the count of good steps become after a step that was good or not.

    Args:
        scale, good_steps: the states.
        good: whether all gradients were finite.
    """
    count = good_steps + 1
    full = op.Equal(count, op.const(INTERVAL))
    grown = op.Where(full, op.Min(scale * GROWTH, op.const(LARGEST, scale)), scale)
    return {
        scale.name: op.Where(good, grown, scale * BACKOFF),
        good_steps.name: op.Where(op.And(good, op.Not(full)), count, op.const(0)),
    }


LOSS_SCALE = Pass(
    "loss-scale",
    "with --loss-scale: the gradient of the loss scaled up, those of the weights down",
    _run,
    ("backward",),
)
