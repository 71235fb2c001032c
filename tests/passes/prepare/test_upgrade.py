"""Operators of old opsets are rewritten for newer ones, step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs, helper, numpy_helper

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.kernels import newest_loaded
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Arrays, shape_of
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare.opset import OLDEST_OPSET
from onnxgrad_cli.passes.prepare.upgrade import CHANGES, upgrade
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.autodiff.test_opsets import _copy, _plain
from tests.facts import raises

OLDEST = 7


def raised(model: onnx.ModelProto, opset: int = NEWEST_OPSET) -> onnx.ModelProto:
    """A copy of the model at another opset."""
    graph = Graph(_copy(model))
    infer_types(graph)
    upgrade(graph, opset)
    return graph.commit()


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


def parse(text: str, opset: int, more: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}{more}]> {text}')


@pytest.mark.parametrize(("opset", "axis"), [(7, 1), (11, -2), (12, 0)])
def test_hardmax_over_several_axes(opset: int, axis: int) -> None:
    text = "g (float[2, 3, 4] x) => (float[2, 3, 4] y) { h = Hardmax<axis = %d>(x) y = Mul(x, h) }"
    model = parse(text % axis, opset)
    x = np.random.default_rng(0).uniform(-2, 2, (2, 3, 4)).astype(np.float32)
    for newest in (OLDEST_OPSET, newest_loaded(NEWEST_OPSET)):
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
        found = Executor(raised(model, newest_loaded(NEWEST_OPSET)))(feeds)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


REFUSED = [
    (10, "float[N] x, float[1] s", "y = Resize(x, s)", ("Resize", "s")),
    (7, "float[2, 3] x", "y, m = Dropout(x) z = Neg(m)", ("Dropout", "10")),
    (8, "float[2, 3] x", "y = Det(x)", ("Det", "8")),
    (
        7,
        "float[2, 3] x, float[3] s",
        "y, m, v = BatchNormalization<spatial = 0>(x, s, s, s, s) z = Neg(m)",
        ("BatchNormalization", "0"),
    ),
    (
        9,
        "float[2, 3] x, float[3] s",
        "y, m, v, p, q = BatchNormalization(x, s, s, s, s) z = Neg(p)",
        ("BatchNormalization", "saved_mean", "saved_var", "14"),
    ),
]


@pytest.mark.parametrize(("opset", "inputs", "nodes", "why"), REFUSED)
def test_what_has_no_newer_form_is_refused_by_name(opset: int, inputs: str, nodes: str, why: tuple[str, ...]) -> None:
    outputs = "float z" if "z =" in nodes else "float y"
    graph = Graph(parse(f"g ({inputs}) => ({outputs}) {{ {nodes} }}", opset))
    with raises(UnsupportedError, "refused", "y", *why):
        upgrade(graph, NEWEST_OPSET)


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
