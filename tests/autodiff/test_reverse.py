"""The reverse walk over whole graphs: cotangents against derivatives worked out by hand, in numpy.

The rules of single operators are proved elsewhere; here is what the walk itself does: it adds up, stops, leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.activity import on_the_way
from onnxgrad_cli.autodiff.differentiation import Differentiation
from onnxgrad_cli.autodiff.reverse import differentiate, or_zero
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Fusion
from onnxgrad_cli.errors import Caution, Refusal, Unknown, UnsupportedError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
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
    run = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run
    results = dict(zip([v.name for v in live], run(None, given), strict=True)) if live else {}
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
    before = [node.message().SerializeToString() for node in graph.nodes]
    graph.add_input("g", graph.types["y"])
    op = Op(graph)
    found = differentiate(graph, {"y": op.val("g")}, ["w"], op)
    assert [node.message().SerializeToString() for node in graph.nodes] == before
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


# -- what is refused --------------------------------------------------------------------------------------------------


def walked(text: str, wanted: list[str], outputs: str = "", **settings: Any) -> tuple[Op, Differentiation]:
    """The emitter and the record of a walk from y, where outputs of others' operators are like x."""
    graph = graph_of(text)
    graph.types.update(dict.fromkeys([*outputs, "y"], graph.types["x"]))
    graph.add_input("g", graph.types["y"])
    op, training = Op(graph), Differentiation(**settings)
    differentiate(graph, {"y": op.val("g")}, wanted, op, training)
    return op, training


def refusals(text: str, wanted: list[str], outputs: str = "", **settings: Any) -> list[Refusal]:
    with pytest.raises(UnsupportedError) as error:
        walked(text, wanted, outputs, **settings)
    assert error.value.message.startswith(f"{len(error.value.refusals)} of {text.count(' = ')} nodes can't be")
    return list(error.value.refusals)


TWIRL = "g (double[3, 4] x) => (double[3, 4] y) { [one] a = Neg(x) [two] y = my.ops.Twirl(a, a) }"


def no_idea(op: Op, g: Any, y: Any, a: Any, b: Any) -> Any:
    raise Unknown("the size of a is unknown")


SHAPES = "export the model with shapes that do not depend on the values of its inputs"
WRONG_RULE = "correct the rule: it must return one cotangent for each input, in order"
RULES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "it says no, twice": (lambda op, g, y, a, b: (op.no("it spins", "hold it"),) * 2, "it spins", "hold it"),
    "of what is unknown": (no_idea, "the size of a is unknown", SHAPES),
    "of another shape": (
        lambda op, g, y, a, b: (op.sum(g, [0], keepdims=False), g),
        "its gradient rule returns a cotangent of shape [4] for 'a', which has [3, 4]",
        WRONG_RULE,
    ),
    "of another type": (
        lambda op, g, y, a, b: (g, op.cast(g, onnx.TensorProto.FLOAT)),
        "its gradient rule returns a cotangent of type FLOAT for 'a', which has the type DOUBLE",
        WRONG_RULE,
    ),
    "too few": (lambda op, g, y, a, b: g, "the gradient rule returns 1 cotangents, but the node has 2 inputs", ""),
    "it knows too few": (lambda op, g, y, a: g, "the gradient rule has 1 inputs, but the node has 2", ""),
}


@pytest.mark.parametrize("case", RULES)
def test_what_a_rule_does_not_cover_is_refused_once_with_its_hint(case: str) -> None:
    function, reason, hint = RULES[case]
    with registry.scoped():
        registry.rule("Twirl", domain="my.ops")(function)
        assert refusals(TWIRL, ["x"]) == [Refusal("two", "my.ops::Twirl", reason, hint)]
        assert refusals(TWIRL.replace("[two] ", ""), ["x"]) == [Refusal("y", "my.ops::Twirl", reason, hint)]


def test_why_a_node_has_no_rule() -> None:
    freeze = "freeze the weights before it with `freeze`"
    none = Refusal(
        "two",
        "my.ops::Twirl",
        "there is no gradient rule for my.ops::Twirl",
        f"add a rule for it with --rules FILE, or {freeze}",
    )
    assert refusals(TWIRL, ["x"]) == [none]
    with registry.scoped():
        registry.stop_gradient("Twirl", [1], domain="my.ops")
        why = "gradients are stopped at some of its operands, so it needs its own gradient rule"
        assert refusals(TWIRL, ["x"]) == [Refusal("two", "my.ops::Twirl", why, "add a rule for it with --rules FILE")]
        registry.refuse("Twirl", "it spins", "hold it", domain="my.ops")
        assert refusals(TWIRL, ["x"]) == [Refusal("two", "my.ops::Twirl", "it spins", "hold it")]
    standard = TWIRL.replace("my.ops.Twirl(a, a)", "Tan(a)")
    with registry.scoped():
        registry.rule("Tan", versions=(1, 1), override=True)(lambda op, g, y, x: g)  # of another version
        assert refusals(standard, ["x"]) == [Refusal("two", "Tan", "there is no proven gradient rule for Tan", freeze)]
    graph = graph_of(TWIRL)
    graph.unexpanded["two"] = "its definition needs a size"
    with pytest.raises(UnsupportedError) as error:
        differentiate(graph, {"y": (op := Op(graph)).val("x")}, ["x"], op)
    assert error.value.refusals == (Refusal("two", "my.ops::Twirl", "its definition needs a size", freeze),)


QUANTIZED = """g (float[3, 3] x, float s) => (float[3, 3] y)
{ [q] q = QuantizeLinear(x, s) [t] t = Transpose(q) [d] d = DequantizeLinear(t, s) [y] y = Mul(d, x) }"""


def test_integers_that_stand_for_floats_are_read_by_rules_that_know_them_alone() -> None:
    (refusal,) = refusals(QUANTIZED, ["x"], straight_through=True)
    assert refusal.node == "t" and "'q'" in refusal.reason
    with registry.scoped():
        registry.refuse("QuantizeLinear", "it rounds", override=True)
        assert refusals(QUANTIZED, ["x"]) == [Refusal("q", "QuantizeLinear", "it rounds")]  # and not what reads it
    at_once = QUANTIZED.replace("[t] t = Transpose(q) ", "").replace("DequantizeLinear(t", "DequantizeLinear(q")
    _, training = walked(at_once, ["x"], straight_through=True)
    assert {kind for kind, _ in training.rules} == {
        f"ai.onnx::{op}" for op in ("QuantizeLinear", "DequantizeLinear", "Mul")
    }


def test_what_reads_refused_integers_is_not_asked() -> None:
    """Else the reason would come with others that follow from it."""
    twirled = QUANTIZED.replace("Transpose(q)", "my.ops.Twirl(q)")
    with registry.scoped():
        registry.refuse("QuantizeLinear", "it rounds", override=True)
        registry.rule("Twirl", domain="my.ops")(lambda op, g, y, x: op.no("it spins"))
        assert refusals(twirled, ["x"], "t") == [Refusal("q", "QuantizeLinear", "it rounds")]


BRANCHES = """g (double[3, 3] x, double[3, 3] z, double[3, 3] u, bool b) => (double[3, 3] y) {
    [one] a = If(b) <then_branch = t1 () => (double[3, 3] p) { p = ONE(x, x) },
                     else_branch = e1 () => (double[3, 3] q) { q = Neg(x) }>
    [two] c = If(b) <then_branch = t2 () => (double[3, 3] r) { r = TWO(z, z) },
                     else_branch = e2 () => (double[3, 3] s) { s = Neg(z) }>
    y = END(a, c)
}"""


def test_refusals_in_bodies_are_listed_with_the_others() -> None:
    text = BRANCHES.replace("ONE", "my.ops.Twirl").replace("TWO", "my.ops.Swirl").replace("END", "Add")
    with pytest.raises(UnsupportedError) as error:
        walked(text, ["x", "z"])
    assert sorted(refusal.op_type for refusal in error.value.refusals) == ["my.ops::Swirl", "my.ops::Twirl"]


# -- what is recorded -------------------------------------------------------------------------------------------------


def test_rules_and_kinks_are_recorded_and_nodes_named_after_those_of_the_model() -> None:
    text = (
        "g (double[3, 4] x) => (double[3, 4] y) { [one] a = Exp(x) [two] b = Exp(a) c = Relu(b) y = my.ops.Twirl(c) }"
    )
    with registry.scoped():
        registry.rule("Twirl", domain="my.ops", kink="the left one")(lambda op, g, y, x: -g)
        op, training = walked(text, ["x"])
    used = {kind: count for (kind, _), count in training.rules.items()}
    assert used == {"ai.onnx::Exp": 2, "ai.onnx::Relu": 1, "my.ops::Twirl": 1}
    assert set(training.kinks) == {"Relu", "Twirl"} and training.kinks["Twirl"] == "the left one"
    scopes = {node.name.rsplit("/", 1)[0] for node in op.nodes}
    assert scopes == {"grad/one", "grad/two", "grad/c", "grad/y"}


def test_a_fusion_is_recorded_in_place_of_the_rules_of_its_nodes() -> None:
    gelu = "{1}e = Erf({1}z) {1}s = Add({1}e, one) {1}h = Mul({1}s, half) {2} = Mul({0}, {1}h)"
    gelus = " ".join(f"{i}z = Div({x}, root) {gelu.format(x, i, y)}" for x, i, y in [("x", "a", "u"), ("u", "b", "y")])
    weights = "double root = {1.4142135623730951}, double one = {1.0}, double half = {0.5}"
    _, training = walked(f"g (double[3, 4] x) => (double[3, 4] y) <{weights}> {{ {gelus} }}", ["x"])
    assert training.rules == {("ai.onnx::Gelu", "onnxgrad_cli.autodiff.rules.activation.gelu"): 2}


@pytest.mark.parametrize(("node", "label"), [("[two] y", "two"), ("y", "y")])
def test_a_stop_is_told_of(node: str, label: str) -> None:
    text = f"g (double[3, 3] x) => (double[3, 3] y) {{ a = Neg(x) {node} = MatMul(x, a) }}"
    with registry.scoped():
        registry.stop_gradient("MatMul", [1])
        _, training = walked(text, ["x"])
    said = f"stop_gradient stops the gradient of '{label}' (MatMul) with respect to its operand 1, 'a'"
    assert (training.cautions, training.partial) == ([Caution("note", label, said)], ["x"])


def test_a_stop_in_a_body_is_told_of_each_value_behind_it() -> None:
    text = BRANCHES.replace("ONE", "MatMul").replace("TWO", "MatMul").replace("END", "Add")
    with registry.scoped():
        registry.stop_gradient("MatMul", [1])
        _, training = walked(text, ["x", "z", "u"])
    assert training.partial == ["x", "z"]


PRODUCT = "g (double[3, 4] x, double[3, 4] c) => (double[3, 4] y) { h = Mul(x, c) y = Exp(h) }"


def test_a_fusion_is_asked_for_what_is_wanted_alone() -> None:
    asked = {}

    def rule(op: Op, g: Any, x: Any, c: Any, y: Any) -> Any:
        asked.update(x=op.wants(x), c=op.wants(c))
        return g * y * c, g * y * x

    graph = graph_of(PRODUCT)
    graph.add_input("g", graph.types["y"])
    op, training = Op(graph), Differentiation(fusions={"y": Fusion("my.ops::Both", ("x", "c"), ("y",), rule)})
    found = differentiate(graph, {"y": op.val("g")}, ["x"], op, training)
    assert asked == {"x": True, "c": False}
    assert found.keys() == {"x", "y"}
    assert [operator for operator, _ in training.rules] == ["my.ops::Both"]


def test_a_fusion_of_which_a_value_is_gone_leaves_the_work_to_the_rules() -> None:
    for inputs, saved in ((("x", "gone"), ("y",)), (("x", "c"), ("gone",))):
        _, training = walked(PRODUCT, ["x"], fusions={"y": Fusion("my.ops::Both", inputs, saved, no_idea)})
        assert {operator for operator, _ in training.rules} == {"ai.onnx::Exp", "ai.onnx::Mul"}


# -- sequences --------------------------------------------------------------------------------------------------------


def test_cotangents_of_a_sequence_add_up_element_by_element() -> None:
    text = """g (double[3, 4] x, double[3, 4] z) => (double[3, 4] y) <int64 one = {1}, int64 zero = {0}> {
        s = SequenceConstruct(x, z) a = SequenceAt(s, zero) b = SequenceAt(s, one) c = SequenceAt(s, zero)
        p = Mul(a, b) y = Mul(p, c) }"""
    z = X[::-1].copy()
    found = gradients(text, ["x", "z"], {"x": X, "z": z}, {"y": X})
    np.testing.assert_allclose(found["x"], 2 * X * X * z)
    np.testing.assert_allclose(found["z"], X * X * X)


# -- gradients that are zero ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["", "float", "double"])
@pytest.mark.parametrize("shape", [(3, 4), ()])
def test_zeros_have_the_type_and_shape_of_what_they_are_the_gradient_of(after: str, shape: tuple[int, ...]) -> None:
    """Where they are made after a value, neither what that value holds nor its type matters."""
    kind = after or "float"
    graph = graph_of(f"g (float{'[3, N]' if shape else ''} x, {kind}[2] u) => ({kind}[2] y) {{ y = Neg(u) }}")
    op, training = Op(graph), Differentiation()
    zero = or_zero(op, "x", None, training, op.val("y") if after else None)
    assert [(each.kind, each.subject) for each in training.cautions] == [("zero gradient", "x")]
    graph.nodes.extend(op.nodes)
    assert any("y" in node.input for node in op.nodes) == bool(after)
    graph.types[zero.name] = graph.types["x"]
    graph.add_output(zero.name)
    model = graph.commit()
    onnx.checker.check_model(model, full_check=True)
    (found,) = ReferenceEvaluator(model).run(
        [zero.name],
        {
            "x": np.full(shape, np.nan, np.float32),
            "u": np.array([np.nan, np.inf], {"float": np.float32, "double": np.float64}[kind]),
        },
    )
    assert (found.dtype, found.shape) == (np.float32, shape) and not found.any()


def test_a_gradient_of_which_paths_are_stopped_says_so() -> None:
    graph = graph_of("g (float[3] x, float[3] u) => (float[3] y) { y = Neg(u) }")
    op, training = Op(graph), Differentiation(partial=["x"])
    assert or_zero(op, "x", op.val("u"), training) is not None and not op.nodes
    or_zero(op, "x", None, training)
    or_zero(op, "y", op.val("u"), training)
    assert [(each.kind, each.subject) for each in training.cautions] == [("note", "x"), ("zero gradient", "x")]
    assert all("stopped" in each.text for each in training.cautions)
