"""onnx.reference as a second executor, with corrected versions of its operators that depart from the standard.

The corrected versions follow the operators' pages in the standard, and share no code with onnxgrad's rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_batch_normalization import BatchNormalization_14
from onnx.reference.ops.op_conv import Conv as _Conv
from onnx.reference.ops.op_loop import Loop as _Loop
from onnx.reference.ops.op_resize import Resize as _Resize
from onnx.reference.ops.op_scan import Scan as _Scan

from onnxgrad_cli.ir.node import refill


def erf(x: np.ndarray) -> np.ndarray:
    """Return the error function of float64 numbers, with an error of at most 2 units in the last place of 1.

    It is evaluated with a Taylor series of five terms around the nearest of 6,145 table points. The derivatives are
    Hermite polynomials (Abramowitz and Stegun, 7.1.19). `math.erf` takes only single numbers and is five times as slow.
    """
    result = np.empty(x.size)
    for start in range(0, x.size, 8192):
        part = np.ravel(x)[start : start + 8192]
        far = np.minimum(np.abs(part), ERF_END)  # nan stays nan
        at = np.nan_to_num(np.rint(far * ERF_POINTS)).astype(np.intp)
        away = far - at / ERF_POINTS
        terms = _erf_terms()
        total = terms[-1][at]
        for term in terms[-2::-1]:
            total = total * away + term[at]
        result[start : start + 8192] = np.copysign(total, part)
    return result.reshape(x.shape)


ERF_END, ERF_POINTS = 6, 1024
"""The number from which erf is 1 in float64, and the number of table points per unit below it."""


@cache
def _erf_terms() -> list[np.ndarray]:
    """Return the Taylor coefficients of erf at all table points, one array per power."""
    x = np.arange(ERF_END * ERF_POINTS + 1) / ERF_POINTS
    slope = 2 / math.sqrt(math.pi) * np.exp(-x * x)
    hermite = [np.ones_like(x), 2 * x, 4 * x**2 - 2, 8 * x**3 - 12 * x]
    terms = [(-1) ** n * h * slope / math.factorial(n + 1) for n, h in enumerate(hermite)]
    return [np.array([math.erf(each) for each in x]), *terms]


class Erf(OpRun):  # onnx.reference always computes Erf in float32
    """Erf in the type of its input."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(erf(np.asarray(x, np.float64)), x.dtype),)


class Gelu(OpRun):  # onnx.reference computes its erf in float32
    """Gelu in the type of its input."""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        wide = np.asarray(x, np.float64)
        if approximate == "tanh":
            inner = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        else:
            inner = erf(wide / math.sqrt(2))
        return (np.asarray(0.5 * wide * (1 + inner), x.dtype),)


class DynamicQuantizeLinear(OpRun):  # onnx.reference rounds the scale to float32
    """Quantization to unsigned 8-bit integers, with a scale in the type of the input."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        least, most = min(0.0, x.min()), max(0.0, x.max())
        scale = (most - least) / 255 or 1.0
        zero = np.clip(np.rint(-least / scale), 0, 255)
        steps = np.clip(np.rint(x / scale) + zero, 0, 255)
        return steps.astype(np.uint8), np.asarray(scale, x.dtype), np.asarray(zero, np.uint8)


class Mean(OpRun):  # onnx.reference adds in place, so its Mean does not broadcast
    """The mean of all inputs, broadcast."""

    def _run(self, *xs: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(sum(xs) / len(xs), xs[0].dtype),)


class BatchNormalization(BatchNormalization_14):  # onnx.reference mixes batch statistics in before opset 14
    """Normalization as in opset 14, for models of older opsets too."""


class Conv(_Conv):  # onnx.reference takes four times as long if each channel has one kernel of its own
    """The convolution. A depthwise convolution is computed one kernel tap at a time."""

    def _run(  # type: ignore[override]
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **attributes: Any
    ) -> Any:
        if w.shape[:2] != (attributes["group"], 1):
            return super()._run(x, w, b, **attributes)  # type: ignore[no-untyped-call]
        sizes, step, spread, reach, begin, end = _windows(x, w.shape[2:], **attributes)
        wide = np.pad(x, [(0, 0), (0, 0), *zip(begin, end, strict=True)])
        out, column = (sizes + begin + end - reach) // step + 1, (-1, *[1] * len(sizes))
        y = sum(
            w[:, 0, *tap].reshape(column) * wide[:, :, *_taken(tap, spread, out, step)]
            for tap in np.ndindex(*w.shape[2:])
        )
        return (y if b is None else y + b.reshape(column),)


def _windows(
    x: np.ndarray, kernel: Sequence[int], *, auto_pad: str | None = None, dilations: Any = None, pads: Any = None,
    strides: Any = None, **_: Any,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Return six arrays with one entry per spatial axis: size, stride, dilation, reach, begin pad and end pad.

    The reach is the distance from the first to the last element of a window, plus 1.
    """
    sizes, ones = np.array(x.shape[2:]), np.ones(x.ndim - 2, np.int64)
    step, spread = (ones if given is None else np.array(given) for given in (strides, dilations))
    reach = (np.array(kernel) - 1) * spread + 1
    begin, end = np.array(pads or [0] * 2 * len(sizes)).reshape(2, -1)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        total = np.maximum((-(-sizes // step) - 1) * step + reach - sizes, 0)
        begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        end = total - begin
    return sizes, step, spread, reach, begin, end


def _taken(tap: Sequence[int], spread: np.ndarray, counts: np.ndarray, step: np.ndarray) -> tuple[slice, ...]:
    """Return the slices of an image that one kernel tap multiplies, with `counts` positions of the kernel per axis."""
    starts = zip(np.array(tap) * spread, counts, step, strict=True)
    return tuple(slice(t, t + (n - 1) * s + 1, s) for t, n, s in starts)


class ConvTranspose(OpRun):  # onnx.reference cuts the weights of groups along the wrong axis
    """The transposed convolution, one kernel tap at a time."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, *, auto_pad: str | None = None,
        group: int = 1, output_padding: Any = None, output_shape: Any = None, **attributes: Any,
    ) -> tuple[np.ndarray]:  # fmt: skip
        kernel = w.shape[2:]
        sizes, step, spread, reach, begin, end = _windows(x, kernel, **attributes)
        full = (sizes - 1) * step + reach
        wide = full if output_padding is None else full + output_padding
        out = wide - begin - end
        if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            out = np.array(output_shape)[-len(sizes) :] if output_shape else sizes * step
            total = np.maximum(wide - out, 0)
            begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        xs = x.reshape(x.shape[0], group, -1, *sizes)
        ws = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((x.shape[0], group, w.shape[1], *np.maximum(full, begin + out)), x.dtype)
        for tap in np.ndindex(*kernel):
            y[:, :, :, *_taken(tap, spread, sizes, step)] += np.einsum("ngc...,gcm->ngm...", xs, ws[:, :, :, *tap])
        y = y[:, :, :, *(slice(at, at + n) for at, n in zip(begin, out, strict=True))]
        y = y.reshape(x.shape[0], -1, *out)
        return (y if b is None else y + b.reshape(-1, *[1] * len(sizes)),)


class Pad(OpRun):  # onnx.reference lacks negative pads
    """Padding, or cropping where a pad is negative."""

    def _run(
        self, x: np.ndarray, pads: np.ndarray, value: Any = None, axes: Any = None, mode: str = "constant"
    ) -> tuple[np.ndarray]:
        both = np.zeros((x.ndim, 2), np.int64)
        both[slice(None) if axes is None else axes] = np.reshape(pads, (2, -1)).T
        more = {"constant_values": 0 if value is None else np.asarray(value).item()} if mode == "constant" else {}
        grown = np.pad(x, np.maximum(both, 0), mode=mode, **more)  # type: ignore[call-overload]
        inner = zip(np.minimum(both, 0), grown.shape, strict=True)
        return (grown[tuple(slice(-begin, size + end) for (begin, end), size in inner)],)


class LpPool(OpRun):  # onnx.reference is wrong for windows beyond the end
    """The norm of each window. Windows that extend beyond the end of the image are cut off there."""

    def _run(self, x: np.ndarray, *, p: int = 2, **attributes: Any) -> tuple[np.ndarray]:
        total, _, _ = _sums(np.abs(x) ** p, **attributes)
        return (np.asarray(total ** (1 / p), x.dtype),)


class AveragePool(OpRun):  # onnx.reference takes seconds where this takes milliseconds, and is wrong as in LpPool
    """The average of each window. Entries in the padding count only if `count_include_pad` is set."""

    def _run(self, x: np.ndarray, *, count_include_pad: int | None = 0, **attributes: Any) -> tuple[np.ndarray]:
        total, inside, padded = _sums(x, **attributes)
        return (np.asarray(total / (padded if count_include_pad else inside), x.dtype),)


def _sums(
    x: np.ndarray, *, kernel_shape: Sequence[int], ceil_mode: int | None = 0, **attributes: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each window: the sum, the number of entries in the image, and the number in the padded image."""
    sizes, step, spread, reach, begin, end = _windows(x, kernel_shape, **attributes)
    room = sizes + begin + end - reach
    out = (-(-room // step) if ceil_mode else room // step) + 1
    out -= (out - 1) * step >= sizes + begin
    beyond = np.maximum((out - 1) * step - room, 0)

    def summed(image: np.ndarray, padding: float = 0.0) -> np.ndarray:
        wide = np.pad(image, [(0, 0), (0, 0), *zip(begin, end, strict=True)], constant_values=padding)
        wide = np.pad(wide, [(0, 0), (0, 0), *((0, more) for more in beyond)])
        return np.asarray(sum(wide[:, :, *_taken(tap, spread, out, step)] for tap in np.ndindex(*kernel_shape)))

    ones = np.ones((1, 1, *sizes))
    return summed(x), summed(ones), summed(ones, 1.0)


class LRN(OpRun):  # onnx.reference sums over N channels, where N is the number of samples, and accepts only images
    """Local response normalization."""

    def _run(
        self, x: np.ndarray, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int = 1
    ) -> tuple[np.ndarray]:
        before, after = (size - 1) // 2, size // 2
        padded = np.pad(np.square(x), [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        total = sum(padded[:, i : i + x.shape[1]] for i in range(size))
        return (np.asarray(x / (bias + alpha / size * total) ** beta, x.dtype),)


class GlobalMaxPool(OpRun):  # onnx.reference always takes the maximum over two axes
    """The maximum over all spatial axes."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(OpRun):  # onnx.reference does not implement it
    """The norm over all spatial axes."""

    def _run(self, x: np.ndarray, *, p: int = 2) -> tuple[np.ndarray]:
        return (np.asarray((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p), x.dtype),)


class Resize(_Resize):  # onnx.reference computes cubic weights in float32, the type of its attribute
    """Resize with interpolation weights computed in float64."""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        attributes["cubic_coeff_a"] = float(attributes["cubic_coeff_a"])
        return super()._run(*inputs, **attributes)


class _Recurrent(OpRun):  # onnx.reference lacks sequence_lens, clip, and most activations and parameters
    """A recurrent layer as a loop over time, from the equations in the standard. It clips where onnxruntime clips."""

    functions: tuple[str, ...] = ()
    _step: Callable[..., tuple[Any, Any]]

    def _run(
        self, x: np.ndarray, w: np.ndarray, r: np.ndarray, b: np.ndarray | None = None, lengths: Any = None,
        initial_h: Any = None, initial_c: Any = None, p: Any = None, *, activations: Any = None,
        activation_alpha: Any = None, activation_beta: Any = None, clip: float | None = None,
        direction: str = "forward", hidden_size: int | None = None, layout: int | None = 0, **options: Any,
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        time_first = (0, 1, 2) if not layout else (1, 0, 2)
        x = x.transpose(time_first)
        (steps, batch, _), (directions, _, units) = x.shape, r.shape
        zeros = np.zeros((directions, batch, units), x.dtype)
        hs, cs = (zeros if v is None else v.transpose(time_first) for v in (initial_h, initial_c))
        y, y_h, y_c = np.zeros((steps, directions, batch, units), x.dtype), zeros.copy(), zeros.copy()
        lengths = np.full(batch, steps) if lengths is None else lengths
        names = list(activations or self.functions * directions)[: len(self.functions) * directions]
        functions = _activations(names, activation_alpha, activation_beta)
        for d in range(directions):
            wb, rb = np.split(np.zeros(2 * w.shape[1], x.dtype) if b is None else b[d], 2)
            weights = w[d], r[d], wb, rb, np.zeros(3 * units, x.dtype) if p is None else p[d]
            own = functions[d * len(self.functions) : (d + 1) * len(self.functions)]
            own[:2] = [_clipped(function, clip) for function in own[:2]]  # not the activation h of an LSTM
            h, c = hs[d], cs[d]
            for t in reversed(range(steps)) if direction == "reverse" or d == 1 else range(steps):
                live = (t < lengths)[:, None]
                h_next, c_next = self._step(x[t], h, c, *weights, *own, **options)
                h, c = np.where(live, h_next, h), np.where(live, c_next, c)
                y[t, d] = np.where(live, h, 0)
            some = (lengths > 0)[:, None]
            y_h[d], y_c[d] = np.where(some, h, 0), np.where(some, c, 0)
        y = y if not layout else y.transpose(2, 0, 1, 3)
        results = (y, y_h.transpose(time_first), y_c.transpose(time_first))
        return results[: len(self.onnx_node.output)]


def _clipped(function: Callable[[Any], Any], clip: float | None) -> Callable[[Any], Any]:
    return function if clip is None else lambda x: function(np.clip(x, -clip, clip))


_ACTIVATIONS: dict[str, tuple[Callable[..., Any], tuple[float | None, ...]]] = {
    "sigmoid": (lambda x: 0.5 * (1 + np.tanh(x / 2)), ()),
    "tanh": (np.tanh, ()),
    "relu": (lambda x: np.maximum(x, 0), ()),
    "softsign": (lambda x: x / (1 + np.abs(x)), ()),
    "softplus": (lambda x: np.logaddexp(0, x), ()),
    "leakyrelu": (lambda a, x: np.where(x >= 0, x, a * x), (0.01,)),
    "thresholdedrelu": (lambda a, x: np.where(x >= a, x, 0), (1.0,)),
    "elu": (lambda a, x: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), (1.0,)),
    "affine": (lambda a, b, x: a * x + b, (None, None)),
    "scaledtanh": (lambda a, b, x: a * np.tanh(b * x), (None, None)),
    "hardsigmoid": (lambda a, b, x: np.clip(a * x + b, 0, 1), (0.2, 0.5)),
}
"""Activation -> (the function, the default values of alpha and beta)."""


def _activations(names: Sequence[str], *given: Any) -> list[Callable[[Any], Any]]:
    """Return the activations of a layer.

    `given` are the lists of alpha and beta. An activation takes the next parameters from them, or its defaults.
    """
    left = [iter(values or ()) for values in given]
    made: list[Callable[[Any], Any]] = []
    for name in names:
        function, defaults = _ACTIVATIONS[name.lower()]
        parameters = [next(values, default) for values, default in zip(left, defaults, strict=False)]
        made.append(partial(function, *parameters))
    return made


class RNN(_Recurrent):
    """Ht = f(Xt Wi' + Ht-1 Ri' + Wbi + Rbi)."""

    functions = ("Tanh",)

    def _step(self, x: Any, h: Any, c: Any, w: Any, r: Any, wb: Any, rb: Any, p: Any, *functions: Any) -> Any:
        return functions[0](x @ w.T + h @ r.T + wb + rb), c


class GRU(_Recurrent):
    """Ht = (1 - zt) ht + zt Ht-1 with the update gate z, the reset gate r and the candidate h."""

    functions = ("Sigmoid", "Tanh")

    def _step(
        self, x: Any, h: Any, c: Any, w: Any, r: Any, wb: Any, rb: Any, p: Any, *functions: Any,
        linear_before_reset: int = 0,
    ) -> Any:  # fmt: skip
        f, g = functions
        (wz, wr, wh), (rz, rr, rh) = np.split(w, 3), np.split(r, 3)
        (wbz, wbr, wbh), (rbz, rbr, rbh) = np.split(wb, 3), np.split(rb, 3)
        update = f(x @ wz.T + h @ rz.T + wbz + rbz)
        reset = f(x @ wr.T + h @ rr.T + wbr + rbr)
        inner = reset * (h @ rh.T + rbh) if linear_before_reset else (reset * h) @ rh.T + rbh
        return (1 - update) * g(x @ wh.T + inner + wbh) + update * h, c


class LSTM(_Recurrent):
    """Ht = ot h(Ct), Ct = ft Ct-1 + it ct. The argument of the activation h is not clipped."""

    functions = ("Sigmoid", "Tanh", "Tanh")

    def _step(
        self, x: Any, h: Any, c: Any, w: Any, r: Any, wb: Any, rb: Any, p: Any, *functions: Any, input_forget: int = 0
    ) -> Any:
        f, g, outer = functions
        i, o, forget, cell = np.split(x @ w.T + h @ r.T + wb + rb, 4, -1)
        pi, po, pf = np.split(p, 3)
        i = f(i + pi * c)
        c = (1 - i if input_forget else f(forget + pf * c)) * c + i * g(cell)
        return f(o + po * c) * outer(c), c


class Loop(_Loop):  # onnx.reference treats an absent condition as false, and concatenates outputs instead of stacking
    """Loop, which also accepts an omitted condition and scan outputs of any rank."""

    def _run(  # type: ignore[override]
        self, count: Any, condition: Any, *states: Any, context: Any = None, **keywords: Any
    ) -> tuple[Any, ...]:
        run: Callable[..., list[Any]] = self._run_body  # type: ignore[attr-defined]
        names, rows = keywords.pop("body").input_names, list[list[Any]]()
        going, held = condition is None or bool(condition), list(states)
        while going and (count is None or len(rows) < count):
            values = [np.array(len(rows), np.int64), np.array(going), *held]
            going, *results = run({**(context or {}), **dict(zip(names, values, strict=True))}, **keywords)
            held, collected = results[: len(held)], results[len(held) :]
            rows.append(collected)
        empty = len(self.onnx_node.output) - len(held)
        return *held, *(map(np.stack, zip(*rows, strict=True)) if rows else [np.zeros(0)] * empty)


class Scan(_Scan):  # onnx.reference walks forward along the first axis only
    """Scan in either direction and along any axis."""

    def __init__(self, node: NodeProto, parameters: dict[str, Any]) -> None:
        plain = deepcopy(node)
        self.ways = {a.name: list(a.ints) for a in node.attribute if a.name.startswith("scan_")}
        refill(plain.attribute, (a for a in node.attribute if a.name not in self.ways))
        super().__init__(plain, parameters)  # type: ignore[no-untyped-call]

    def _run(self, *inputs: Any, **keywords: Any) -> tuple[np.ndarray, ...]:
        states = len(inputs) - self.num_scan_inputs  # type: ignore[attr-defined]
        scanned = [self._way("input", k, x) for k, x in enumerate(inputs[states:])]
        found = super()._run(*inputs[:states], *scanned, **keywords)  # type: ignore[no-untyped-call]
        return (*found[:states], *(self._way("output", k, x, True) for k, x in enumerate(found[states:])))

    def _way(self, kind: str, position: int, x: np.ndarray, back: bool = False) -> np.ndarray:
        axis, direction = (
            (self.ways.get(f"scan_{kind}_{name}") or [0] * (position + 1))[position] for name in ("axes", "directions")
        )
        x = np.flip(x, 0) if back and direction else x
        x = np.moveaxis(x, 0, axis) if back else np.moveaxis(x, axis, 0)
        return np.flip(x, 0) if direction and not back else x


def _sampled(x: np.ndarray, at: np.ndarray, mode: str, padding: str, corners: bool) -> np.ndarray:
    """Interpolate `x`, [C, *sizes], at the positions `at`, [axes, *outputs], and return [C, *outputs].

    Positions are counted in elements of `x`.
    """
    total: Any = np.zeros((x.shape[0], *at.shape[1:]))
    near = np.rint(at) if mode == "nearest" else np.floor(at)
    for steps in itertools.product({"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}[mode], repeat=len(at)):
        weight, where = np.ones(at.shape[1:]), []
        for size, position, first, step in zip(x.shape[1:], at, near, steps, strict=True):
            place, d = first + step, np.abs(position - first - step)
            if mode == "linear":
                weight = weight * (1 - d)
            elif mode == "cubic":
                inner, outer = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
                weight = weight * np.where(d <= 1, inner, outer)
            low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
            while padding == "reflection" and low < high and ((place < low) | (place > high)).any():
                place = np.where(place < low, 2 * low - place, place)
                place = np.where(place > high, 2 * high - place, place)
            if padding == "zeros":
                weight = weight * ((place >= 0) & (place < size))
            where.append(np.clip(place, 0, size - 1).astype(np.int64))
        total = total + weight * x[:, *where]
    return np.asarray(total)


class GridSample(OpRun):  # onnx.reference has float32 positions, lacks modes of opset 16, clamps positions of cubic
    """GridSample, with positions in float64."""

    def _run(
        self, x: np.ndarray, grid: np.ndarray, *, align_corners: int = 0, mode: str | None = None,
        padding_mode: str | None = None,
    ) -> tuple[np.ndarray]:  # fmt: skip
        sizes = np.array(x.shape[2:]).reshape(-1, *(1,) * (x.ndim - 2))
        at = np.moveaxis(grid[..., ::-1].astype(np.float64), -1, 1) + 1
        at = at / 2 * (sizes - 1) if align_corners else (at * sizes - 1) / 2
        how = ((mode or "linear").removeprefix("bi"), padding_mode or "zeros", bool(align_corners))
        return (np.stack([_sampled(image, where, *how) for image, where in zip(x, at, strict=True)]).astype(x.dtype),)


class DeformConv(OpRun):  # onnx.reference takes positions in float32 and fails on images of one row
    """Deformable convolution in float64 and of any rank, computed for one tap and one group of offsets at a time."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, offset: np.ndarray, b: np.ndarray | None = None,
        mask: np.ndarray | None = None, *, dilations: Any = None, group: int = 1, kernel_shape: Any = None,
        offset_group: int = 1, pads: Any = None, strides: Any = None,
    ) -> tuple[np.ndarray]:  # fmt: skip
        kernel, out, n = w.shape[2:], offset.shape[2:], x.ndim - 2
        column = (n, *(1,) * n)
        step, spread = (np.reshape(given if given else [1] * n, column) for given in (strides, dilations))
        begin = np.reshape(pads[:n] if pads else [0] * n, column)
        moves = offset.reshape(len(x), offset_group, *kernel, n, *out)
        share = np.ones((len(x), offset_group, *kernel, *out)) if mask is None else mask
        share = share.reshape(len(x), offset_group, *kernel, *out)
        images = x.reshape(len(x), offset_group, -1, *x.shape[2:])
        y = np.zeros((len(x), w.shape[0], *out))
        for tap in np.ndindex(*kernel):
            home = np.indices(out) * step + np.reshape(tap, column) * spread - begin
            taken = np.zeros((len(x), offset_group, images.shape[2], *out))
            for image, part in np.ndindex(len(x), offset_group):
                at = home + moves[image, part, *tap]
                taken[image, part] = _sampled(images[image, part], at, "linear", "zeros", False)
                taken[image, part] *= share[image, part, *tap]
            grouped = taken.reshape(len(x), group, -1, *out)
            weights = w[:, :, *tap].reshape(group, -1, w.shape[1])
            y += np.einsum("ngc...,gmc->ngm...", grouped, weights).reshape(y.shape)
        return ((y if b is None else y + b.reshape(-1, *(1,) * n)).astype(x.dtype),)


class GatherElements(OpRun):  # onnx.reference fails on axes of more than 32 elements, and if other axes are shorter
    """Elements of a tensor, each at its own index along one axis."""

    def _run(self, x: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        reach = (slice(None) if i == axis % x.ndim else slice(n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(x[tuple(reach)], indices, axis),)


class MaxRoiPool(OpRun):  # onnx.reference does not implement it
    """The largest element of each bin of each box, or 0 for an empty bin."""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
    ) -> tuple[np.ndarray]:
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for box, (image, *bounds) in enumerate(rois):
            left, top, right, bottom = (int(np.copysign(np.floor(abs(v) + 0.5), v)) for v in np.multiply(
                bounds, spatial_scale))  # fmt: skip
            tall, wide = (max(size, 1) / bins for size, bins in zip(
                (bottom - top + 1, right - left + 1), pooled_shape, strict=True))  # fmt: skip
            for i, j in np.ndindex(*pooled_shape):
                rows = slice(max(math.floor(i * tall) + top, 0), max(math.ceil((i + 1) * tall) + top, 0))
                columns = slice(max(math.floor(j * wide) + left, 0), max(math.ceil((j + 1) * wide) + left, 0))
                held = x[int(image), :, rows, columns]
                y[box, :, i, j] = held.max((1, 2)) if held.size else 0
        return (y,)


def evaluator(model: ModelProto, ops: Sequence[type[OpRun]] = ()) -> ReferenceEvaluator:
    """Return onnx's reference evaluator for a model, with the corrected operators and those in `ops`."""
    return ReferenceEvaluator(model, new_ops=[
        *ops,
        DynamicQuantizeLinear, Erf, Gelu, Mean, BatchNormalization, Conv, ConvTranspose, LpPool, AveragePool, LRN,
        GlobalMaxPool, GlobalLpPool, Pad, Resize, RNN, GRU, LSTM, Loop, Scan, GridSample, DeformConv, GatherElements,
        MaxRoiPool,
    ])  # fmt: skip
