"""Matrix products: MatMul, Gemm and Einsum.

The gradient of a product is a product with the other operand, so each rule stays within its own operator (and
Transpose), which onnxruntime fuses. A weight shared by a batch gets one flat product instead of a sum of many.
"""

from __future__ import annotations

import re
from string import ascii_letters

from onnxgrad_cli.emit import Unknown
from onnxgrad_cli.registry import rule


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
    """Exchange an operand's subscripts with the output's: the same product with G in its place.

    Labels that stand in that operand alone were summed over it: its cotangent is constant along them.
    """
    terms, output = _subscripts(equation)
    if any(len(set(_labels(term))) < len(_labels(term)) for term in (*terms, output)):
        return _refuse(op, xs, f"the equation '{equation}' takes a diagonal (a label twice in one operand)")
    if "..." not in output and any("..." in term for term in terms):
        return _refuse(op, xs, f"the equation '{equation}' sums over the axes of an ellipsis")
    return tuple(_einsum_operand(op, g, i, xs, terms, output) if op.wants(x) else None for i, x in enumerate(xs))


def _einsum_operand(op, g, i, xs, terms, output):
    others = [j for j in range(len(xs)) if j != i]
    known = set(_labels("".join([output, *(terms[j] for j in others)])))
    kept = "".join(label for label in re.findall(r"\.\.\.|\w", terms[i]) if label == "..." or label in known)
    result = g
    if others or output != kept:
        left = [output, *(terms[j] for j in others)]
        if "..." not in kept:
            left = _spelled(left, [g, *(xs[j] for j in others)], terms)
        result = op.Einsum(g, *(xs[j] for j in others), equation=",".join(left) + "->" + kept)
    axes, missing = 0, []
    for label in re.findall(r"\.\.\.|\w", terms[i]):
        if label not in known and label != "...":
            missing.append(axes)
        axes += _hidden(terms[i], xs[i]) if label == "..." else 1
    result = op.unsqueeze(result, missing)
    narrow = any(have == 1 != want for have, want in zip(result.shape, xs[i].shape, strict=True))
    return op.expand_like(result, xs[i]) if narrow else result


def _subscripts(equation):
    """The operands' and the output's subscripts; an implicit output has the single labels in order."""
    equation = equation.replace(" ", "")
    left, arrow, output = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        labels = _labels(left)
        output = ("..." if "..." in left else "") + "".join(sorted(x for x in set(labels) if labels.count(x) == 1))
    return terms, output


def _spelled(parts, values, terms):
    """`parts` with their ellipses written as labels that are free: an equation can't sum over an ellipsis."""
    free = [label for label in ascii_letters if label not in "".join(terms)]
    return [
        part.replace("...", "".join(free[: _hidden(part, value)][::-1]))
        for part, value in zip(parts, values, strict=True)
    ]


def _labels(term):
    return re.findall(r"\w", term)


def _hidden(term, x):
    """How many axes of `x` the ellipsis of its subscripts stands for."""
    hidden = x.rank - len(_labels(term))
    if hidden < 0 or (hidden and "..." not in term):
        raise Unknown(f"'{x.name}' has {x.rank} axes, its subscripts '{term}' say otherwise")
    return hidden


def _refuse(op, xs, reason):
    return tuple(op.no(reason, "write it without, or freeze the weights before it with --freeze") for _ in xs)
