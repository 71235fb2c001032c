"""The reverse walk over whole graphs: cotangents against derivatives worked out by hand, in numpy.

The rules of single operators are proved elsewhere; here is what the walk itself does: it adds up, stops, leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import on_the_way
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.inference import infer_types
from onnxgrad_cli.record import Training

HEAD = '<ir_version: 8, opset_import: ["": 18, "my.ops": 1]>'


def graph_of(text: str) -> Graph:
    graph = Graph(onnx.parser.parse_model(f"{HEAD} {text}"))
    infer_types(graph)
    return graph


def gradients(
    text: str, wanted: list[str], feeds: Mapping[str, np.ndarray], seeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray | None]:
    """The cotangents of some values, given those of others."""
    graph = graph_of(text)
    op = Op(graph)
    for name in seeds:
        graph.add_input(f"g_{name}", graph.types[name])
    found = differentiate(graph, {name: op.val(f"g_{name}") for name in seeds}, wanted, op)
    graph.nodes.extend(op.nodes)
    known = {name: found[name] for name in wanted}
    live = [value for value in known.values() if value is not None]
    del graph.proto.graph.output[:]
    for value in live:
        graph.add_output(value.name, value.type)
    model = graph.commit()
    onnx.checker.check_model(model)
    given = {**feeds, **{f"g_{name}": seed for name, seed in seeds.items()}}
    results = dict(zip([v.name for v in live], ReferenceEvaluator(model).run(None, given), strict=True)) if live else {}
    return {name: None if value is None else results[value.name] for name, value in known.items()}


RNG = np.random.default_rng(0)
X, W, G = (RNG.uniform(0.5, 2, shape) for shape in ((3, 4), (4, 2), (3, 2)))


def test_the_chain_rule() -> None:
    text = "g (double[3, 4] x, double[4, 2] w) => (double[3, 2] y) { h = MatMul(x, w) y = Tanh(h) }"
    found = gradients(text, ["x", "w", "h"], {"x": X, "w": W}, {"y": G})
    inner = G * (1 - np.tanh(X @ W) ** 2)
    np.testing.assert_allclose(found["h"], inner)
    np.testing.assert_allclose(found["x"], inner @ W.T)
    np.testing.assert_allclose(found["w"], X.T @ inner)


def test_what_is_read_often_adds_up() -> None:
    """By several nodes, twice by one, and with a cotangent of its own."""
    text = "g (double[3, 4] x) => (double[3, 4] y) { h = Exp(x) q = Mul(h, h) y = Mul(q, x) }"
    gy, gh = RNG.standard_normal((2, 3, 4))
    found = gradients(text, ["x"], {"x": X}, {"y": gy, "h": gh})
    e = np.exp(X)
    np.testing.assert_allclose(found["x"], gy * (e * e + 2 * X * e * e) + gh * e)


def test_what_was_broadcast_is_summed_back() -> None:
    text = "g (double[3, 4] x, double[4] b, double s) => (double[3, 4] y) { h = Mul(x, b) y = Mul(h, s) }"
    b, s, g = RNG.standard_normal(4), np.array(0.3), RNG.standard_normal((3, 4))
    found = gradients(text, ["b", "s"], {"x": X, "b": b, "s": s}, {"y": g})
    np.testing.assert_allclose(found["b"], (g * X * s).sum(0))
    np.testing.assert_allclose(found["s"], (g * X * b).sum())


def test_what_does_not_reach_is_none() -> None:
    text = """g (double[3, 4] x, double[3, 4] z, double[3, 4] u) => (double[3, 4] y)
        { d = Neg(u) f = Floor(z) y = Add(x, f) }"""
    found = gradients(text, ["x", "z", "u"], {"x": X, "z": X, "u": X}, {"y": X})
    assert found["z"] is None and found["u"] is None
    np.testing.assert_array_equal(found["x"], X)


def test_the_forward_graph_stays_and_only_what_is_wanted_is_written() -> None:
    graph = graph_of("g (double[3, 4] x, double[4, 2] w) => (double[3, 2] y) { h = MatMul(x, w) y = Tanh(h) }")
    before = [node.SerializeToString() for node in graph.nodes]
    graph.add_input("g", graph.types["y"])
    op = Op(graph)
    found = differentiate(graph, {"y": op.val("g")}, ["w"], op)
    assert [node.SerializeToString() for node in graph.nodes] == before
    assert found["w"] is not None and "x" not in found
    assert sum(node.op_type in ("MatMul", "Gemm") for node in op.nodes) == 1
    active, needed = on_the_way(graph, ["w"], ["y"])
    assert {"w", "h", "y"} <= active and "x" not in active
    assert {"w", "h", "y"} <= needed


def test_every_node_without_a_derivative_is_named_at_once() -> None:
    graph = graph_of("""g (float[3] x) => (float[3] y)
        { a = my.ops.Twirl(x) b = Exp(a) c = my.ops.Swirl(b) e = my.ops.Beside(x) y = Neg(c) }""")
    op = Op(graph)
    graph.types.update(dict.fromkeys("abcey", graph.types["x"]))
    graph.add_input("g", graph.types["x"])
    with pytest.raises(UnsupportedError) as error:
        differentiate(graph, {"y": op.val("g")}, ["x"], op)
    text = " ".join(str(refusal) for refusal in error.value.refusals)
    assert len(error.value.refusals) == 2 and "Twirl" in text and "Swirl" in text and "Beside" not in text


def test_gradients_stop_where_it_was_declared() -> None:
    text = "g (double[3, 4] x, double[4, 2] w) => (double[3, 2] y) { y = MatMul(x, w) }"
    with registry.scoped():
        registry.stop_gradient("MatMul", [0])
        found = gradients(text, ["x", "w"], {"x": X, "w": W}, {"y": G})
    assert found["x"] is None
    np.testing.assert_allclose(found["w"], X.T @ G)
    assert gradients(text, ["x"], {"x": X, "w": W}, {"y": G})["x"] is not None


def test_what_is_wanted_is_no_constant() -> None:
    """A weight of the file that is trained may change: nothing is computed from its values at build time."""
    graph = graph_of("g (double[2] x) => (double[2] y) <double[2] w = {1, 2}> { y = Mul(x, w) }")
    assert graph.constant("w") is not None
    graph.add_input("g", graph.types["y"])
    op, training = Op(graph), Training()
    differentiate(graph, {"y": op.val("g")}, ["w"], op, training)
    assert graph.constant("w") is None


def test_seeds_of_another_emitter_are_refused() -> None:
    graph = graph_of("g (double[2] x) => (double[2] y) { y = Neg(x) }")
    with pytest.raises(ValueError, match="another emitter"):
        differentiate(graph, {"y": Op(graph).val("y")}, ["x"], Op(graph))
