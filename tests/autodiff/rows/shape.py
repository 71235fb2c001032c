"""Rows of onnxgrad_cli/autodiff/rules/shape.py."""

import numpy as np
from onnx import TensorProto

from tests.harness import Case, const

ROWS = [
    *(Case("Identity", [(2, 3)], opset=opset) for opset in (13, 14, 16, 19, 21, 23, 24, 25)),
    *(Case("Reshape", [(2, 3, 4), const(shape)]) for shape in ([6, 4], [-1], [0, 12], [4, -1, 2, 1], [2, 0, -1, 2])),
    Case("Reshape", [(1,), const([])], note="to a scalar"),
    Case("Reshape", [(), const([1, 1])], note="from a scalar"),
    Case("Reshape", [(2, 3), np.array([3, -1])], note="shape at run time"),
    Case("Reshape", [(2, 3), const([3, 2])], {"allowzero": 1}),
    *(Case("Reshape", [(2, 3), const([3, -1])], opset=opset) for opset in (13, 14, 19, 21, 23, 24, 25)),
    *(Case("Flatten", [(2, 3, 4)], {"axis": axis}) for axis in (0, 1, 2, 3, -1)),
    *(Case("Flatten", [(2, 3, 4)], opset=opset) for opset in (13, 21, 23, 24, 25)),
    Case("Squeeze", [(1, 3, 1)], symbolic=False, note="axes absent"),
    *(Case("Squeeze", [(1, 3, 1), const(axes)]) for axes in ([0], [-1], [0, 2])),
    Case("Squeeze", [(1, 3, 1), np.array([2])], note="axes at run time"),
    *(Case("Squeeze", [(1, 3, 1), const([0])], opset=opset) for opset in (13, 21, 23, 24, 25)),
    *(Case("Unsqueeze", [(2, 3), const(axes)]) for axes in ([0], [-1], [0, 3], [3, 0], [1, -1])),
    Case("Unsqueeze", [(2, 3), np.array([1])], note="axes at run time"),
    *(Case("Unsqueeze", [(2, 3), const([1])], opset=opset) for opset in (13, 21, 23, 24, 25)),
    Case("Transpose", [(2, 3, 4)], note="perm absent"),
    Case("Transpose", [()], note="a scalar"),
    *(Case("Transpose", [(2, 3, 4)], {"perm": perm}) for perm in ([1, 2, 0], [2, 0, 1], [0, 2, 1], [0, 1, 2])),
    *(Case("Transpose", [(2, 3)], {"perm": [1, 0]}, opset=opset) for opset in (13, 21, 23, 24, 25)),
    *(Case("Expand", [(3, 1), const(shape)], opset=13) for shape in ([3, 4], [2, 1, 4], [1], [1, 1], [2, 3, 1])),
    Case("Expand", [(1, 3), np.array([2, 1, 1])], note="shape at run time"),
    Case("Expand", [(), const([2, 3])], note="a scalar"),
    *(Case("Tile", [(2, 3), const(repeats)]) for repeats in ([1, 1], [2, 1], [1, 3], [2, 3], [0, 2])),
    *(Case("Tile", [(2, 3), np.array(repeats)], note="repeats at run time") for repeats in ([2, 3], [2, 0], [0, 2])),
    Case("Tile", [(3,), const([2])], opset=13),
    *(Case("Concat", [(2, 3), (2, 1), (2, 4)], {"axis": axis}) for axis in (1, -1)),
    Case("Concat", [(2, 3), (1, 3), (3, 3)], {"axis": 0}, only=(1,), note="one wanted"),
    Case("Concat", [(2, 3)], {"axis": 0}, note="of one"),
    Case("Concat", [(2, 3), np.zeros((0, 3))], {"axis": 0}, only=(0,), note="with an empty one"),
    Case("Concat", [(2, 3), (2, 3)], {"axis": 0}, opset=13),
    *(Case("Split", [(2, 6), const([1, 3, 2])], {"axis": axis}, outputs=3) for axis in (1, -1)),
    Case("Split", [(6, 2)], {"num_outputs": 3}, outputs=3),
    Case("Split", [(7, 2)], {"num_outputs": 3}, outputs=3, note="uneven"),
    Case("Split", [(7, 2), np.array([3, 4])], outputs=2, note="sizes at run time"),
    Case("Split", [(2, 3), const([3])], {"axis": 1}, note="in one"),
    Case("Split", [(6, 2)], outputs=3, opset=13),
    Case("Split", [(6, 2), const([4, 2])], outputs=2, opset=13),
    *(
        Case("DepthToSpace", [(2, 8, 2, 3)], {"blocksize": 2, "mode": m}, opset=o)
        for m in ("DCR", "CRD")
        for o in (13, 26, 28)
    ),
    *(Case("SpaceToDepth", [(2, 2, 4, 6)], {"blocksize": 2}, opset=opset) for opset in (13, 26)),
    *(Case("SpaceToDepth", [(2, 2, 4, 6)], {"blocksize": 2, "mode": mode}, opset=28) for mode in ("DCR", "CRD")),
    *(Case("Trilu", [(2, 3, 4)], {"upper": upper}) for upper in (0, 1)),
    *(Case("Trilu", [(3, 4), const(k)], {"upper": upper}, opset=14) for upper in (0, 1) for k in (-1, 2)),
    Case("Trilu", [(3, 4), np.array(1)], note="diagonal at run time"),
    *(
        Case(
            "Range",
            [np.array(0.5), np.array(3.6), np.array(step)],
            only=(0, 2),
            opset=opset,
            note=f"step {step}",
        )
        for step in (0.5, 1.0)
        for opset in (13, 26, 27)
    ),
    Case(
        "Range",
        [np.array(3.0), np.array(-1.1), np.array(-0.5)],
        note="downwards; the limit has no derivative",
    ),
    Case("Cast", [(2, 3)], {"to": TensorProto.DOUBLE}),
    *(Case("Cast", [(2, 3)], {"to": TensorProto.DOUBLE}, opset=opset) for opset in (13, 19, 21, 23, 24, 25, 28)),
    *(Case("CastLike", [(2, 3), np.zeros(1)], only=(0,), opset=opset) for opset in (15, 19, 21, 23, 24, 25)),
    *(
        Case("CenterCropPad", [(5, 4, 3), const(sizes)], opset=18)
        for sizes in [(5, 4, 3), (3, 4, 2), (2, 1, 1), (8, 7, 3), (4, 7, 4), (1, 9, 6)]
    ),
    *(
        Case("CenterCropPad", [(5, 4, 3), np.array([2, 7])], {"axes": axes}, opset=18, note="sizes at run time")
        for axes in ([0, 1], [-1, 0])
    ),
]
