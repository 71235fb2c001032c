"""onnx.reference as a second executor, with the operators in which it departs from the standard put right.

Written from the operators' pages alone; none of it shares code with the rules.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


class Erf(OpRun):  # onnx.reference computes Erf in float32 whatever its input is
    """Erf in the type of its input."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x), x.dtype),)


class Gelu(OpRun):  # onnx.reference takes its erf in float32
    """Gelu in the type of its input."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        wide = np.asarray(x, np.float64)
        if approximate == "tanh":
            inner = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        else:
            inner = np.vectorize(math.erf, otypes=[np.float64])(wide / math.sqrt(2))
        return (np.asarray(0.5 * wide * (1 + inner), x.dtype),)


class Mean(OpRun):  # onnx.reference adds in place, so its Mean does not broadcast
    """The mean of all inputs, broadcast."""

    op_domain = ""

    def _run(self, *xs: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(sum(xs) / len(xs), xs[0].dtype),)


class ConvTranspose(OpRun):  # onnx.reference cuts the weights of groups along the wrong axis
    """The transposed convolution, one kernel tap at a time."""

    op_domain = ""

    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, *, auto_pad: str | None = None,
        dilations: Any = None, group: int = 1, kernel_shape: Any = None, output_padding: Any = None,
        output_shape: Any = None, pads: Any = None, strides: Any = None,
    ) -> tuple[np.ndarray]:  # fmt: skip
        sizes, kernel = np.array(x.shape[2:]), w.shape[2:]
        ones = np.ones_like(sizes)
        step, spread = (ones if given is None else np.array(given) for given in (strides, dilations))
        full = (sizes - 1) * step + (np.array(kernel) - 1) * spread + 1
        wide = full if output_padding is None else full + output_padding
        begin, end = np.array(pads if pads else [0] * 2 * len(sizes)).reshape(2, -1)
        out = wide - begin - end
        if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            out = np.array(output_shape)[-len(sizes) :] if output_shape else sizes * step
            total = np.maximum(wide - out, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        xs = x.reshape(x.shape[0], group, -1, *sizes)
        ws = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((x.shape[0], group, w.shape[1], *np.maximum(full, begin + out)), x.dtype)
        for tap in np.ndindex(*kernel):
            starts = np.array(tap) * spread
            reach = [slice(t, t + (n - 1) * s + 1, s) for t, n, s in zip(starts, sizes, step, strict=True)]
            y[:, :, :, *reach] += np.einsum("ngc...,gcm->ngm...", xs, ws[:, :, :, *tap])
        y = y[:, :, :, *(slice(at, at + n) for at, n in zip(begin, out, strict=True))]
        y = y.reshape(x.shape[0], -1, *out)
        return (y if b is None else y + b.reshape(-1, *ones),)


class Pad(OpRun):  # onnx.reference knows no negative pads
    """Padding, or where a pad is negative cropping."""

    op_domain = ""

    def _run(
        self, x: np.ndarray, pads: np.ndarray, value: Any = None, axes: Any = None, mode: str = "constant"
    ) -> tuple[np.ndarray]:
        both = np.zeros((x.ndim, 2), np.int64)
        both[slice(None) if axes is None else axes] = np.reshape(pads, (2, -1)).T
        more = {"constant_values": 0 if value is None else np.asarray(value).item()} if mode == "constant" else {}
        grown = np.pad(x, np.maximum(both, 0), mode=mode, **more)  # type: ignore[call-overload]
        inner = zip(np.minimum(both, 0), grown.shape, strict=True)
        return (grown[tuple(slice(-begin, size + end) for (begin, end), size in inner)],)


def evaluator(model: ModelProto) -> ReferenceEvaluator:
    """onnx's reference evaluator for a model."""
    return ReferenceEvaluator(model, new_ops=[Erf, Gelu, Mean, ConvTranspose, Pad])
