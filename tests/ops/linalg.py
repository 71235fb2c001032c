"""Rows of onnxgrad_cli/rules/linalg.py."""

from tests.harness import Case

PRODUCTS = [
    [(2, 3), (3, 4)],
    [(3,), (3,)],
    [(3,), (3, 4)],
    [(2, 3), (3,)],
    [(3,), (2, 3, 4)],
    [(5, 2, 3), (3,)],
    [(2, 4, 3), (3, 5)],
    [(2, 3), (5, 3, 4)],
    [(2, 2, 3), (2, 3, 4)],
    [(2, 1, 2, 3), (5, 3, 4)],
    [(1, 2, 3), (4, 3, 2)],
]
GEMMS = [
    ({}, None),
    ({"alpha": 0.5, "beta": 2.0}, (4,)),
    ({"transA": 1}, (2, 4)),
    ({"transB": 1}, (1,)),
    ({"transA": 1, "transB": 1, "alpha": -1.5, "beta": 0.25}, (2, 1)),
    ({"beta": 0.5}, ()),
]
EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij, jk", [(2, 3), (3, 4)]),
    ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
    ("i,j->ij", [(2,), (3,)]),
    ("ij->ji", [(2, 3)]),
    ("ij->j", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("i,i->", [(3,), (3,)]),
    ("ijk,jl->l", [(2, 3, 4), (3, 5)]),
    ("...ij,...jk->...ik", [(2, 2, 3), (2, 3, 4)]),
    ("...ij,jk->...ik", [(2, 5, 2, 3), (3, 4)]),
    ("i...j,j...->i...", [(2, 4, 5, 3), (3, 1, 5)]),
    ("...i,...i", [(1, 4, 3), (2, 4, 3)]),
    ("b...,b...->...", [(2, 3), (2, 3)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
    ("ij,ik->ijk", [(2, 3), (2, 4)]),
]

ROWS = [
    *(Case("MatMul", shapes) for shapes in PRODUCTS),
    Case("MatMul", [(2, 3), (3, 4)], opset=13),
    *(
        Case("Gemm", [(3, 2) if a.get("transA") else (2, 3), (4, 3) if a.get("transB") else (3, 4), c], a)
        for a, c in GEMMS
    ),
    Case("Gemm", [(2, 3), (3, 4), (4,)], opset=13),
    *(Case("Einsum", shapes, {"equation": equation}) for equation, shapes in EQUATIONS),
    Case("Einsum", [(2, 3), (3, 4)], {"equation": "ij,jk->ik"}, opset=13),
]
