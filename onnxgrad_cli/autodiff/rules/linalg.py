"""Matrix products (MatMul, Gemm, Einsum), the determinant and the inverse.

The gradient of a product is a product with the other operand, so each rule stays within its own operator (and
Transpose), which onnxruntime fuses. A weight shared by a batch gets one flat product instead of a sum of many.
"""

from __future__ import annotations

import math

import numpy as np

from onnxgrad_cli.autodiff.registry import rule
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.einsum import parse_equation

MINORS = 2**27
"""Up to this many elements the minors of a determinant are laid out: one gigabyte in float64."""


@rule("MatMul")
def matmul(op, g, y, a, b):
    """dA = G Bᵀ, dB = Aᵀ G; a vector is a matrix of one row (left) or one column (right)."""
    if a.rank == 1 and b.rank == 1:
        return g * b, g * a
    if b.rank == 1:
        column = op.unsqueeze(g, [-1])
        return (
            column @ op.unsqueeze(b, [0]) if op.wants(a) else None,
            op.reshape(g, [-1]) @ _rows(op, a) if op.wants(b) else None,
        )
    if a.rank == 1:
        return (
            op.squeeze(op.unsqueeze(g, [-2]) @ op.swap_last(b), [-2]) if op.wants(a) else None,
            op.unsqueeze(a, [-1]) @ op.unsqueeze(g, [-2]) if op.wants(b) else None,
        )
    da = _matrices_like(op, g @ op.swap_last(b), a) if op.wants(a) else None
    if not op.wants(b):
        return da, None
    if b.rank == 2:
        return da, _matrices_like(op, op.swap_last(_rows(op, a)) @ _rows(op, g), b)
    return da, _matrices_like(op, op.swap_last(a) @ g, b)


def _matrices_like(op, product, x):
    """`product`, whose last two axes are those of `x`: only the axes before them can have been broadcast."""
    return op.state(product, [*product.shape[:-2], *x.shape[-2:]])


def _rows(op, x):
    """`x` with every axis but the last made one: a batch of row vectors is one matrix."""
    if x.rank <= 2:
        return x
    return op.reshape(x, [-1, x.shape[-1] if isinstance(x.shape[-1], int) else op.dim(x, -1)])


@rule("Gemm")
def gemm(op, g, y, a, b, c, *, alpha, beta, transA, transB):
    da = db = dc = None
    if op.wants(a):
        da = (
            op.Gemm(b, g, alpha=alpha, transA=transB, transB=1, shape=a.known_shape)
            if transA
            else op.Gemm(g, b, alpha=alpha, transB=1 - transB, shape=a.known_shape)
        )
    if op.wants(b):
        db = (
            op.Gemm(g, a, alpha=alpha, transA=1, transB=transA, shape=b.known_shape)
            if transB
            else op.Gemm(a, g, alpha=alpha, transA=1 - transA, shape=b.known_shape)
        )
    if op.wants(c):
        dc = g if beta == 1 else g * beta
    return da, db, dc


@rule("Einsum")
def einsum(op, g, y, *xs, equation):
    """Exchange an operand's labels with the output's: the same product with G in its place.

    A label that stands in that operand alone was summed over: its cotangent is constant along it. A label that it
    has twice stood for a diagonal: that is where its cotangent goes. What is emitted has neither ellipses, over which
    onnxruntime can't sum, nor axes that broadcast, of which onnx infers a wrong size.
    """
    terms, output = parse_equation(equation, xs)
    wide = {label for label, size in _sizes(zip(terms, xs, strict=True)) if size != 1}
    if any(size == 1 and label in wide for label, size in _sizes([(output, y)])):
        raise Unknown(f"'{y.name}' is wider than onnx infers")
    thin = [
        [axis for axis, (label, size) in enumerate(_sizes([pair])) if size == 1 and label in wide]
        for pair in zip(terms, xs, strict=True)
    ]
    values = [op.squeeze(x, axes) for x, axes in zip(xs, thin, strict=True)]
    terms = [
        "".join(t[axis] for axis in range(len(t)) if axis not in axes) for t, axes in zip(terms, thin, strict=True)
    ]
    operands = list(zip(terms, values, strict=True))
    return tuple(op.unsqueeze(_einsum_operand(op, (output, g), operands, i), axes) for i, axes in enumerate(thin))


def _sizes(operands):
    """(label, size) of every axis of the operands, which are (labels, value)."""
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
    """The product of the factors, which are (labels, value), summed over all labels but `kept`."""
    if len(factors) == 1 and factors[0][0] == kept:
        return factors[0][1]
    sizes = _sizes(factors)
    found = [{size for label, size in sizes if label == each} for each in kept]
    shape = [size.pop() if len(size) == 1 else None for size in found]
    left = ",".join(labels for labels, _ in factors)
    return op.Einsum(*(value for _, value in factors), equation=f"{left}->{kept}", shape=shape)


def _on_the_diagonals(op, result, term, x):
    """`result`, which has an axis for each label of `term`, where labels that repeat have equal indices; else 0."""
    for axis, label in enumerate(term):
        first = term.index(label)
        if first < axis:
            result = op.unsqueeze(result, [axis])
            along = [op.steps(op.size(x, axis), i, result.rank) for i in (first, axis)]
            result = op.Where(op.Equal(*along), result, op.const(0.0, x))
    return result


def _filled(op, result, x, axes):
    """`result`, which may be narrower than `x` along `axes`, as wide as `x` there."""
    sizes = list(zip(result.shape, x.shape, strict=True))
    if all(sizes[axis][0] == sizes[axis][1] != "?" for axis in axes):
        return result
    return (
        op.expand_like(result, x) if all(have in (1, want) for have, want in sizes) else op.Expand(result, op.shape(x))
    )


@rule("Det")
def det(op, g, y, x):
    """The cofactors, each the determinant of what is left without a row and a column: d det(X) = Σ cof(X)_ij dX_ij.

    There is no division in it, so it is exact for singular matrices of every rank, to any order; in float32 the error
    is 4e-7 of the largest cofactor at size 16 (1 ms), 8e-7 at 32 (50 ms), 4e-6 at 64 (1 s).
    Source: R. A. Horn and C. R. Johnson, Matrix Analysis, 2nd edition, 0.8.2 and 0.8.10 (Jacobi's formula).
    """
    size = op.size(x, -1)
    if x.shape[-1] == 1:
        return op.unsqueeze(g, [-2, -1])
    if isinstance(size, int):
        elements = math.prod(n for n in x.shape if isinstance(n, int)) * (size - 1) ** 2
        if elements > MINORS:
            return op.no(
                f"the minors of its operand are {elements:,} elements", "freeze the weights before it with `freeze`"
            )
    minors = x
    for axis in (x.rank - 2, x.rank):
        minors = op.Gather(minors, _others(op, size), axis=axis)
    lead = range(x.rank - 2)
    minors = op.transpose(minors, [*lead, *(len(lead) + i for i in (0, 2, 1, 3))])
    signs = 1 - 2 * op.Mod(op.steps(size, 0, 2) + op.steps(size, 1, 2), op.const(2))
    return op.unsqueeze(g, [-2, -1]) * (op.Det(minors) * op.cast(signs, x))


def _others(op, size):
    """Row i: the indices below `size` other than i."""
    if isinstance(size, int):
        return op.const(np.array([[k for k in range(size) if k != i] for i in range(size)], np.int64))
    others = op.steps(size - 1, 1, 2)
    return others + op.cast(others >= op.steps(size, 0, 2), others)


@rule("Inverse", domain="com.microsoft")
def inverse(op, g, y, x):
    """dX = -Yᵀ G Yᵀ."""
    transposed = op.swap_last(y)
    return -(transposed @ g @ transposed)
