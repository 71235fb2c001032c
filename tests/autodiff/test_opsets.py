"""Old models: each row of the table in the form its operator had at every opset from 7 on.

The measure is the one-node model as it stands, run at its own opset: neither the conversion nor the rules touch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs, helper

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Arrays, is_float, tensor_type
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.autodiff.rows import ROWS, by_operator, tiers
from tests.conftest import Each
from tests.harness import Case, Const, as_array, const, fed, forward_model, sample, wanted_inputs

OLDEST = 7


# -- the older forms -------------------------------------------------------------------------------------------


HISTORY: dict[str, set[int]] = {}
for schema in defs.get_all_schemas_with_history():
    if not schema.domain:
        HISTORY.setdefault(schema.name, set()).add(schema.since_version)


def versions(op: str) -> list[int]:
    """The opsets from 7 on at which the schema of an operator of the default domain changed, or 7 itself."""
    since = HISTORY[op]
    first = max((v for v in since if v <= OLDEST), default=min(since))
    return sorted(max(v, OLDEST) for v in since if first <= v <= NEWEST_OPSET)


MOVES: dict[str, tuple[int, tuple[str, ...]]] = {
    "Slice": (10, ("starts", "ends", "axes")),
    "TopK": (10, ("k",)),
    "Split": (13, ("split",)),
    "Clip": (11, ("min", "max")),
    "Pad": (11, ("pads", "value")),
    "DFT": (20, ("", "axis")),
    **{op: (13, ("axes",)) for op in ("ReduceSum", "Squeeze", "Unsqueeze")},
    **{f"Reduce{kind}": (18, ("axes",)) for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare".split()},
}
"""Operator -> the opset at which attributes became inputs, and which, in the order of the inputs after the first."""


def _with_attributes(case: Case) -> tuple[list[Any], dict[str, Any]] | None:
    """The inputs and attributes of a row before inputs took the place of attributes; None where it needs the inputs."""
    names = MOVES[case.op][1]
    attrs, inputs, extra = dict(case.attrs), list(case.inputs[:1]), list(case.inputs[1:])
    while extra and extra[-1] is None:
        extra.pop()
    extra = extra[:-1] if case.op == "Slice" and len(extra) == 4 and _all(extra[3], 1) else extra
    if len(extra) > len(names):
        return None
    for name, value in zip(names, extra, strict=False):
        if not name:
            inputs.append(value)
        if not name or value is None:
            continue
        if not isinstance(value, Const):
            return None
        scalar = name in ("k", "min", "max", "value") or case.op == "DFT"
        attrs[name] = value.array.item() if scalar else value.array.tolist()
        if attrs[name] == []:
            return None
    return inputs, attrs


def older(case: Case, opset: int) -> Case | None:
    """The same row at an older opset; None where it could not be said then."""
    attrs, inputs = dict(case.attrs), list(case.inputs)
    if opset < MOVES.get(case.op, (0,))[0] <= case.opset:
        if (moved := _with_attributes(case)) is None:
            return None
        inputs, attrs = moved
    if case.op == "Dropout" and opset < 12:
        inputs = inputs[:1]
        if case.outputs > 1:
            return None
    if case.op == "Split" and opset < 18:
        attrs.pop("num_outputs", None)
        if "uneven" in case.note:
            return None
    if case.op == "Resize" and opset in (11, 12) and inputs[1] is None:
        inputs[1] = const([], np.float32)
        inputs[2] = inputs[2] or const([], np.float32)
    if case.op == "Resize" and opset < 11:
        return None
    if case.op == "GroupNormalization" and opset < 21:
        groups = attrs["num_groups"]
        inputs = [inputs[0], (groups,), (groups,)]
        attrs.pop("stash_type", None)
    if case.op == "GridSample" and opset < 20 and "mode" in attrs:
        attrs["mode"] = {"linear": "bilinear", "cubic": "bicubic"}.get(attrs["mode"], attrs["mode"])
    if opset < 8 and case.op in ("Sum", "Mean", "Max", "Min") and len({np.shape(as_array(x)) for x in inputs}) > 1:
        return None  # they did not broadcast
    if opset < 28 and case.op == "Mod" and not attrs.get("fmod") and as_array(inputs[0]).dtype.kind == "f":
        return None  # floats took fmod=1
    if opset < 12 and case.op == "Pow" and as_array(inputs[1]).dtype != np.float64:
        return None  # one type for base and exponent
    if opset < 21 and any(as_array(x).dtype.type.__module__ == "ml_dtypes" for x in inputs if x is not None):
        return None  # four and eight bits
    if opset < 18 and case.op == "OptionalGetElement":
        return None  # of a tensor
    if opset < 11 and case.op in ("Flatten", "Squeeze", "Unsqueeze", "OneHot") and _negative(case):
        return None
    schema = defs.get_schema(case.op, opset)
    for name, value in list(attrs.items()):
        if name not in schema.attributes:
            new = defs.get_schema(case.op, case.opset).attributes[name].default_value
            if not new.type or _plain(helper.get_attribute_value(new)) != value:
                return None
            del attrs[name]
    while inputs and inputs[-1] is None:
        inputs.pop()
    if not schema.min_input <= len(inputs) <= schema.max_input or case.outputs > schema.max_output:
        return None
    return replace(case, inputs=inputs, attrs=attrs, opset=opset)


NEWEST_ROW: dict[str, int] = {}
for row in ROWS:
    NEWEST_ROW[row.op] = max(row.opset, NEWEST_ROW.get(row.op, 0))
"""Operator -> the newest opset of its rows."""


def newer(case: Case, opset: int) -> Case | None:
    """The same row at a newer opset that the table has no row for; None where it has one, or the form has changed."""
    if NEWEST_ROW[case.op] >= opset:
        return None
    return replace(case, opset=opset) if set(case.attrs) <= set(defs.get_schema(case.op, opset).attributes) else None


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _negative(case: Case) -> bool:
    """Whether an axis or an index counts from the end."""
    numbers = [case.attrs.get("axis", 0), *(x.array.min() for x in case.inputs if isinstance(x, Const))]
    return min(numbers) < 0


def _all(x: Any, value: int) -> bool:
    return isinstance(x, Const) and bool(np.all(x.array == value))


def old_rows() -> Iterator[Case]:
    """Every row of one node, at every opset that changed its operator."""
    seen: set[str] = set()
    for row in ROWS:
        if row.domain or row.nodes:
            continue
        for opset in versions(row.op):
            case = older(row, opset) if opset <= row.opset else newer(row, opset)
            if case is not None and str(case) not in seen and "nothing" not in case.note:
                seen.add(str(case))
                yield case


# -- forms that the table has no newer row for --------------------------------------------------------------------

IMAGE = np.random.default_rng(1).uniform(-2, 2, (1, 2, 4, 5)).astype(np.float32)
MODES = ("nearest", "linear")
SINGLE: Any = {"step": 1e-2, "tolerance": 2e-3}
OFF = np.linspace(-2.1, 2.2, 12, dtype=np.float32)
FEATURES = np.random.default_rng(2).uniform(0.5, 2, (4, 4, 5)).astype(np.float32)

EXTRA = [
    *(Case("Upsample", [IMAGE], {"mode": m, "scales": [1.0, 1.0, 2.0, 3.0]}, opset=7, **SINGLE) for m in MODES),
    *(
        Case("Upsample", [IMAGE, const([1.0, 1.0, *scales], np.float32)], {"mode": m}, opset=9, **SINGLE)
        for m in MODES
        for scales in ((2, 3), (1.5, 2.5))
    ),
    *(
        Case("Resize", [IMAGE, const([1.0, 1.0, *scales], np.float32)], {"mode": m}, opset=10, **SINGLE)
        for m in MODES
        for scales in ((2, 3), (1.5, 2.5), (0.6, 0.6), (1.7, 0.6))
    ),
    *(
        Case(op, [(2, 3, 4, 2)], {"axis": axis}, opset=opset)
        for op in ("Softmax", "LogSoftmax")
        for axis in (1, 2, 3)
        for opset in (7, 11, 12)
    ),
    Case("Softmax", [(2, 5, 1, 1)], opset=7, symbolic=False, note="axis absent"),
    Case("Softmax", [(2, 3, 4)], {"axis": -2}, opset=11),
    Case("BatchNormalization", [(2, 3, 4), (3,), (3,), (3,), (3,)], opset=7, low=0.5),
    Case("BatchNormalization", [IMAGE[0], *FEATURES], {"spatial": 0}, opset=7, **SINGLE),
    Case("Scatter", [(3, 4), np.array([[0, 2, 1], [1, 0, 2]]), (2, 3)], {"axis": 0}, opset=9),
    Case("Scatter", [(3, 4), np.array([[0, 2, 1], [1, 0, 2]]), (2, 3)], {"axis": 1}, opset=9),
    Case("Clip", [OFF], {"min": -0.5}, opset=7, **SINGLE),
    Case("Clip", [OFF], {"max": 0.5}, opset=10, **SINGLE),
    Case("Clip", [OFF], {"min": -0.5, "max": 3.4028234663852886e38}, opset=7, **SINGLE),
    Case("Dropout", [(3, 4)], {"ratio": 0.3}, opset=7),
    Case("OneHot", [const([0, 2, 5]), const(3), (2,)], opset=9),
    Case("Unsqueeze", [(2, 3)], {"axes": [0, 2]}, opset=7),
    Case("Slice", [(4, 5)], {"starts": [1, -3], "ends": [1000, 2**62], "axes": [0, 1]}, opset=7),
    Case("Pad", [(3, 4)], {"pads": [1, 2, 0, 1], "value": 1.5}, opset=7),
    *(Case("Pad", [(3, 4)], {"pads": [1, 2, 0, 1], "mode": mode}, opset=7) for mode in ("reflect", "edge")),
]


# -- the proof ----------------------------------------------------------------------------------------------------


def check_old(case: Case) -> None:
    """Build the case with a loss on every float output; compare loss and gradients with the original model's."""
    model, feeds = forward_model(case, case.symbolic), sample(case)
    forward = Executor(model, case.executor)
    values = forward(fed(model, feeds))
    outputs = [o.name for o in model.graph.output if is_float(o.type) and values[o.name].size]
    rng = np.random.default_rng(3)
    labels = {name: np.asarray(rng.standard_normal(values[name].shape), values[name].dtype) for name in outputs}
    names = wanted_inputs(case)
    built = build(
        _copy(model),
        Options(
            losses=tuple(LossSpec("mse", name, f"label_{name}") for name in outputs),
            grad_of_input=tuple(names),
            freeze=tuple(t.name for t in model.graph.initializer if is_float(tensor_type(t.data_type, None))),
        ),
    )
    run = Executor(built.model, case.executor)
    result = run({**fed(built.model, feeds), **{f"label_{name}": label for name, label in labels.items()}})

    def function(point: Arrays) -> float:
        found = forward(fed(model, point))
        return float(sum(np.mean((found[n].astype(float) - labels[n]) ** 2) for n in outputs))

    expected = function(feeds)
    single = any(label.dtype == np.float32 for label in labels.values())
    np.testing.assert_allclose(float(result["loss"]), expected, rtol=1e-5 if single else 1e-9)
    gradients = {name: result[built.training.gradients[name]] for name in names}
    for _ in range(2):
        found = directional(function, feeds, gradients, rng, case.step, 10 * case.floor * max(expected, 1e-3))
        assert found.error <= case.tolerance, f"{case} ({run.name}, from {forward.name}): {found}"


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _kind(case: Case) -> tuple[str, int]:
    return case.op, case.opset


OLD = list(old_rows())
BELOW = [case for case in OLD if case.opset < OLDEST_OPSET]
QUICK = by_operator(
    [*EXTRA, *(case for _, rows in groupby(sorted(BELOW, key=_kind), _kind) for case in islice(rows, 1))]
)


@pytest.mark.parametrize("rows", tiers(by_operator(sorted([*EXTRA, *OLD], key=_kind)), QUICK, 4))
def test_an_old_form(rows: list[Case], each: Each) -> None:
    each(rows, check_old)


def test_every_form_has_a_row() -> None:
    ops = {row.op for row in ROWS if not row.domain and not row.nodes}
    forms = {(op, opset) for op in ops for opset in versions(op)} - {("OptionalGetElement", 15)}  # knew no tensors
    assert forms <= {_kind(case) for case in (*EXTRA, *OLD)}


# -- what is no operator with a row -------------------------------------------------------------------------------
