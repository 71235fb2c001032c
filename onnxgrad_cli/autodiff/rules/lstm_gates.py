"""An LSTM that hands out its gates: the forward node as one Scan, for a layer whose products are dear.

The operator keeps gates and cell states to itself, so that a gradient must compute two of the forward pass's products
again. A Scan does in the place of the node what the node does, in a little more time, and keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onnxgrad_cli.emission.bodies import scan
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.types import HALVES

TYPICAL_BATCH = 16
"""The samples that count for a batch whose size is unknown."""

DEAR = 250_000
"""The multiplications of a step's recomputed products from which on it is faster to keep the gates."""


class Gates(NamedTuple):
    """What one direction of an LSTM has computed, all of [T, B, H], a step beside its input in natural time.

    Attributes:
        i, o, f, cand: the input, output and forget gates, and the candidate.
        c_before: the cell's state before each step.
        hc: the activation of that after it.
        zi, zo, zf, zg: what the gates and the candidate are activations of; None where it was not kept.
        c: the cell's state after each step, likewise.
    """

    i: Val
    o: Val
    f: Val
    cand: Val
    c_before: Val
    hc: Val
    zi: Val | None = None
    zo: Val | None = None
    zf: Val | None = None
    zg: Val | None = None
    c: Val | None = None


def keeps_gates(op: Op, inputs: Mapping[str, Val | None], hidden: int) -> bool:
    """Whether the gates of a layer with the activations of the standard are to be kept.

    T = 50, B = 16, H = 128: forward and backward take 1.21 of PyTorch's time so, and 1.39 where gates are computed
    again (two threads; one: 1.22 and 1.50). At B = 1, H = 32 it is the other way round: 0.61 and 0.47.
    """
    x = inputs["x"]
    assert x is not None
    if op.training is not None and op.training.forward_stays:
        return False
    if x.dtype in HALVES or inputs["sequence_lens"] is not None or inputs["p"] is not None:
        return False
    batch, size = x.shape[1:]
    batch = batch if isinstance(batch, int) else TYPICAL_BATCH
    size = size if isinstance(size, int) else hidden
    dear = batch * 4 * hidden * (size + hidden) >= DEAR
    return op.variant("gates", ("kept", "recomputed"), "kept" if dear else "recomputed") == "kept"


def keep_gates(op: Op, inputs: Mapping[str, Val | None], hidden: int, backwards: Sequence[bool]) -> list[Gates]:
    """Put Scans in the place of the LSTM node that `op` differentiates; its outputs keep their names and types.

    Args:
        op: writes the gradient of the node.
        inputs: those of the node.
        hidden: H.
        backwards: of each direction, whether it runs from the end.

    Returns:
        What each direction has computed.
    """
    node, graph = op.node, op.graph
    assert node is not None
    forward = Op(graph)
    forward.scope = forward.forward = node.name
    given = {name: v and forward.val(v.name) for name, v in inputs.items()}
    types = {name: graph.types[name] for name in node.output if name}
    found = [_direction(forward, given, hidden, d, len(backwards), reverse) for d, reverse in enumerate(backwards)]
    ys, hs, cs, gates = zip(*found, strict=True)
    joined = zip(node.output, (ys, hs, cs), (1, 0, 0), strict=False)
    forward.rename_all({name: stack(forward, values, axis) for name, values, axis in joined if name})
    graph.types.update(types)
    graph.set_nodes([each for other in graph.nodes for each in (forward.nodes if other is node else [other])])
    return [Gates(*(op.val(v.name) for v in each)) for each in gates]


def of_direction(op: Op, v: Val | None, d: int, directions: int, axis: int = 0) -> Val | None:
    """What belongs to one direction of a value that has them along `axis`."""
    if v is None:
        return None
    return op.squeeze(v, [axis]) if directions == 1 else op.Gather(v, op.const(d), axis=axis)


def stack(op: Op, values: Sequence[Val], axis: int = 0) -> Val:
    """The values of all directions along an axis of their own."""
    parts = [op.unsqueeze(v, [axis]) for v in values]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def _direction(
    op: Op, inputs: Mapping[str, Val | None], hidden: int, d: int, directions: int, reverse: bool
) -> tuple[Val, Val, Val, list[Val]]:
    """Y, Y_h and Y_c of a direction, and what `Gates` has."""
    x = inputs["x"]
    w, r, b, h, c = (of_direction(op, inputs[name], d, directions) for name in ("w", "r", "b", "h", "c"))
    assert x is not None and w is not None and r is not None
    zx, r = x @ op.swap_last(w), op.swap_last(r)
    if b is not None:
        zx = zx + op.sum(op.reshape(b, [2, -1]), [0], keepdims=False)
    first = op.Gather(zx, op.const(0), axis=0)
    zero = op.fill(0.0, op.Slice(first, op.ints([0]), op.ints([hidden]), op.ints([1])))

    def body(op: Op, states: Sequence[Val], steps: Sequence[Val]) -> Any:
        (h, c), (zx,) = states, steps
        zi, zo, zf, zg = op.Split(op.Gemm(h, r, zx), op.ints([hidden] * 4), axis=-1, outputs=4)
        i, o, f, cand = op.Sigmoid(zi), op.Sigmoid(zo), op.Sigmoid(zf), op.Tanh(zg)
        c_after = f * c + i * cand
        hc = op.Tanh(c_after)
        h_after = o * hc
        return [h_after, c_after], [op.Identity(h_after), i, o, f, cand, c, hc]

    (h, c), (y, *gates) = scan(op, body, [h or zero, c or zero], [zx], reverse=reverse)
    return y, h, c, gates
