"""Sums over whole tensors that lose no digits: a float32 sum of millions of elements drifts, so long ones are taken in
two steps."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val

LONG = 128
"""Elements of a sample from which a sum is taken sample by sample first. Measured on 12.8 million float32 values
(onnxruntime 1.31): ReduceMean and ReduceSum are off by 7e-6 in one step and 1e-7 in two, ReduceSumSquare by 7e-4."""


def reduced(op: Op, kind: str, x: Val) -> Val:
    """A scalar: `x` reduced over the axes of each sample first where these are long, then over all that is left."""
    last = "ReduceMean" if kind == "ReduceMean" else "ReduceSum"
    if x.known_shape is not None and x.rank > 1 and _long(x.shape[1:]):
        return _all(op, last, op.reduce(kind, x, range(1, x.rank)))
    return _all(op, kind, x)


def total(op: Op, kind: str, *tensors: Val) -> Val:
    """A scalar: all elements of float tensors reduced by `kind`, ReduceSumSquare or ReduceL1, in their widest type."""
    widest = max((x.dtype for x in tensors), key=(TensorProto.FLOAT, TensorProto.DOUBLE).index)
    parts = [op.cast(reduced(op, kind, x), widest) for x in tensors]
    return parts[0] if len(parts) == 1 else op.Sum(*parts)


def norm(op: Op, *tensors: Val) -> Val:
    """The Euclidean norm of all elements of some float tensors, a scalar in their widest type."""
    return op.Sqrt(total(op, "ReduceSumSquare", *tensors))


def _all(op: Op, kind: str, x: Val) -> Val:
    return x if x.known_shape == () and kind in ("ReduceMean", "ReduceSum") else op.reduce(kind, x, keepdims=False)


def _long(sizes: Sequence[int | str]) -> bool:
    count = 1
    for size in sizes:
        count *= size if isinstance(size, int) else LONG
    return count >= LONG
