"""Elementwise arithmetic and functions. The walk sums broadcast operands, so these are the plain formulas."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from onnx import TensorProto

from onnxgrad_cli.autodiff.registry import no_gradient, rule
from onnxgrad_cli.ir.types import HALVES

no_gradient("Equal Greater GreaterOrEqual Less LessOrEqual Not And Or Xor IsNaN IsInf")
no_gradient("Shape Size NonZero EyeLike ConstantOfShape")
no_gradient("BitShift BitwiseAnd BitwiseOr BitwiseXor BitwiseNot")
no_gradient("Sign Floor Ceil Round", kink="0 at the jumps too")


@rule("Add")
def add(op, g, y, a, b):
    return g, g


@rule("Sub")
def sub(op, g, y, a, b):
    return g, -g if op.wants(b) else None


@rule("Mul")
def mul(op, g, y, a, b):
    return g * b if op.wants(a) else None, g * a if op.wants(b) else None


@rule("Div")
def div(op, g, y, a, b):
    """By one constant as a product, which takes half as long."""
    ga = g * _inverse(b) if _is_normal(b) and _keeps_digits(b) else g / b
    return ga, -(ga * y)


def _keeps_digits(b) -> bool:
    """Whether the inverse of a constant is not rounded to the few digits of a half type: all gradients would be off."""
    return b.dtype not in HALVES or abs(math.frexp(float(b.const.item()))[0]) == 0.5


def _is_normal(b) -> bool:
    """Whether a divisor is one constant, neither it nor its inverse so small that digits are lost."""
    return (
        b.const is not None
        and b.const.size == 1
        and NORMAL[b.dtype] <= abs(float(b.const.item())) <= 1 / NORMAL[b.dtype]
    )


def _inverse(b):
    return b.op.const(1 / b.const.astype(np.float64), b)


@rule("Neg")
def neg(op, g, y, x):
    return -g


@rule("Sum")
def sum_(op, g, y, *xs):
    return (g,) * len(xs)


@rule("Mean")
def mean(op, g, y, *xs):
    return (g * (1 / len(xs)),) * len(xs)


@rule("Mod", kink="at a jump the quotient that the operator took")
def mod(op, g, y, a, b, *, fmod):
    """y = a - k b with an integer k, constant between jumps and read off y, whichever way it was rounded."""
    return g, -(g * op.Round((a - y) / b)) if op.wants(b) else None


# -- powers ----------------------------------------------------------------------------------------


NORMAL = {TensorProto.DOUBLE: 2.0**-1022, TensorProto.FLOAT16: 2.0**-14}
NORMAL |= dict.fromkeys((TensorProto.FLOAT, TensorProto.BFLOAT16), 2.0**-126)
"""The smallest normal number of each type: the reciprocal of a smaller one may overflow."""


@rule("Pow", kink="exponent: 0 where the base is 0 and the exponent is not negative; nan for a negative base")
def pow_(op, g, y, x, p):
    """d x^p/dx = p x^(p-1), 0 for p = 0 also at x = 0; d x^p/dp = x^p log x."""
    gx = _pow_base(op, g, y, x, p) if op.wants(x) else None
    gp = None
    if op.wants(p):
        exponent = op.cast(p, x)
        limit = op.And(op.Equal(x, 0), exponent >= 0)
        gp = op.cast(g * (y * op.Log(op.Where(limit, op.const(1, x), x))), p)
    return gx, gp


def _pow_base(op, g, y, x, p):
    if p.const is None:
        p = op.cast(p, x)
        at_zero = op.And(op.Equal(p, 0), op.Abs(x) < NORMAL[x.dtype])
        return g * (p * op.Pow(op.Where(at_zero, op.const(1, x), x), p - 1))
    value = np.asarray(p.const, np.float64)
    if not value.any():
        return None
    if np.all(value == 1):
        return g
    if np.all(value == 2):
        return g * (x + x)
    if np.all(value == 0.5):
        return g / (y + y)
    if np.all(value == -1):
        return -(g * (y * y))
    if np.all(value < 0):
        return g * (y / x * value)
    return g * (op.Pow(x, np.where(value == 0, 1, value - 1)) * value)


@rule("Sqrt", kink="infinite at x = 0")
def sqrt(op, g, y, x):
    return g / (y + y)


@rule("Reciprocal")
def reciprocal(op, g, y, x):
    return -(g * (y * y))


# -- functions of one variable ---------------------------------------------------------------------


@rule("Exp")
def exp(op, g, y, x):
    return g * y


@rule("Log")
def log(op, g, y, x):
    return g / x


@rule("Abs", kink="0 at x = 0")
def abs_(op, g, y, x):
    return g * op.Sign(x)


@rule("Erf")
def erf(op, g, y, x):
    """d erf(x)/dx = 2/sqrt(pi) exp(-x^2), its factor in the exponent: a pass over memory less."""
    return g * op.Exp(math.log(2 / math.sqrt(math.pi)) - x * x)


@rule("Sin")
def sin(op, g, y, x):
    return g * op.Cos(x)


@rule("Cos")
def cos(op, g, y, x):
    return -(g * op.Sin(x))


@rule("Tan")
def tan(op, g, y, x):
    return g * (y * y + 1)


@rule("Asin")
def asin(op, g, y, x):
    """1/sqrt(1 - x^2), factored so that nothing cancels near 1."""
    return g / op.Sqrt((1 - x) * (1 + x))


@rule("Acos")
def acos(op, g, y, x):
    return -(g / op.Sqrt((1 - x) * (1 + x)))


@rule("Atan")
def atan(op, g, y, x):
    return g / (x * x + 1)


@rule("Sinh")
def sinh(op, g, y, x):
    return g * op.Cosh(x)


@rule("Cosh")
def cosh(op, g, y, x):
    return g * op.Sinh(x)


@rule("Asinh")
def asinh(op, g, y, x):
    """1/sqrt(x^2 + 1) = 1/cosh y, which does not overflow."""
    return g / op.Cosh(y)


@rule("Acosh")
def acosh(op, g, y, x):
    """1/sqrt(x^2 - 1) = 1/sinh y, in which nothing cancels near 1."""
    return g / op.Sinh(y)


@rule("Atanh")
def atanh(op, g, y, x):
    return g / ((1 - x) * (1 + x))


# -- choices ---------------------------------------------------------------------------------------


@rule("Max Min", kink="split evenly among all inputs that attain it")
def extremum(op, g, y, *xs):
    if len(xs) == 1:
        return g
    y, *values = op.comparable(y, partial(op.emit, op.node.op_type), *xs)
    attains = [op.cast(op.Equal(x, y), g) for x in values]
    share = g / op.Sum(*attains)
    return [share * here if op.wants(x) else None for x, here in zip(xs, attains, strict=True)]


@rule("Clip", kink="1 at the bounds; the bounds themselves get it only outside")
def clip(op, g, y, x, low, high):
    """As torch.clamp; an input that passed is one that equals its output, unless the bounds are crossed.

    The product with the mask takes 3.1 ms for 4 million elements, Where 4.1 ms (onnxruntime 1.31, 2 threads).
    """
    gx = glow = ghigh = None
    if op.wants(x):
        bounds = (None if bound is None else op.wide(bound) for bound in (low, high))
        inside = op.Equal(*op.comparable(y, lambda x: op.Clip(x, *bounds), x))
        if low is not None and high is not None and not _ordered(low, high):
            inside = op.And(inside, low <= high)
        gx = g * op.cast(inside, g)
    if op.wants(low):
        below = x < low
        tied = high is None or low.name == high.name
        glow = g * op.cast(below if tied else op.And(below, low < high), g)
    if op.wants(high):
        above = x > high
        ghigh = g * op.cast(above if low is None else op.Or(above, high < low), g)
    return gx, glow, ghigh


def _ordered(low, high) -> bool:
    """Whether the bounds are known not to be crossed."""
    return low.const is not None and high.const is not None and bool(np.all(low.const <= high.const))
