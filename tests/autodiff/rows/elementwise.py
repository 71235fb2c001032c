"""Rows of onnxgrad_cli/autodiff/rules/elementwise.py."""

import numpy as np

from tests.harness import Case, const

BROADCASTS = [
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((2, 3), (1, 3)),
    ((2, 1), (2, 3)),
    ((2, 1, 3), (4, 1)),
    ((1,), (2, 3)),
    ((2, 3), ()),
    ((), (2, 3)),
    ((), ()),
    ((3, 1), (1, 4)),
    ((1, 1), (1,)),
    ((2, 1, 3, 1), (1, 4, 1, 2)),
]
"""Every way two shapes can broadcast: equal, fewer axes, size one on either side, on both, scalars."""

TRIPLES = [((2, 3), (2, 3), (2, 3)), ((2, 1), (3,), (1, 3)), ((), (2, 3), (2, 1))]


def opsets(op: str, shapes, *versions: int, **keywords) -> list[Case]:
    """The same row at 13, at each opset where the operator's schema changed, and at the newest."""
    return [Case(op, shapes, opset=opset, **keywords) for opset in (13, *versions, 26)]


def apart(*shape: int, seed: int = 0) -> np.ndarray:
    """Values whose pairwise distances are large against a difference step."""
    count = int(np.prod(shape))
    return np.random.default_rng(seed).permutation(np.linspace(-2, 2, count) + 0.01 * seed).reshape(shape)


ROWS = [
    *(Case(op, shapes) for op in ("Add", "Sub", "Mul") for shapes in BROADCASTS),
    *(row for op in ("Add", "Sub", "Mul") for row in opsets(op, [(2, 3), (3,)], 14)),
    *(Case("Div", shapes, low=0.5, high=2) for shapes in BROADCASTS),
    *opsets("Div", [(2, 3), (3,)], 14, low=-2, high=-0.5),
    *(Case("Mod", shapes, {"fmod": 1}, low=0.3, high=5) for shapes in BROADCASTS),
    *opsets("Mod", [(2, 3), (3,)], attrs={"fmod": 1}, low=-5, high=-0.3, note="negative"),
    Case("Mod", [np.array([-4.7, 4.7, -2.2]), np.array([1.5, -1.5, -3.1])], {"fmod": 1}, note="mixed signs"),
    *(
        Case("Mod", [np.array([-4.7, 4.7, -2.2]), np.array([1.5, -1.5, -3.1])], {"fmod": fmod}, opset=28)
        for fmod in (0, 1)
    ),
    # powers
    *(Case("Pow", shapes, low=0.5, high=2) for shapes in BROADCASTS),
    *opsets("Pow", [(2, 3), (3,)], 15, low=0.5, high=2),
    *(
        Case("Pow", [(2, 3), const(p, np.float64)], note=f"{p}", low=0.5, high=2)
        for p in (-2.5, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 7)
    ),
    *(
        Case("Pow", [(2, 3), const(p, np.float64)], note=f"{p}, negative base", low=-2, high=-0.5)
        for p in (-3, -2, -1, 0, 1, 2, 3)
    ),
    Case("Pow", [(2, 3), const([0.0, 1.0, 2.0], np.float64)], note="constant vector with 0"),
    Case("Pow", [(2, 3), const([[3.0]], np.float64)], note="constant of more axes"),
    Case("Pow", [(3,), const([[[2.0]]], np.float64)], note="constant of more axes than the base"),
    *(Case("Pow", [(2, 3), const(3, dtype)], note=f"exponent {dtype}") for dtype in ("int32", "float32")),
    Case("Pow", [(2, 3), np.array([-1, 0, 3])], low=0.5, high=2, note="integer exponents"),
    *opsets("Sqrt", [(3, 4)], low=0.5),
    *opsets("Reciprocal", [(3, 4)], low=0.5),
    # functions of one variable
    *(row for op in ("Neg", "Exp", "Erf") for row in opsets(op, [(3, 4)])),
    *(row for op in ("Sin", "Cos", "Atan", "Sinh", "Cosh", "Asinh") for row in opsets(op, [(3, 4)], 22)),
    *opsets("Abs", [(3, 4)], low=0.1),
    *opsets("Abs", [(3, 4)], high=-0.1, note="negative"),
    *opsets("Log", [(3, 4)], low=0.2),
    *opsets("Tan", [(3, 4)], 22, low=-1, high=1),
    *(row for op in ("Asin", "Acos", "Atanh") for row in opsets(op, [(3, 4)], 22, low=-0.9, high=0.9)),
    *opsets("Acosh", [(3, 4)], 22, low=1.2, high=3),
    Case("Exp", [()]),
    # several operands
    *(Case(op, [shape]) for op in ("Sum", "Mean", "Max", "Min") for shape in [(2, 3), ()]),
    *(Case(op, shapes) for op in ("Sum", "Mean") for shapes in (*BROADCASTS, *TRIPLES)),
    *(Case(op, shapes) for op in ("Max", "Min") for shapes in (*BROADCASTS, *TRIPLES)),
    *(row for op in ("Sum", "Mean", "Max", "Min") for row in opsets(op, [(2, 3), (3,), ()])),
    *(Case(op, [(2, 3), const(0.1, np.float64)], note="a constant bound") for op in ("Max", "Min")),
    # clip
    *opsets("Clip", [apart(4, 5), const(-1.03, np.float64), const(0.97, np.float64)]),
    Case("Clip", [apart(4, 5), const(-1.03, np.float64)], note="low"),
    Case("Clip", [apart(4, 5), None, const(1.03, np.float64)], note="high"),
    Case("Clip", [(4, 5)], note="no bounds"),
    Case("Clip", [apart(4, 5), np.array(-1.03), np.array(0.97)], note="bounds differentiated"),
    Case("Clip", [apart(4, 5), np.array(-1.03)], note="low differentiated"),
    Case("Clip", [apart(4, 5), None, np.array(0.97)], note="high differentiated"),
    Case("Clip", [apart(4, 5), np.array(0.97), np.array(-1.03)], note="bounds crossed"),
    Case("Clip", [apart(4, 5), const(0.97, np.float64), const(-1.03, np.float64)], note="crossed constants"),
]
