"""Control dependencies: what keeps a node from running before some values exist, and from being computed in advance.

A runtime runs a node as soon as it has its operands, and computes one that reads constants alone when it loads the
model. So an operand goes through a Reshape to the shape that it has, which moves no data: zeros are added to the shape,
or are it, that are computed from the values that are waited for, in a way that no optimizer sees through.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val


def zero_after(op: Op, values: Sequence[Val]) -> Val:
    """The int64 scalar 0, which exists only after all of `values` do: tensors of numbers, empty ones perhaps."""
    firsts = [op.Slice(op.Reshape(v, op.ints([-1])), op.ints([0]), op.ints([1])) for v in values]
    bits = [op.cast(first, TensorProto.BOOL) for first in firsts]
    first = op.Concat(*bits, axis=0) if len(bits) > 1 else bits[0]
    never = op.And(first, op.const(np.array(False)))
    return op.sum(op.cast(never, TensorProto.INT64), keepdims=False)
