"""Replace the forward node of a large LSTM by a Scan that also returns the gates.

The operator LSTM does not return its gates and cell states, so its gradient would have to repeat two matrix products of
the forward pass. A Scan takes a little longer than the LSTM for the same results, but can also return the gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onnxgrad_cli.emission.bodies import scan
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.types import HALVES

TYPICAL_BATCH = 16
"""The assumed number of samples in a batch of unknown size."""

MIN_PRODUCTS_TO_KEEP_GATES = 250_000
"""Smallest number of multiplications per time step, in both matrix products, for which keeping the gates is faster."""


class Gates(NamedTuple):
    """The inner values of one direction of an LSTM, each [T, B, H], with time steps in the order of the input.

    Attributes:
        i, o, f, cand: the input, output and forget gates, and the candidate.
        c_before: the cell state before each step.
        hc: the activation of the cell state after each step.
        zi, zo, zf, zg: the values before the activation of i, o, f and cand; None if they were not kept.
        c: the cell state after each step; None if it was not kept.
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
    """Return True if the forward node of an LSTM should be replaced by Scans that keep the gates.

    The caller ensures that the activations are the default ones. Times of forward and backward relative to PyTorch, for
    50 steps: with 16 samples and 128 units, they are 1.21 if gates are kept, and 1.39 if they are recomputed (two
    threads; with one thread 1.22 and 1.50). With 1 sample and 32 units, recomputing is faster: 0.47 instead of 0.61.

    Args:
        op: the emitter of the node's gradient.
        inputs: the inputs of the node.
        hidden: H, the number of units.
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
    dear = batch * 4 * hidden * (size + hidden) >= MIN_PRODUCTS_TO_KEEP_GATES
    return op.variant("gates", ("kept", "recomputed"), "kept" if dear else "recomputed") == "kept"


def keep_gates(op: Op, inputs: Mapping[str, Val | None], hidden: int, backwards: Sequence[bool]) -> list[Gates]:
    """Replace the LSTM node that is being differentiated by Scans. Its outputs keep their names and types.

    Args:
        op: the emitter of the node's gradient.
        inputs: the inputs of the node.
        hidden: H, the number of units.
        backwards: for each direction, True if it runs from the last time step to the first.

    Returns:
        The inner values of each direction.
    """
    assert op.node is not None
    forward = op.in_place_of_node()
    given = {name: v and forward.val(v.name) for name, v in inputs.items()}
    found = [_direction(forward, given, hidden, d, len(backwards), reverse) for d, reverse in enumerate(backwards)]
    ys, hs, cs, gates = zip(*found, strict=True)
    joined = zip(op.node.output, (ys, hs, cs), (1, 0, 0), strict=False)
    op.replace_node(forward, {name: stack(forward, values, axis) for name, values, axis in joined if name})
    return [Gates(*(op.val(v.name) for v in each)) for each in gates]


def of_direction(op: Op, v: Val | None, d: int, directions: int, axis: int = 0) -> Val | None:
    """Return the part of `v` that belongs to direction `d`. The directions are along `axis`."""
    if v is None:
        return None
    return op.squeeze(v, [axis]) if directions == 1 else op.Gather(v, op.const(d), axis=axis)


def stack(op: Op, values: Sequence[Val], axis: int = 0) -> Val:
    """Stack the values of all directions along a new axis."""
    parts = [op.unsqueeze(v, [axis]) for v in values]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


def _direction(
    op: Op, inputs: Mapping[str, Val | None], hidden: int, d: int, directions: int, reverse: bool
) -> tuple[Val, Val, Val, list[Val]]:
    """Return Y, Y_h and Y_c of a direction, and the values for the first six fields of `Gates`, in order."""
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
