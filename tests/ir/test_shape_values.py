"""Shapes that models compute are followed at every opset, and what is said of them is so at run time."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.ir.types import Shape, dtype_of, shape_of, tensor_type
from onnxgrad_cli.passes.prepare.infer_and_lower import infer_and_fold

RNG = np.random.default_rng(3)
SIZES = {"n": 2, "c": 3, "h": 4, "w": 5}


def typed(body: str, opset: int = 13, **constants: list[int]) -> Graph:
    """A graph with an input x of shape [n, c, h, w] and an output y."""
    stored = "".join(
        f"int64[{len(values)}] {name} = {{{', '.join(map(str, values))}}}, " for name, values in constants.items()
    )
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[n, c, h, w] x) => (float y) <{stored.removesuffix(", ")}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.CopyFrom(tensor_type(TensorProto.FLOAT, None))
    graph = Graph(model)
    infer_and_fold(graph)
    return graph


def check(graph: Graph) -> Shape:
    """See that the shapes that were inferred are those of a run, each symbol one size; returns that of y."""
    model = graph.commit()
    made = [name for name in graph.made() if dtype_of(graph.types.get(name))]
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_value_info(name, tensor_type(dtype_of(graph.types[name]), None)) for name in made
    )
    got = Executor(model, fallback=False)({"x": np.float32(RNG.standard_normal([*SIZES.values()]))})
    bound: dict[str, int] = dict(SIZES)
    for name, array in got.items():
        shape = shape_of(graph.types[name])
        assert shape is not None, name
        assert len(shape) == array.ndim, name
        for known, size in zip(shape, array.shape, strict=True):
            assert size == (bound.setdefault(known, size) if isinstance(known, str) else known), (name, shape)
    result = shape_of(graph.types["y"])
    assert result is not None
    return result


@pytest.mark.parametrize("opset", [13, 14, 18, 22])
@pytest.mark.parametrize(
    ("body", "constants", "expected"),
    [
        ("s = Shape(x) r = Reshape(x, k) e = Exp(r) y = Reshape(e, s)", {"k": [0, 3, -1]}, ("n", "c", "h", "w")),
        (
            "s = Shape(x) a = Gather(s, i) b = Concat<axis = 0>(a, m) r = Reshape(x, b) y = Exp(r)",
            {"i": [0, 2], "m": [-1]},
            ("n", "h", None),
        ),
        (
            "s = Shape(x) a = Slice(s, o, t) d = ReduceProd<keepdims = 1>(a) b = Concat<axis = 0>(d, m) "
            "y = Reshape(x, b)",
            {"o": [2], "t": [4], "m": [-1]},
            (None, None),
        ),
        (
            "r = Reshape(x, k) s = Shape(r) a = Gather(s, o) f = Div(a, k4) b = Concat<axis = 0>(f, k4, m) "
            "z = Tile(x, q) u = Reshape(z, l) v = Shape(u) e = Gather(v, o) g = Div(e, k4) "
            "p = Concat<axis = 0>(g, m) y = Reshape(z, p)",
            {"k": [0, -1], "o": [0], "k4": [4], "m": [-1], "q": [4, 1, 1, 1], "l": [0, -1]},
            ("n", None),
        ),
        ("s = Shape(x) i = Identity(s) y = ConstantOfShape(i)", {}, ("n", "c", "h", "w")),
        ("e = ReduceMean<axes = [1, 2, 3]>(x) s = Shape(x) i = Max(s, j) y = Expand(e, i)", {"j": [1, 1, 1, 1]}, None),
        ("r = Reshape(x, k) t = Tile(r, q) y = Reshape(t, l)", {"k": [0, -1], "q": [4, 1], "l": [4, -1]}, (4, None)),
        (
            "d = Reshape(x, k) t = Transpose<perm = [1, 0]>(d) s = Shape(d) b = Slice(s, m, e, , m) y = Reshape(t, b)",
            {"k": [12, -1], "m": [-1], "e": [-9]},
            (None, 12),
        ),
        (
            "d = Reshape(x, k) s = Shape(d) a = Gather(s, i) f = Cast<to = 1>(a) g = Cast<to = 1>(t) h = Div(f, g) "
            "p = Mul(h, g) q = Cast<to = 7>(p) b = Concat<axis = 0>(m, q) r = Reshape(d, b) y = Add(r, d)",
            {"k": [-1, 15], "i": [1], "t": [2], "m": [-1]},
            None,
        ),
    ],
)
def test_shapes_are_followed(
    body: str, constants: dict[str, list[int]], expected: tuple[int | str | None, ...] | None, opset: int
) -> None:
    if opset > 13 and "axes = " in body:
        pytest.skip("its axes became an input")
    found = check(typed(body, opset, **constants))
    for known, size in zip(found, expected or found, strict=True):
        assert size in (None, known), (found, expected)


def test_a_multiple_of_a_size_is_the_same_wherever_it_comes_from() -> None:
    graph = typed("r = Reshape(x, k) a = Tile(r, q) b = Concat<axis = 0>(r, r, r) y = Add(a, b)", k=[0, -1], q=[3, 1])
    assert shape_of(graph.types["a"])[:1] == ("3*n",)  # type: ignore[index]
    check(graph)


def test_a_name_that_looks_like_a_multiple_is_an_inputs_own() -> None:
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["3*n", 2])
    nodes = [helper.make_node("Tile", ["x", "q"], ["a"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])
    y = helper.make_tensor_value_info("a", TensorProto.FLOAT, None)
    model = helper.make_graph(nodes, "g", [x, value], [y], [numpy_helper.from_array(np.int64([3, 1]), "q")])
    graph = Graph(helper.make_model(model, opset_imports=[helper.make_opsetid("", 13)], ir_version=8))
    infer_types(graph)
    assert shape_of(graph.types["a"])[0] != "3*n"  # type: ignore[index]


def _scaled(dtype: type, made_by: list[NodeProto]) -> ModelProto:
    """A model that resizes by a scale that `made_by` makes of `k`, of a type."""
    nodes = [
        *made_by,
        helper.make_node("Conv", ["x", "v"], ["a"]),
        helper.make_node("Resize", ["a", "", "s"], ["b"], mode="linear"),
        helper.make_node("GlobalAveragePool", ["b"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 6, 7])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    stored = [
        numpy_helper.from_array(np.asarray([1, 1, 2, 1.5], dtype), "k"),
        numpy_helper.from_array(np.float32(RNG.standard_normal((4, 3, 1, 1))), "v"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("more", [False, True])
def test_the_scales_of_a_resize_are_folded(more: bool) -> None:
    steps = [helper.make_node("Cast", ["k"], ["t" if more else "s"], to=TensorProto.FLOAT)]
    if more:
        steps.append(helper.make_node("Identity", ["t"], ["s"]))
    built = build(_scaled(np.float16, steps))
    assert list(built.training.gradients) == ["v"]
    assert not any("k" in node.input for node in built.model.graph.node)
    fed = {"x": np.float32(RNG.standard_normal((2, 3, 6, 7))), "label": np.zeros((2, 4, 1, 1), np.float32)}
    plain = build(_scaled(np.float32, [helper.make_node("Identity", ["k"], ["s"])]))
    stored = {t.name: numpy_helper.to_array(t) for t in plain.model.graph.initializer}
    one = Executor(built.model, fallback=False)({**fed, "v": stored["v"]})
    other = Executor(plain.model, fallback=False)(fed)
    np.testing.assert_array_equal(one["v_grad"], other["v_grad"])
