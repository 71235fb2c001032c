"""Old models: each row of the table in the form its operator had at every opset from 7 on.

The measure is the one-node model as it stands, run at its own opset: neither the conversion nor the rules touch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs, helper, numpy_helper

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays, is_float, shape_of, tensor_type
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.passes.prepare.upgrade import CHANGES, upgrade
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


def raised(model: onnx.ModelProto, opset: int = NEWEST_OPSET) -> onnx.ModelProto:
    """A copy of the model at another opset."""
    graph = Graph(_copy(model))
    infer_types(graph)
    upgrade(graph, opset)
    return graph.commit()


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


NEUTRAL = {
    "select_last_index": 0, "right_window_size": -1, "left_window_size": -1, "ceil_mode": 0, "training_mode": 0,
    "saturate": 1, "round_mode": "up", "mode": "DCR", "axis": 1, "block_size": 0, "output_dtype": 0, "precision": 0,
    "layout": 0, "batch_dims": 0, "storage_order": 0, "noop_with_empty_axes": 0, "allowzero": 0, "antialias": 0,
    "keep_aspect_ratio_policy": "stretch", "reduction": "none", "start": 0, "sorted": 1, "largest": 1,
    "stash_type": 1,
}  # fmt: skip
"""Attributes that came later, with the default that says what was so before."""


def test_every_step_of_every_operator_is_known() -> None:
    """Where a schema gives the nodes of the one before it another form or meaning, there is a change for it."""
    history: dict[str, list[Any]] = {}
    for schema in defs.get_all_schemas_with_history():
        if not schema.domain and schema.since_version <= NEWEST_OPSET:
            history.setdefault(schema.name, []).append(schema)
    single = defs.OpSchema.FormalParameterOption.Single
    for op, schemas in history.items():
        schemas.sort(key=lambda schema: schema.since_version)
        for old, new in pairwise(schemas):
            if new.since_version <= OLDEST or (op, new.since_version) in CHANGES:
                continue
            step = f"{op} {old.since_version} -> {new.since_version}"
            assert not new.deprecated, step
            assert set(old.attributes) <= set(new.attributes), step
            for name, attribute in new.attributes.items():
                default = _plain(helper.get_attribute_value(attribute.default_value)) if _given(attribute) else None
                if name in old.attributes:
                    assert attribute.default_value == old.attributes[name].default_value, f"{step}: {name}"
                else:
                    assert not attribute.required and default in (None, NEUTRAL.get(name)), f"{step}: {name}"
            assert all(x.option != single for x in new.inputs[len(old.inputs) :]), step
            assert len(new.outputs) >= len(old.outputs), step


def _given(attribute: Any) -> bool:
    return bool(attribute.default_value.type)


# -- what is no operator with a row -------------------------------------------------------------------------------


def parse(text: str, opset: int, more: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}{more}]> {text}')


@pytest.mark.parametrize(("opset", "axis"), [(7, 1), (11, -2), (12, 0)])
def test_hardmax_over_several_axes(opset: int, axis: int) -> None:
    text = "g (float[2, 3, 4] x) => (float[2, 3, 4] y) { h = Hardmax<axis = %d>(x) y = Mul(x, h) }"
    model = parse(text % axis, opset)
    x = np.random.default_rng(0).uniform(-2, 2, (2, 3, 4)).astype(np.float32)
    for newest in (OLDEST_OPSET, NEWEST_OPSET):
        np.testing.assert_array_equal(Executor(raised(model, newest))({"x": x})["y"], Executor(model)({"x": x})["y"])


def test_constants_are_of_the_type_of_the_values() -> None:
    for dtype in ("float", "double", "float16"):
        model = parse(
            f"""
            g ({dtype}[2, 3] x) => ({dtype}[4, 3] y)
            {{ h = Clip<min = -1.0, max = 3.4028235e38>(x) y = Pad<pads = [1, 0, 1, 0], value = 2.0>(h) }}
            """,
            9,
        )
        with np.errstate(all="raise"):
            onnx.checker.check_model(raised(model), full_check=True)


def test_nodes_of_other_domains_stay() -> None:
    model = parse(
        """
        g (float[2, 3] x) => (float[2, 3] y)
        { a = Clip<min = -1.0>(x) b = com.microsoft.Gelu(a) c = my.ops.Clip<min = 0.0, axes = [1]>(b)
          y = my.ops.Softmax(c) }
        """,
        7,
        ', "com.microsoft" : 1, "my.ops" : 3',
    )
    found = raised(model)
    assert [node.op_type for node in found.graph.node] == ["Clip", "Gelu", "Clip", "Softmax"]
    assert list(found.graph.node[1:]) == list(model.graph.node[1:])
    assert {(e.domain, e.version) for e in found.opset_import} == {
        ("", NEWEST_OPSET), ("com.microsoft", 1), ("my.ops", 3)
    }  # fmt: skip


def test_graphs_inside_are_converted() -> None:
    model = parse(
        """
        g (bool c, float[1, 2, 4] x) => (float[1, 2, 8] y) <float[3] scales = {1, 1, 2}>
        {
            y = If(c) <
                then_branch = t () => (float[1, 2, 8] a)
                    { k = Clip<min = -0.5>(x) a = Resize<mode = "linear">(k, scales) },
                else_branch = e () => (float[1, 2, 8] b)
                    { s = Softmax(x) b = Concat<axis = 2>(s, s) }>
        }
        """,
        10,
    )
    x = np.random.default_rng(0).uniform(-2, 2, (1, 2, 4)).astype(np.float32)
    for c in (True, False):
        feeds = {"c": np.array(c), "x": x}
        expected = Executor(model)(feeds)["y"]
        np.testing.assert_allclose(Executor(raised(model))(feeds)["y"], expected, rtol=1e-6)


REFUSED = [
    (10, "float[N] x, float[1] s", "y = Resize(x, s)", "whether 's' shrinks or enlarges"),
    (7, "float[2, 3] x", "y, m = Dropout(x) z = Neg(m)", "its mask"),
    (8, "float[2, 3] x", "y = Det(x)", "does not have this operator"),
    (
        7,
        "float[2, 3] x, float[3] s",
        "y, m, v = BatchNormalization<spatial = 0>(x, s, s, s, s) z = Neg(m)",
        "spatial=0",
    ),
    (9, "float[2, 3] x, float[3] s", "y, m, v, p, q = BatchNormalization(x, s, s, s, s) z = Neg(p)", "saved_mean"),
]


@pytest.mark.parametrize(("opset", "inputs", "nodes", "why"), REFUSED)
def test_what_has_no_newer_form_is_refused_by_name(opset: int, inputs: str, nodes: str, why: str) -> None:
    outputs = "float z" if "z =" in nodes else "float y"
    graph = Graph(parse(f"g ({inputs}) => ({outputs}) {{ {nodes} }}", opset))
    with pytest.raises(UnsupportedError, match=why) as raised:
        upgrade(graph, NEWEST_OPSET)
    assert len(raised.value.refusals) == 1


def test_running_statistics_of_a_training_node_stay_outputs() -> None:
    text = """
    g (float[2, 3] x, float[3] s) => (float[2, 3] y, float[3] m, float[3] v)
    { y, m, v, p, q = BatchNormalization(x, s, s, s, s) }
    """
    (node,) = raised(parse(text, 9)).graph.node
    assert list(node.output) == ["y", "m", "v"]
    assert [a.i for a in node.attribute if a.name == "training_mode"] == [1]


NET = """
g (float[N, 1, 6, 6] x) => (float[N, 3] p)
<float[2, 1, 3, 3] k, float[2] kb, float[2] s, float[2] b, float[2] m, float[2] v, float[16, 3] w, float[3] wb>
{
    conv = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, k, kb)
    norm = BatchNormalization<epsilon = 0.001>(conv, s, b, m, v)
    soft = Softplus(norm)
    bound = Clip<min = 0.0, max = 6.0>(soft)
    pool = MaxPool<kernel_shape = [3, 3], strides = [3, 3]>(bound)
    up = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(pool)
    cut = Slice<axes = [2, 3], starts = [0, 0], ends = [2, 4]>(up)
    drop, mask = Dropout<ratio = 0.4>(cut)
    flat = Flatten(drop)
    gemm = Gemm(flat, w, wb)
    p = Softmax(gemm)
}
"""


def test_an_old_network_with_its_weights_as_inputs() -> None:
    """IR version 3, opset 7, as PyTorch and others exported in 2018."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 4, opset_import: ["" : 7]> {NET}')
    model.ir_version = 3
    for value in model.graph.value_info:
        low, high = (0.5, 1.5) if value.name == "v" else (-1, 1)
        array = rng.uniform(low, high, shape_of(value.type)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        model.graph.input.append(value)
    del model.graph.value_info[:]
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name not in ("m", "v")}
    x, label = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((4, 1, 6, 6), (4, 3)))
    built = build(_copy(model), Options(freeze=("m", "v"), grad_of_input=("x",)))
    assert built.graph.opset() == 16
    model.ir_version = 4  # the same model, whose weights onnxruntime lets us change
    forward = Executor(model)

    def function(point: Arrays) -> float:
        return float(np.mean((forward(point)["p"].astype(float) - label) ** 2))

    feeds = {"x": x, **weights}
    result = Executor(built.model)({"x": x, "label": label})
    np.testing.assert_allclose(result["loss"], function(feeds), rtol=1e-5)
    for name in feeds:
        gradient = {name: result[built.training.gradients[name]]}
        found = directional(function, feeds, gradient, rng, 3e-3, 1e-4)
        assert found.error < 1e-2, f"{name}: {found}"
