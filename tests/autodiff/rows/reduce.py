"""Rows of onnxgrad_cli/autodiff/rules/reduce.py."""

import numpy as np

from tests.harness import Case, const

POSITIVE = {"ReduceLogSum": {"low": 0.5}, "ReduceL1": {"low": 0.5}}
KINDS = (
    "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare"
).split()


def reduce(kind: str, shape, axes=None, opset: int = 18, **keywords) -> Case:
    """One reduction, with its axes where the opset has them."""
    attrs = keywords.pop("attrs", {})
    inputs = [shape]
    if isinstance(axes, list) and (opset >= 18 or kind == "ReduceSum"):
        inputs.append(const(axes))
    elif isinstance(axes, list):
        attrs = {**attrs, "axes": axes}
    elif axes is not None:
        inputs.append(axes)
    return Case(kind, inputs, attrs, opset=opset, **POSITIVE.get(kind, {}), **keywords)


ROWS = [
    *(reduce(kind, (2, 3), [1], opset) for kind in KINDS for opset in (13, 18, 20, 26)),
    *(reduce(kind, (2, 3), [1], 28) for kind in ("ReduceLogSum", "ReduceLogSumExp")),
    *(
        reduce(kind, (2, 3, 2), axes, attrs={"keepdims": keep})
        for kind in KINDS
        for axes in (None, [], [0], [-1, 0], [0, 1, 2])
        for keep in (0, 1)
    ),
    *(reduce(kind, (2, 3, 2), axes, 13, attrs={"keepdims": 0}) for kind in KINDS for axes in (None, [-2], [0, 2])),
    *(reduce(kind, ()) for kind in KINDS),
    *(
        reduce(kind, (2, 3), axes, attrs={"noop_with_empty_axes": 1, "keepdims": keep})
        for kind in KINDS
        for axes in (None, [], [1])
        for keep in (0, 1)
    ),
    *(
        reduce(kind, (2, 3, 2), np.array(axes, np.int64), attrs={"keepdims": keep, **attrs}, note="axes at run time")
        for kind in KINDS
        for axes, attrs in (([-1, 0], {}), ([1], {}), ([], {}), ([], {"noop_with_empty_axes": 1}))
        for keep in (0, 1)
    ),
    *(
        reduce("ReduceSum", (2, 3, 2), np.array(axes, np.int64), 13, attrs={"noop_with_empty_axes": noop})
        for axes in ([-1, 0], [])
        for noop in (0, 1)
    ),
    *(reduce("ReduceProd", (size, 2), [0], note="odd and even") for size in (1, 2, 3, 4, 5, 7)),
    *(
        reduce("ReduceProd", np.array([[1.0, 0.0, 3.0, 2.0], [0.0, 0.0, 2.0, 1.0]]), axes, note="zeros in it")
        for axes in ([0], [1])
    ),
    reduce("ReduceProd", np.array([[1.0, 0.0, 3.0, 2.0]]), note="one zero among all"),
    reduce("ReduceProd", np.array([[1.0, 0.0, 3.0, 2.0]]), np.array([1]), note="a zero, axes at run time"),
    reduce("ReduceSum", np.zeros((2, 0, 4)), [1], note="of no elements"),
    *(
        Case("CumProd", [x, axis], {"exclusive": exclusive, "reverse": reverse}, opset=26, note=note)
        for exclusive in (0, 1)
        for reverse in (0, 1)
        for x, axis, note in (
            ((3, 4), const(1), ""),
            ((7, 2), const(0), ""),
            ((2, 5, 3), const(-2), ""),
            ((2, 3, 2), np.array(-2), "axis at run time"),
            ((4,), const(0, np.int32), ""),
            ((2, 1), const(1), ""),
            (np.array([[1.0, 0.0, 3.0, 2.0], [0.0, 0.5, 0.0, 1.0], [0.0, 0.0, 2.0, 3.0]]), const(1), "zeros in it"),
        )
    ),
]
