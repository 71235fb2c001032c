"""Rows of onnxgrad_cli/autodiff/rules/linalg.py."""

import numpy as np

from tests.harness import Case

rng = np.random.default_rng(2)

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
    ("ii->i", [(3, 3)]),
    ("ii->", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("iij->ji", [(3, 3, 2)]),
    ("iji->j", [(2, 3, 2)]),
    ("iii->i", [(3, 3, 3)]),
    ("ijij->ji", [(2, 3, 2, 3)]),
    ("jiij", [(2, 3, 3, 2)]),
    ("...ii->...i", [(2, 3, 3)]),
    ("...ii", [(2, 3, 3)]),
    ("i...i->...", [(3, 2, 3)]),
    ("ii,i->i", [(3, 3), (3,)]),
    ("ii,i->", [(3, 3), (1,)]),
    ("ii,i->", [(1, 1), (3,)]),
    ("ij,j->ij", [(2, 3), (1,)]),
    ("ii,jj->", [(3, 3), (2, 2)]),
    ("iij,jkk->ik", [(2, 2, 3), (3, 4, 4)]),
    ("aij,bii->ab", [(2, 3, 4), (2, 3, 3)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    ("ij,jk->ik", [(2, 3), (1, 4)]),
    ("ij,ij,ij->i", [(2, 3), (2, 1), (1, 3)]),
    (",ij->ij", [(), (2, 3)]),
    (",", [(), ()]),
    ("->", [()]),
    ("ij,,j->i", [(2, 3), (), (3,)]),
    ("bA,Ac->bc", [(2, 3), (3, 2)]),
    ("aB,Bc", [(2, 3), (3, 2)]),
    (" i  j , j k -> i k ", [(2, 3), (3, 4)]),
    ("ba", [(2, 3)]),
    ("...ij->...ji", [(2, 3, 4, 2)]),
    ("...i,j...", [(2, 3), (4, 2)]),
    ("...i,...j,...k->...", [(1, 2, 3), (5, 1, 2), (1, 2, 2)]),
]
SUMMED = [
    ("...i->i", [(2, 4, 3)]),
    ("...i,...i->", [(4, 1, 3), (4, 2, 3)]),
    ("a...,b...->ab", [(2, 3, 1), (4, 3, 5)]),
    ("...ij,...jk->ik", [(2, 2, 3), (2, 3, 4)]),
    ("...->", [(2, 3)]),
]
"""onnxruntime can't sum over an ellipsis."""
ROWS = [
    *(Case("MatMul", shapes) for shapes in PRODUCTS),
    Case("MatMul", [(2, 3), (3, 4)], opset=13),
    *(
        Case("Gemm", [(3, 2) if a.get("transA") else (2, 3), (4, 3) if a.get("transB") else (3, 4), c], a)
        for a, c in GEMMS
    ),
    Case("Gemm", [(2, 3), (3, 4), (4,)], opset=13),
    *(Case("Einsum", shapes, {"equation": equation}) for equation, shapes in EQUATIONS),
    *(Case("Einsum", shapes, {"equation": equation}, executor="reference") for equation, shapes in SUMMED),
    *(Case("Einsum", [(2, 3), (3, 4)], {"equation": "ij,jk->ik"}, opset=opset) for opset in (13, 28)),
    *(Case("Det", [shape]) for shape in ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (2, 3, 3), (2, 1, 2, 2), (3, 1, 1))),
    *(Case("Det", [(3, 3)], opset=opset) for opset in (13, 21, 22, 26)),
    *(
        Case("Inverse", [np.eye(3) + rng.uniform(-0.4, 0.4, (*lead, 3, 3))], domain="com.microsoft", opset=opset)
        for lead in ((), (2,), (2, 1))
        for opset in (13, 18)
    ),
]
