"""Rows of onnxgrad_cli/rules/reduce.py."""

import numpy as np

from tests.harness import Case, const

POSITIVE = {"ReduceLogSum": {"low": 0.5}, "ReduceL1": {"low": 0.5}}
KINDS = (
    "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare"
).split()
LATE = [kind for kind in KINDS if kind != "ReduceProd"]


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
        reduce(kind, (2, 3, 2), np.array([-1, 0]), attrs={"keepdims": keep}, note="axes at run time")
        for kind in LATE
        for keep in (0, 1)
    ),
    *(reduce("ReduceProd", (size, 2), [0], note="odd and even") for size in (1, 2, 3, 4, 5, 7)),
    *(
        reduce("ReduceProd", np.array([[1.0, 0.0, 3.0, 2.0], [0.0, 0.0, 2.0, 1.0]]), axes, note="zeros in it")
        for axes in ([0], [1])
    ),
    reduce("ReduceProd", np.array([[1.0, 0.0, 3.0, 2.0]]), note="one zero among all"),
    reduce("ReduceSum", np.zeros((2, 0, 4)), [1], note="of no elements"),
]
