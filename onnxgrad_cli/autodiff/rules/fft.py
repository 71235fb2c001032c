"""Rules of Fourier transforms. They are linear, and their adjoint is a Fourier transform too.

The last axis holds the real and the imaginary part of a complex number. For real inputs it may have a single element.
The matrix F of the transform is symmetric, so its adjoint maps g to conj(F conj(g)). Only forward transforms are
emitted, because onnxruntime scales the inverse transform by a float32 number even in float64.
Sources: the operators' pages; A. V. Oppenheim and R. W. Schafer, Discrete-Time Signal Processing, chapter 8.
"""

from __future__ import annotations

import math

from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import no_gradient, rule
from onnxgrad_cli.autodiff.rules.reduce import around
from onnxgrad_cli.autodiff.rules.scatter_add import added
from onnxgrad_cli.autodiff.rules.windows import along

MATRIX = 2048
"""Largest length of a transform that is computed by a matrix product, unless the length is a power of two.

In float32, the error of onnxruntime's DFT is 6e-6 at length 25, 9e-5 at 400 and 6e-4 at 2,000. The error of the matrix
product is 3e-7. The product is 70 times as fast as the DFT at length 25, 3 times as fast at 400, equally fast at 1,000,
and half as fast at 2,000.
"""

no_gradient("HannWindow HammingWindow BlackmanWindow")
no_gradient("MelWeightMatrix")  # its edges are rounded to bins


@rule("DFT", versions=(17, 19))
def dft_17(op, g, y, x, length, *, axis, inverse, onesided):
    return _through(op, g, y, x, length, axis % x.rank, inverse, onesided), None


@rule("DFT", versions=(20, None))
def dft(op, g, y, x, length, axis, *, inverse, onesided):
    if axis is None or axis.const is not None:
        axis = -2 if axis is None else int(axis.const.reshape(-1)[0])
        return _through(op, g, y, x, length, axis % x.rank, inverse, onesided), None, None
    before, _, after = around(op, x, axis, x.rank - 1)
    g, y, flat = (op.reshape(v, [before, -1, after, op.size(v, -1)]) for v in (g, y, x))
    return op.reshape_like(_through(op, g, y, flat, length, 1, inverse, onesided), x), None, None


def _through(op, g, y, x, length, axis, inverse, onesided):
    if inverse and onesided:
        return _through_hermitian(op, g, y, x, length, axis)
    if inverse:
        result = op.per(_dft(op, g, axis, x), y, [axis])
    else:
        size = op.size(x, axis) if length is None else _known(op, length)
        result = _dft(op, _fitted(op, g, size, axis) if onesided else g, axis, x, adjoint=True)
    return op.state(result if length is None else _fitted(op, result, op.size(x, axis), axis), x.shape)


def _through_hermitian(op, g, y, x, length, axis):
    """Return the cotangent of x for an inverse one-sided transform.

    Each bin also stands for its mirrored bin, so it counts twice. The first bin, and for an even length the last bin,
    count once.
    """
    bins, size = x.shape[axis], y.shape[axis]
    if length is not None and not (isinstance(bins, int) and isinstance(size, int) and bins == size // 2 + 1):
        return op.no(
            "onnxruntime's inverse one-sided transform to a length of N is correct only for N // 2 + 1 bins",
            "give the node N // 2 + 1 bins, and make its sizes static with `dims` or `shapes`",
        )
    result = _dft(op, g, axis, x, onesided=1)
    bin_ = op.steps(op.size(x, axis), axis, x.rank)
    once = op.Or(op.Equal(bin_, op.const(0)), op.Equal(2 * bin_, op.dim(y, axis)))
    times = op.per(op.Where(once, op.const(1.0, g), op.const(2.0, g)), y, [axis])
    return op.state(result * times, x.shape)


@rule("STFT")
def stft(op, g, y, signal, step, window, length, *, onesided):
    """For dX, apply the adjoint transform to each frame of G, multiply by the window, and add up overlapping frames."""
    size = _known(op, length) if length is not None else op.size(*((signal, 1) if window is None else (window, 0)))
    framed = _dft(op, _fitted(op, g, size, 2) if onesided else g, 2, signal, adjoint=True)
    starts = op.steps(op.size(g, 1), 0, 2) * op.cast(step, TensorProto.INT64)
    places = starts + op.steps(size, 1, 2)
    gwindow = None
    if op.wants(window):
        gwindow = op.sum(framed * op.Gather(signal, places, axis=1), [0, 1, 3], keepdims=False)
    if window is not None:
        framed = framed * op.unsqueeze(window, [1])
    flat = op.reshape(framed, [op.size(signal, 0), -1, op.size(signal, 2)])
    rows = op.Expand(op.reshape(places, [1, -1, 1]), op.shape(flat))
    return added(op, op.fill(0.0, signal), rows, flat, axis=1), None, gwindow, None


def _known(op, scalar):
    """Return a scalar input as an int if it is constant, otherwise as a vector of one element."""
    if scalar.const is not None:
        return int(scalar.const.reshape(-1)[0])
    return op.cast(op.reshape(scalar, [1]), TensorProto.INT64)


def _dft(op, x, axis, like, onesided=0, adjoint=False):
    """Return the discrete Fourier transform along `axis`, or its adjoint. If `like` is real, return the real part.

    The DFT is emitted without the input dft_length. If that input were not constant, onnx would infer the shape of `x`
    for the result, which is wrong.
    """
    size = x.shape[axis]
    if isinstance(size, int) and 0 < size <= MATRIX and size & (size - 1):
        return _by_matrix(op, x, axis, size // 2 + 1 if onesided else size, like, adjoint)
    conjugate = op.const([1.0, -1.0], x)
    x = x * conjugate if adjoint else x
    if op.opset < 20:
        result = op.DFT(x, axis=axis, onesided=onesided)
    else:
        result = op.DFT(x, None, op.const(axis), onesided=onesided)
    result = _fitted(op, result, op.size(like, -1), result.rank - 1)
    return result * _fitted(op, conjugate, op.size(like, -1), 0) if adjoint and like.shape[-1] != 1 else result


def _by_matrix(op, x, axis, bins, like, adjoint):
    """Compute the transform by products with a matrix of cosines, C, and a matrix of sines, S.

    The real part is C re + S im, the imaginary part is C im - S re. The adjoint has the opposite angles.
    """
    size = x.shape[axis]
    turns = op.Mod(op.steps(bins, 0, 2) * op.steps(size, 1, 2), op.const(size))
    angles = op.cast(turns, x) * ((-2 if adjoint else 2) * math.pi / size)
    cos, sin = op.Cos(angles), op.Sin(angles)
    real, *imaginary = (op.squeeze(part, [-1]) for part in op.split(x, [1] * x.shape[-1], -1))
    parts = [along(op, real, axis, cos)]
    if like.shape[-1] != 1:
        parts.append(-along(op, real, axis, sin))
    for part in imaginary:
        parts[0] = parts[0] + along(op, part, axis, sin)
        parts[1:] = [each + along(op, part, axis, cos) for each in parts[1:]]
    joined = op.Concat(*(op.unsqueeze(part, [-1]) for part in parts), axis=-1)
    return _fitted(op, joined, op.size(like, -1), joined.rank - 1)


def _fitted(op, z, size, axis):
    """Cut `z` to `size` along `axis`, or pad it to `size` with zeros at the end."""
    missing = size - op.size(z, axis)
    if isinstance(missing, int) and missing <= 0:
        return op.Slice(z, op.ints([0]), op.ints([size]), op.ints([axis])) if missing else z
    return op.Pad(z, op.vector([*[0] * z.rank, *(missing if i == axis else 0 for i in range(z.rank))]))
