"""Control dependencies: delay a node until given values exist, and prevent runtimes from constant-folding it.

A runtime runs a node as soon as its operands exist, and folds nodes that read only constants when it loads the model.
To delay a node, one of its operands is passed through a Reshape to the shape that it already has, which moves no data.
Zeros are added to that shape. They are computed from the awaited values in a way that no optimizer recognizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val


def zero_after(op: Op, values: Sequence[Val]) -> Val:
    """Return the int64 scalar 0, computed only after all of `values`, which are numeric tensors and may be empty."""
    firsts = [op.Slice(op.Reshape(v, op.ints([-1])), op.ints([0]), op.ints([1])) for v in values]
    bits = [op.cast(first, TensorProto.BOOL) for first in firsts]
    first = op.Concat(*bits, axis=0) if len(bits) > 1 else bits[0]
    never = op.And(first, op.const(np.array(False)))
    return op.sum(op.cast(never, TensorProto.INT64), keepdims=False)
