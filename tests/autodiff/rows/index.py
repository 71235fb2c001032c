"""Rows of onnxgrad_cli/autodiff/rules/index.py."""

import numpy as np

from tests.harness import Case, const

INT_MAX, INT_MIN = 2**63 - 1, -(2**63)


def slice_(shape, starts, ends, axes=None, steps=None, opset=18, **keywords) -> Case:
    inputs = [shape, *(const(x) if isinstance(x, list) else x for x in (starts, ends, axes, steps))]
    return Case("Slice", inputs, opset=opset, **keywords)


def pad(shape, pads, mode="constant", value=None, axes=None, opset=18, **keywords) -> Case:
    inputs = [shape, *(const(x) if isinstance(x, list) else x for x in (pads, value, axes))]
    return Case("Pad", inputs[: 3 + (axes is not None)], {"mode": mode}, opset=opset, **keywords)


MASK = np.array([[True, False, True], [False, False, True]])
SLICES = [
    ([1], [4], [0], None),
    ([0, 1], [3, 3], None, None),
    ([1], [INT_MAX], [1], None),
    ([0, 1], [INT_MAX, 3], [1, 0], None),
    ([0], [INT_MAX], [1], None),
    ([-3], [-1], [-2], None),
    ([-100], [100], [0], None),
    ([0], [6], [0], [2]),
    ([1], [6], [0], [2]),
    ([1], [5], [0], [3]),
    ([0, 1], [6, 5], [0, 1], [3, 2]),
    ([-1], [INT_MIN], [0], [-1]),
    ([-1], [INT_MIN], [0], [-2]),
    ([4], [0], [0], [-3]),
    ([-2, 3], [INT_MIN, INT_MIN], [1, 0], [-2, -1]),
    ([100], [-100], [0], [-2]),
    ([1, -1], [4, -4], [1, 0], [1, -1]),
    ([1], [9], [0], [2**31 - 1]),
    ([0], [INT_MAX], [0], [2**40]),
    ([4], [INT_MIN], [1], [INT_MIN]),
]
REPEATED = np.array([[0, 2, -1], [1, 1, 0]])
FACTORS = np.array([[0.5, -1.5, 2.0, 1.25], [1.0, 0.75, -0.5, 3.0], [-2.0, 1.5, 0.25, -1.0]])
NO_SECOND = {"second_order": False}
DISTINCT = np.array([[0.5, -1.5, 2.0, 1.25], [1.0, 0.75, -0.5, 3.0], [-2.0, 1.5, 0.25, -1.0]])
BORDERS = [[1, 2, 2, 1], [0, 1, 0, 0], [0, 0, 2, 2]]

ROWS = [
    *(slice_((6, 5), *arguments) for arguments in SLICES),
    slice_((6, 5), np.array([1]), np.array([4]), [0], note="at run time"),
    slice_((6, 5), np.array([-100, 2]), np.array([4, 100]), [1, 0], note="at run time, beyond the ends"),
    slice_(
        *(
            (6, 5),
            np.array([-2], np.int32),
            np.array([0], np.int32),
            const([0], np.int32),
            const([-2], np.int32),
        ),
        note="int32",
    ),
    slice_((6, 5), [0], np.array([3]), [0], note="end at run time"),
    slice_((6, 5), [1], [4], [0], [2], opset=13),
    slice_((6, 5), [4], [4], [0], note="nothing", symbolic=False),
    *(
        slice_((6, 5), np.array(starts), np.array(ends), np.array(axes), steps and np.array(steps), opset, note="late")
        for opset in (13, 18)
        for starts, ends, axes, steps in (
            ([1, 0], [4, INT_MAX], [1, 0], None),
            ([-1], [INT_MIN], [-2], [-2]),
            ([0, 3], [6, 0], [0, 1], [4, -1]),
        )
    ),
    slice_((6, 5), [5], [0], [0], np.array([-2]), note="step at run time"),
    slice_((6, 5), np.array([1, 2]), np.array([5, 5]), note="axes absent, at run time"),
    *(pad((3, 4), pads) for pads in ([1, 2, 3, 0], [0, 0, 0, 0], [-1, 1, 2, -2], [-1, -1, 0, -1])),
    *(pad((3, 4), [1, 0, 0, 2], opset=opset) for opset in (13, 18, 19, 21, 23, 24, 25)),
    pad((3, 4), [1, 0, 0, 2], value=()),
    pad((3, 4), [-1, 1, 1, -1], value=()),
    pad((3, 4), [1, 0, 0, 2], value=(), opset=13),
    pad((2, 3, 4), [1, 2], axes=[1]),
    *(pad((3, 4), [0, 5, 0, 9], mode, opset=19, note="wider than the image") for mode in ("edge", "wrap")),
    *(pad((3, 5), [0, -1, 0, 2], mode, opset=19, note="cut on one side") for mode in ("reflect", "edge", "wrap")),
    pad((2, 3, 4), [1, -1, 2, 1], axes=[-1, 0], value=()),
    pad((3, 4), np.array([1, -2, 1, 0]), note="at run time"),
    pad((3, 4), np.array([1, 2]), axes=[-1], value=(), note="at run time"),
    *(
        pad((3, 4), np.array([2, -1, 1, 1]), mode, axes=np.array([-1, 0]), opset=opset, note="axes at run time")
        for mode, opset in (("constant", 18), ("constant", 24), ("reflect", 19), ("edge", 18), ("wrap", 19))
    ),
    pad((3, 4), np.array([2, 1]), axes=np.array([0]), value=(1,), note="a value of one element; axes at run time"),
    *(pad((3, 4), pads, mode) for mode in ("reflect", "edge") for pads in BORDERS),
    *(pad((3, 4), pads, "wrap", opset=19) for pads in BORDERS),
    *(pad((3, 4), np.array([1, 2, 2, 1]), mode, opset=25, note="at run time") for mode in ("reflect", "edge", "wrap")),
    *(pad((2, 3, 4), [1, 2], mode, axes=[-2]) for mode in ("reflect", "edge")),
    *(pad((3, 4), [0, 1, 1, 0], mode, opset=13) for mode in ("reflect", "edge")),
    *(
        Case("Gather", [(4, 3, 2), const(indices)], {"axis": axis}, note=str(indices))
        for indices in (1, -1, [1], [[-1]], [0, 1, 1], [-1, 0, -1, 1, 1], [[0, 1], [1, -2], [1, 1]])
        for axis in (0, 1, -1)
    ),
    *(
        Case("Gather", [(4, 3), np.array(indices, dtype)], {"axis": axis}, note="at run time")
        for indices in (-2, [1, -1, 1, 0], [[0, 1, 1]])
        for dtype in (np.int64, np.int32)
        for axis in (0, 1)
    ),
    Case("Gather", [(300, 2), np.array([[5, -1], [5, 5]])], note="more rows than the one-hot product takes"),
    Case(
        "Gather",
        [(2, 300, 2), np.array([[5, -1], [5, 5]])],
        {"axis": 1},
        note="more rows than the one-hot product takes",
    ),
    *(
        Case("Gather", [(150, *inner), np.arange(-60, 60).reshape(-1, 2) % 97 - 20], note="many into a large table")
        for inner in ((2,), (2, 3), ())
    ),
    *(
        Case("Gather", [shape, np.zeros((0, 1), np.int64)], {"axis": axis}, note="nothing")
        for shape, axis in (((5,), 0), ((5, 3, 2), 0), ((5, 3, 2), 1), ((150, 3), 0))
    ),
    Case("Gather", [(5,), const([1, 1, 4])], note="of a vector"),
    Case("Gather", [(4, 3), const([0, 2, 2])], opset=16),
    *(
        Case("GatherElements", [(3, 4), np.array([[0, 2, -1], [1, 1, 0]])], {"axis": axis}, opset=opset)
        for axis in (0, 1, -1)
        for opset in (16, 26)
    ),
    *(
        Case("GatherND", [(3, 4, 2), const(indices)], note=str(indices))
        for indices in ([[0, 1], [0, 1], [-1, -2]], [[2], [2]], [[[0, 0, 1]], [[0, 0, 1]]], [1, 1])
    ),
    Case("GatherND", [(2, 3, 4), const([[[1], [1]], [[-1], [0]]])], {"batch_dims": 1}),
    Case("GatherND", [(2, 3, 4), const([[1, 1], [-1, 0]])], {"batch_dims": 1}),
    Case("GatherND", [(2, 2, 3, 4), const([[[[1]], [[1]]], [[[-1]], [[0]]]])], {"batch_dims": 2}, opset=16),
    Case("GatherND", [(300, 2), np.array([[5], [5], [-1]])], note="indices at run time"),
    Case("GatherND", [(3, 4, 2), np.array([[[2, 0]], [[2, 0]], [[-1, 1]]])], note="indices at run time"),
    Case("GatherND", [(2, 3, 4), np.array([[[1], [1]], [[-1], [0]]])], {"batch_dims": 1}, note="indices at run time"),
    *(
        Case(
            "ScatterElements",
            [(3, 4), np.array([[0, 2, -1], [1, 1, 0]]), (2, 3)],
            {"axis": axis, "reduction": "add"},
            opset=o,
        )
        for axis in (0, 1)
        for o in (16, 18)
    ),
    *(
        Case("ScatterElements", [(3, 4), np.array([[0, 2, 1], [1, 0, 0]]), (2, 3)], {"axis": axis}, opset=opset)
        for axis in (0, 1, -1)
        for opset in (16, 18)
        if axis == 0
    ),
    Case("ScatterElements", [(3, 4), np.array([[0, 2, -1], [1, 3, 0]]), (2, 3)], {"axis": -1}),
    *(
        Case("ScatterElements", [(3, 4), REPEATED, (2, 3)], {"axis": axis, "reduction": reduction}, opset=opset)
        for opset, reductions in ((16, ("mul",)), (18, ("mul", "max", "min")))
        for reduction in reductions
        for axis in (0, 1, -1)
    ),
    *(
        Case("ScatterElements", [data, REPEATED, updates], {"axis": 1, "reduction": "mul"}, note=note, **order)
        for note, data, updates, order in (
            ("no zero", FACTORS, 0.5 - FACTORS[:2, :3], {}),
            ("one zero of a product", FACTORS * (FACTORS < 1), FACTORS[1:, 1:], {}),
            ("one zero among the updates", FACTORS, FACTORS[:2, :3] * [[1, 1, 1], [1, 0, 0]], {"second_order": False}),
            ("several zeros: no second order", FACTORS * 0, FACTORS[:2, :3] * [[1, 0, 0], [1, 1, 0]], NO_SECOND),
        )
    ),
    Case("ScatterElements", [(5,), const([1, 1, -1]), (3,)], {"reduction": "mul"}, note="of vectors"),
    *(
        Case("ScatterElements", [(3, 4), make(REPEATED), (2, 3)], {"axis": axis}, note="the last of a place stays")
        for axis in (0, 1)
        for make in (const, np.asarray)
    ),
    *(
        Case("ScatterND", [(4, 3), make([[1], [-1], [1], [3]]), (4, 3)], note="the last of a place stays")
        for make in (const, np.asarray)
    ),
    *(
        Case(
            "ScatterND", [(4, 3), make([[[0, 1], [2, 2]], [[2, -1], [0, 1]]]), (2, 2)], note="the last of a place stays"
        )
        for make in (const, np.asarray)
    ),
    Case("ScatterND", [(4, 3), const([[0], [2]]), (2, 3)]),
    Case("ScatterND", [(4, 3), const([[0, 1], [-1, 2]]), (2,)], opset=16),
    Case(
        "ScatterND",
        [(4, 3), const([[0], [2]]), (2, 3)],
        opset=13,
        note="needs opset 16 for its second derivative",
        second_order=False,
    ),
    *(
        Case("ScatterND", [(4, 3, 2), indices, shape], {"reduction": reduction}, opset=opset)
        for opset, reductions in ((16, ("none", "add", "mul")), (18, ("add", "mul", "max", "min")))
        for reduction in reductions
        for indices, shape in (
            (const([[0, 1], [-1, 2], [0, 0]] if reduction == "none" else [[0, 1], [-1, 2], [0, 1]]), (3, 2)),
            (np.array([[[2]], [[0]]] if reduction == "none" else [[[2]], [[2]]]), (2, 1, 3, 2)),
            (const([[0, 1, 0], [-1, 2, 1]]), (2,)),
        )
    ),
    Case(
        "ScatterND",
        [FACTORS * (FACTORS < 1), const([[0], [0], [1]]), np.tile(FACTORS[1], (3, 1))],
        {"reduction": "mul"},
        note="zeros",
        second_order=False,
    ),
    *(
        Case("TensorScatter", [(2, *past), (2, *update), starts], {"axis": axis, "mode": mode}, opset=24, note=note)
        for past, update, axis in (
            ((3, 5, 2), (3, 2, 2), -2),
            ((5, 2), (3, 2), 1),
            ((2, 4), (2, 4), -1),
            ((2, 4), (2, 1), 2),
        )
        for note, mode, starts in (
            ("from 0", "linear", None),
            ("from 0", "circular", None),
            (
                "to the end",
                "linear",
                np.array([past[axis - 1 if axis > 0 else axis] - update[axis - 1 if axis > 0 else axis], 0]),
            ),
            ("round the end", "circular", np.array([past[axis - 1 if axis > 0 else axis] - 1, 0])),
        )
    ),
    *(
        Case("Unique", [DISTINCT], {"sorted": order, **axis}, outputs=outputs, note=f"{outputs} outputs")
        for order in (0, 1)
        for axis in ({}, {"axis": 0}, {"axis": -1})
        for outputs in (1, 2, 4)
    ),
    *(Case("Unique", [DISTINCT[0]], opset=opset) for opset in (13, 28)),
    Case("TopK", [(3, 5), const([2])], outputs=2),
    *(
        Case("TopK", [(3, 5), const([3])], {"axis": axis, "largest": largest, "sorted": 1}, outputs=2)
        for axis in (0, 1)
        for largest in (0, 1)
    ),
    Case("TopK", [(3, 5), np.array([2])], outputs=2, note="k at run time"),
    *(Case("TopK", [(3, 5), const([2])], outputs=2, opset=opset) for opset in (13, 24)),
    Case("TopK", [(3, 5), const([4])], {"axis": -2 + 1, "sorted": 0}, outputs=2, note="in any order"),
    Case("TopK", [(5,), const([1])], {"largest": 0}, outputs=2, opset=24, note="of a vector"),
    *(Case("Compress", [(2, 3), const([False, True, True], bool)], {"axis": axis}, opset=16) for axis in (1, -1)),
    Case("Compress", [(2, 3), np.array([True])], {"axis": 1}, note="a shorter condition"),
    Case("Compress", [(2, 3), np.array([True, False, False, True, True])], note="flattened"),
    Case("Compress", [(8, 8), np.array([False])], note="nothing, flattened"),
    Case("Compress", [(2, 3, 4), np.array([False])], {"axis": 0}, note="nothing"),
    Case("Compress", [(2, 3), np.array([False, True, True])], {"axis": 1}, opset=28),
    *(
        Case("OneHot", [const([0, 2, -1]), const(3), (2,)], {"axis": axis}, opset=opset)
        for axis in (-1, 0)
        for opset in (13, 26, 28)
    ),
    *(
        Case("Where", [np.array(c), a, b])
        for c, a, b in ((MASK, (2, 3), (2, 3)), (MASK, (3,), ()), (MASK[:1], (2, 1), (1, 3)))
    ),
    *(Case("Where", [MASK, (2, 3), (2, 3)], opset=opset) for opset in (13, 16)),
    *(
        Case("CumSum", [(3, 4), const(axis)], {"exclusive": exclusive, "reverse": reverse})
        for axis in (0, -1)
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    *(Case("CumSum", [(3, 4), np.array(1)], opset=opset, note="axis at run time") for opset in (13, 14)),
    Case("ReverseSequence", [(4, 3), const([4, 1, 2])]),
    Case("ReverseSequence", [(4, 3, 2), np.array([4, 1, 2])], {"batch_axis": 1, "time_axis": 0}),
    Case("ReverseSequence", [(3, 4, 2), np.array([4, 1, 2])], {"batch_axis": 0, "time_axis": 1}, opset=13),
    Case("ReverseSequence", [(4, 3, 2), np.array([4, 1, 2])], {"batch_axis": 1, "time_axis": 0}, opset=28),
]
