"""Rules of matrix products (MatMul, Gemm, Einsum), the determinant and the inverse.

The gradient of a product is a product of the cotangent with the other operand. So each rule emits only its own operator
and Transpose, which onnxruntime fuses with it. The gradient of a weight that all samples share is one product of
flattened matrices, instead of a sum over the samples.
"""

from __future__ import annotations

import math

import numpy as np

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.einsum import parse_equation

MINORS = 2**27
"""Largest number of elements of the matrices whose determinants are the minors. In float64 they take one gigabyte."""


@rule("MatMul")
def matmul(op, g, y, a, b):
    """dA = G Bᵀ, dB = Aᵀ G. A vector is a matrix with one row (left) or one column (right)."""
    if a.rank == 1 and b.rank == 1:
        return g * b, g * a
    if b.rank == 1:
        da = op.unsqueeze(g, [-1]) @ op.unsqueeze(b, [0]) if op.wants(a) else None
        return da, op.reshape(g, [-1]) @ _rows(op, a) if op.wants(b) else None
    if a.rank == 1:
        da = op.squeeze(op.unsqueeze(g, [-2]) @ op.swap_last(b), [-2]) if op.wants(a) else None
        return da, op.unsqueeze(a, [-1]) @ op.unsqueeze(g, [-2]) if op.wants(b) else None
    da = _matrices_like(op, g @ op.swap_last(b), a) if op.wants(a) else None
    if not op.wants(b):
        return da, None
    if b.rank == 2:
        return da, _matrices_like(op, op.swap_last(_rows(op, a)) @ _rows(op, g), b)
    return da, _matrices_like(op, op.swap_last(a) @ g, b)


def _matrices_like(op, product, x):
    """Return `product` with the last two sizes of `x` declared. Unlike the other axes, these two are not broadcast."""
    return op.state(product, [*product.shape[:-2], *x.shape[-2:]])


def _rows(op, x):
    """Flatten `x` to a matrix: merge all axes except the last."""
    if x.rank <= 2:
        return x
    return op.reshape(x, [-1, x.shape[-1] if isinstance(x.shape[-1], int) else op.dim(x, -1)])


@rule("Gemm")
def gemm(op, g, y, a, b, c, *, alpha, beta, transA, transB):
    da = db = dc = None
    if op.wants(a) and transA:
        da = op.Gemm(b, g, alpha=alpha, transA=transB, transB=1, shape=a.known_shape)
    elif op.wants(a):
        da = op.Gemm(g, b, alpha=alpha, transB=1 - transB, shape=a.known_shape)
    if op.wants(b) and transB:
        db = op.Gemm(g, a, alpha=alpha, transA=1, transB=transA, shape=b.known_shape)
    elif op.wants(b):
        db = op.Gemm(a, g, alpha=alpha, transA=1 - transA, shape=b.known_shape)
    if op.wants(c):
        dc = g if beta == 1 else g * beta
    return da, db, dc


@rule("Einsum")
def einsum(op, g, y, *xs, equation):
    """The cotangent of an operand is an Einsum in which G replaces the operand, and its labels become the result's.

    A label that occurs only in this operand was summed over, so the cotangent is constant along its axis. A label that
    occurs twice in the operand selects a diagonal, so the cotangent is zero elsewhere. The emitted equations have no
    ellipses, because onnxruntime can't sum over them, and no broadcast axes, because onnx infers a wrong size for them.
    """
    terms, output = parse_equation(equation, [(x.name, x.shape) for x in xs])
    wide = {label for label, size in _sizes(zip(terms, xs, strict=True)) if size != 1}
    if any(size == 1 and label in wide for label, size in _sizes([(output, y)])):
        raise Unknown(f"'{y.name}' has more axes or elements than onnx infers")
    thin, operands = [], []
    for term, x in zip(terms, xs, strict=True):
        axes = [axis for axis, (label, size) in enumerate(_sizes([(term, x)])) if size == 1 and label in wide]
        thin.append(axes)
        operands.append(("".join(label for at, label in enumerate(term) if at not in axes), op.squeeze(x, axes)))
    return tuple(op.unsqueeze(_einsum_operand(op, (output, g), operands, i), axes) for i, axes in enumerate(thin))


def _sizes(operands):
    """Return (label, size) for every axis of the operands. An operand is a pair (labels, value)."""
    return [pair for term, x in operands for pair in zip(term, x.shape, strict=True)]


def _einsum_operand(op, seed, operands, i):
    (output, _), (term, x) = seed, operands[i]
    factors = [seed, *operands[:i], *operands[i + 1 :]]
    known = {label for labels, _ in factors for label in labels}
    own = "".join(dict.fromkeys(term))
    result = _contracted(op, factors, "".join(label for label in own if label in known))
    result = op.unsqueeze(result, [axis for axis, label in enumerate(own) if label not in known])
    result = _on_the_diagonals(op, result, term, x)
    return _filled(op, result, x, [axis for axis, label in enumerate(term) if label not in output])


def _contracted(op, factors, kept):
    """Return the Einsum of some factors, pairs (labels, value), summed over all labels except `kept`."""
    if len(factors) == 1 and factors[0][0] == kept:
        return factors[0][1]
    sizes = _sizes(factors)
    found = [{size for label, size in sizes if label == each} for each in kept]
    shape = [size.pop() if len(size) == 1 else None for size in found]
    left = ",".join(labels for labels, _ in factors)
    return op.Einsum(*(value for _, value in factors), equation=f"{left}->{kept}", shape=shape)


def _on_the_diagonals(op, result, term, x):
    """Put `result`, which has one axis per distinct label, on the diagonals that repeated labels of `term` select."""
    for axis, label in enumerate(term):
        first = term.index(label)
        if first < axis:
            result = op.unsqueeze(result, [axis])
            along = [op.steps(op.size(x, axis), i, result.rank) for i in (first, axis)]
            result = op.Where(op.Equal(*along), result, op.const(0.0, x))
    return result


def _filled(op, result, x, axes):
    """Expand `result` to the sizes of `x` along `axes`, where its size may be 1."""
    sizes = list(zip(result.shape, x.shape, strict=True))
    if all(sizes[axis][0] == sizes[axis][1] != "?" for axis in axes):
        return result
    if all(have in (1, want) for have, want in sizes):
        return op.expand_like(result, x)
    return op.Expand(result, op.shape(x))


@rule("Det")
def det(op, g, y, x):
    """d det(X) = Σ cof(X)_ij dX_ij, where cof(X)_ij is ± the determinant of X without row i and column j.

    The formula has no division, so derivatives of any order are exact for singular matrices of every rank. In float32,
    the error relative to the largest cofactor is 4e-7 at size 16 (1 ms), 8e-7 at 32 (50 ms) and 4e-6 at 64 (1 s).
    Source: R. A. Horn and C. R. Johnson, Matrix Analysis, 2nd edition, 0.8.2 and 0.8.10 (Jacobi's formula).
    """
    size = op.size(x, -1)
    if x.shape[-1] == 1:
        return op.unsqueeze(g, [-2, -1])
    if isinstance(size, int):
        elements = math.prod(n for n in x.shape if isinstance(n, int)) * (size - 1) ** 2
        if elements > MINORS:
            reason = f"the minors of its operand have {elements:,} elements, which is too many"
            return op.no(reason, "freeze the weights before it with `freeze`")
    minors = x
    for axis in (x.rank - 2, x.rank):
        minors = op.Gather(minors, _others(op, size), axis=axis)
    lead = range(x.rank - 2)
    minors = op.transpose(minors, [*lead, *(len(lead) + i for i in (0, 2, 1, 3))])
    signs = 1 - 2 * op.Mod(op.steps(size, 0, 2) + op.steps(size, 1, 2), op.const(2))
    return op.unsqueeze(g, [-2, -1]) * (op.Det(minors) * op.cast(signs, x))


def _others(op, size):
    """Return a matrix [size, size - 1]. Its row i has the indices 0, 1, ..., size - 1 without i."""
    if isinstance(size, int):
        return op.const(np.array([[k for k in range(size) if k != i] for i in range(size)], np.int64))
    others = op.steps(size - 1, 1, 2)
    return others + op.cast(others >= op.steps(size, 0, 2), others)


@rule("Inverse", domain="com.microsoft")
def inverse(op, g, y, x):
    """dX = -Yᵀ G Yᵀ."""
    transposed = op.swap_last(y)
    return -(transposed @ g @ transposed)
