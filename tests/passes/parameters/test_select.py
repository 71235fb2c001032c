"""Which tensors are trained by default, which are constants by role, and how the patterns override it."""

import numpy as np
import onnx
import pytest

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import ARGUMENT, UnsupportedError, UsageError
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.passes.parameters.select import FROZEN, QUANTIZED, UNTIED
from onnxgrad_cli.record import Training
from tests.facts import raises


def options_in(reason: str) -> list[str]:
    """The options that a reason names."""
    return [f"{name}={value}" if value else name for name, value in ARGUMENT.findall(reason)]


def is_cut(reason: str, operator: str) -> bool:
    """Return True if a weight isn't trained because its only path to the loss ends at an operator."""
    return reason.startswith(f"{UNTIED}: ") and f" {operator} '" in reason


def training(text: str, header: str = '<ir_version: 10, opset_import: ["" : 18]>', **options: object) -> Training:
    return build(onnx.parser.parse_model(header + text), Options(**options)).training  # type: ignore[arg-type]


LINEAR = """
g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}>
{ h = MatMul(x, w) y = Add(h, b) }
"""


def test_every_weight_on_the_path_is_trained_in_order() -> None:
    assert training(LINEAR).trained == ["w", "b"]


def test_a_bias_of_one_element_is_a_weight_and_a_scale_is_not() -> None:
    found = training("""
    g (float[N, 3] x) => (float[N, 1] y) <float[3, 1] w = {1, 2, 3}, float[1] b = {1}, float[1] scale = {0.5}>
    { h = MatMul(x, w) s = Add(h, b) y = Mul(s, scale) }
    """)
    assert found.trained == ["w", "b"]
    assert found.heuristics == {"scale": "scalar"}


def test_scalars_are_constants_unless_named() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}, float temperature = {0.5}, float unused = {1}>
    { h = Mul(x, w) y = Div(h, temperature) }
    """
    found = training(text)
    assert found.trained == ["w"]
    assert found.heuristics == {"temperature": "scalar"}
    assert found.not_trained["unused"] == UNTIED
    assert training(text, train=("temp*",)).trained == ["temperature"]


def test_what_fills_a_mask_is_not_trained_where_all_is_asked_for() -> None:
    """Its gradient may be right, and its next value is no number."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 2] x, bool[N, 2] mask) => (float[N, 2] y) <float[2] w = {1, 2}>
    { h = Mul(x, w) m = Where(mask, h, fill) y = Softmax(m) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(-np.inf), "fill"))
    found = build(model, Options(train=("*",))).training
    assert found.trained == ["w"] and found.heuristics == {"fill": "scalar"}
    with raises(UnsupportedError, "refused") as caught:
        build(model, Options(train=("fill",)))
    assert any(each.startswith("fill: ") and "infinite" in each for each in caught.value.details)


def test_what_is_infinite_is_not_trained_whatever_reads_it() -> None:
    """As a vector that two operators read, of which one has no constants by role."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 2] x, bool[N, 2] mask) => (float[N, 2] y) <float[2] w = {1, 2}>
    { h = Mul(x, w) f = Identity(fill) m = Where(mask, h, f) y = Softmax(m) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([-np.inf]), "fill"))
    found = build(model).training
    assert found.trained == ["w"] and "infinite" in found.not_trained["fill"]


def test_infinite_values_beside_learned_ones_are_told() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    g (float[N, 2] x) => (float[N, 4] y) { h = MatMul(x, w) y = Add(h, b) }""")
    values = {"w": np.float32([[1, 2, 3, 5], [7, 6, 4, 1]]), "b": np.float32([0.3, -np.inf, 0.7, 1.2])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in values.items())
    found = build(model).training
    assert found.trained == ["w", "b"] and "b" in [caution.subject for caution in found.cautions]


def test_running_statistics_are_not_trained() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y)
    <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
    { y = BatchNormalization(x, s, b, mean, var) }
    """)
    assert found.trained == ["s", "b"]
    assert found.heuristics == {"mean": "setting", "var": "setting"}


def test_weights_in_constant_nodes_count() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y)
    { w = Constant<value: tensor = float[2, 2] {1, 2, 3, 4}>() y = MatMul(x, w) }
    """)
    assert found.trained == ["w"]


def test_a_tied_weight_gets_one_gradient_through_both_uses() -> None:
    text = """
    g (float[1, 2] x) => (float[1, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
    { h = MatMul(x, w) t = Transpose<perm = [1, 0]>(w) y = MatMul(h, t) }
    """
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 18]>' + text)
    built = build(model, Options(label="target"))
    assert built.training.trained == ["w"]
    import onnxruntime

    session = onnxruntime.InferenceSession(built.model.SerializeToString())
    x, target = np.array([[1.0, -2.0]], np.float32), np.array([[0.5, 0.25]], np.float32)
    (gradient,) = session.run(["w_grad"], {"x": x, "target": target})
    w = np.array([[1.0, 2.0], [3.0, 4.0]])
    error = x @ w @ w.T - target  # loss = mean(error^2), two elements
    expected = x.T @ error @ w + error.T @ x @ w
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


VIEWS = {
    "Mul": "Mul({0}, half)",
    "Concat": "Concat<axis = 1>({0}, {0})",
    "Unsqueeze": "Unsqueeze({0}, one)",
    "Reshape": "Reshape({0}, flat)",
    "Slice": "Slice({0}, zero, one)",
    "Transpose": "Transpose({0})",
}
"""What may stand between frequencies and a sine."""


def behind(names: list[str], function: str = "Sin") -> str:
    """A model of frequencies f with other nodes between their product and a function, and Cos."""
    chain = "".join(f"a{i + 1} = {VIEWS[name].format(f'a{i}')} " for i, name in enumerate(names))
    return f"""
    g (float[2, 1] t) => (float y)
    <float[1, 3] f = {{1, 0.1, 0.01}}, float[1] w = {{2}}, float half = {{0.5}}, int64[1] flat = {{-1}},
     int64[1] zero = {{0}}, int64[1] one = {{1}}>
    {{ a0 = Mul(t, f) {chain} s = {function}(a{len(names)}) c = Cos(a{len(names)}) v = Add(s, c)
      p = PRelu(v, w) y = ReduceSum<keepdims = 0>(p) }}
    """


def test_a_scale_whose_product_goes_elsewhere_is_a_weight() -> None:
    assert "f" in training(behind(["Mul"], "Tanh")).trained
    text = behind([]).replace("s = Sin(a0)", "e = Exp(a0) s = Sin(e)")
    assert "f" in training(text).trained


def test_nothing_to_train() -> None:
    with raises(UnsupportedError, "refused") as refused:
        training("g (float[N] x) => (float[N] y) { y = Relu(x) }")
    assert not refused.value.details and options_in(refused.value.hint or "") == ["grad_of_input='*'"]
    assert training("g (float[N] x) => (float[N] y) { y = Relu(x) }", grad_of_input=("*",)).grad_of_input == ["x"]


def test_what_was_not_named_says_by_which_choices() -> None:
    assert options_in(training(LINEAR, train=("w",)).not_trained["b"]) == ["train"]
    assert options_in(training(LINEAR, preset=("bias",)).not_trained["w"]) == ["preset='bias'"]
    found = training(LINEAR, train=("b",), preset=("bias",), train_last=1, freeze=("w",))
    assert (found.trained, found.not_trained) == (["b"], {"w": FROZEN})
    text = LINEAR.replace("h = MatMul(x, w)", "r = MatMul(x, v) h = MatMul(r, w)").replace(
        "<float", "<float[3, 3] v, float"
    )
    text = text.replace("float[3, 3] v", "float[3, 3] v = {1, 2, 3, 4, 5, 6, 7, 8, 9}")
    found = training(text, train=("b",), preset=("bias",), train_last=1)
    assert found.trained == ["w", "b"]
    assert options_in(found.not_trained["v"]) == ["train", "preset='bias'", "train_last=1"]


def test_adapters_leave_to_training_what_was_asked_for_by_name() -> None:
    found = training(LINEAR, lora=LoraSpec(1), train=("b",))
    assert "b" in found.trained and "w" not in found.trained
    assert ([adapter.weight for adapter in found.adapters], found.adaptable) == (["w"], ["w"])
    found = training(LINEAR, lora=LoraSpec(1))
    assert ([adapter.weight for adapter in found.adapters], found.adaptable) == (["w"], ["w", "b"])
    assert found.not_trained.keys() == {"w", "b"}


def test_what_is_frozen_by_name_gets_no_adapter() -> None:
    found = training(
        """
        g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 4}>
        { h = MatMul(x, w) y = MatMul(h, v) }
        """,
        lora=LoraSpec(1),
        freeze=("v",),
    )
    assert [adapter.weight for adapter in found.adapters] == ["w"]
    assert found.not_trained["v"] == FROZEN


def test_a_weight_asked_for_that_the_loss_does_not_depend_on_is_refused() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y, float[2] z) <float[2] w = {1, 2}, float[2] v = {1, 2}, float[2] u = {1, 2}>
    { y = Mul(x, w) z = Mul(v, u) }
    """
    with raises(UnsupportedError, "refused", "train", "v", "y"):
        training(text, train=("v", "u", "w"))
    found = training(text, train=("v", "w"), freeze=("v",))
    assert (found.trained, found.not_trained["v"]) == (["w"], FROZEN)
    assert training(text).trained == ["w"]


def test_a_path_ends_where_floats_become_integers() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}, float[2] v = {1, 2}, float[2, 2] table = {1, 2, 3, 4}>
    { p = Mul(x, v) i = ArgMax<axis = 1, keepdims = 0>(p) e = Gather(table, i) y = Mul(e, w) }
    """)
    assert found.trained == ["w", "table"]
    assert is_cut(found.not_trained["v"], "ArgMax")


@pytest.mark.parametrize("function", ["Sign", "Floor"])
def test_a_path_ends_where_a_derivative_is_zero_by_mathematics_and_others_go_on(function: str) -> None:
    found = training(f"""
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {{1, 2}}, float[2] v = {{1, 2}}>
    {{ p = Mul(x, w) q = Mul(x, v) s = {function}(q) y = Add(p, s) }}
    """)
    assert found.trained == ["w"]
    assert is_cut(found.not_trained["v"], function)


INDICES = """
g (float[N, 2] x) => (float[N, 1, 2] y) <float[2] w = {1, 2}, float[2] v = {1, 2}, float[2, 2] table = {1, 2, 3, 4},
 int64[1] one = {1}>
{ p = Mul(x, v) top, i = TopK(p, one) e = Gather(table, i) y = Mul(e, w) }
"""
"""v decides which indices are looked up, and nothing else."""

FOREIGN = INDICES.replace("top, i = TopK(p, one)", "i = my.ops.Best(p)").replace("int64[1] one = {1}", "int64[N, 1] i")
"""The same by an operator of others."""

TWO_DOMAINS = '<ir_version: 10, opset_import: ["" : 18, "my.ops" : 2]>'


def test_indices_of_an_operator_that_has_a_rule_end_a_path() -> None:
    found = training(INDICES)
    assert found.trained == ["w", "table"]
    assert is_cut(found.not_trained["v"], "TopK")


def test_a_path_goes_on_through_integers_that_stand_for_floats() -> None:
    text = """
    g (float[N, 2] x) => (float[2, N] y) <float[2] v = {1, 2}, float s = {0.5}>
    { p = Mul(x, v) q = QuantizeLinear(p, s) d = DequantizeLinear(q, s) y = Transpose(d) }
    """
    found = training(text, quantization="ste")
    assert (found.trained, found.not_trained) == (["v"], {"s": "quantization scale"})
    other = text.replace("d = DequantizeLinear(q, s) y = Transpose(d)", "t = Transpose(q) y = DequantizeLinear(t, s)")
    assert training(other, quantization="ste").trained == ["v"]


def test_a_rule_counts_at_the_version_that_the_model_imports() -> None:
    """Were the rules looked up at another version, there would be none, and what has none ends no path."""
    with registry.scoped():
        registry.rule("Best", domain="my.ops", versions=(2, 2))(lambda op, g, y, x: None)
        registry.rule("TopK", versions=(10, None), override=True)(lambda op, gs, ys, x, k: None)
        for text, operator in ((FOREIGN, "my.ops::Best"), (INDICES, "TopK")):
            assert is_cut(training(text, TWO_DOMAINS).not_trained["v"], operator)


def test_what_has_no_rule_ends_no_path() -> None:
    found = training(FOREIGN, TWO_DOMAINS)
    assert "v" in found.trained
    assert "v" in [caution.subject for caution in found.cautions if caution.kind == "zero gradient"]
    with raises(UnsupportedError, "refused", "Best_i", "my.ops::Best"):
        training(FOREIGN.replace("int64[N, 1] i", "float[N, 2] i").replace("Gather(table, i)", "Neg(i)"), TWO_DOMAINS)


def test_a_weight_that_is_reached_through_stopped_operands_alone_says_so() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}, float[2] v = {1, 2}, float[2] u = {1, 2}>
    { h = Mul(x, w) p = Add(x, v) s = Sigmoid(p) y = Mul(h, s) }
    """
    with registry.scoped():
        registry.stop_gradient("Mul", [1])
        found = training(text.replace("Mul(x, w)", "Add(x, w)"))
    assert found.trained == ["w"]
    assert found.not_trained.keys() == {"v", "u"} and found.not_trained["u"] == UNTIED
    assert "stopped" in found.not_trained["v"]
    assert training(text).trained == ["w", "v"]


def test_statistics_that_a_training_updates_are_told_of() -> None:
    found = training(
        """
        g (float[N, 2] x) => (float[N, 2] y)
        <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] mean = {0, 0}, float[2] var = {1, 1}>
        { y = BatchNormalization(x, s, b, mean, var) }
        """,
        mode="train",
    )
    assert found.trained == ["s", "b"]
    assert found.not_trained.keys() == found.state.keys() == {"mean", "var"}
    assert all(f"'{found.state[name]}'" in reason for name, reason in found.not_trained.items())


def test_constants_of_the_preparation_are_no_weights() -> None:
    """The definition of a MeanVarianceNormalization brings a small number of its own."""
    found = training("""
    g (float[2, 2] x) => (float[2, 2] y) <float[2] w = {1, 2}>
    { h = Mul(x, w) y = MeanVarianceNormalization<axes = [0]>(h) }
    """)
    assert (found.trained, found.not_trained) == (["w"], {})


def test_quantized_weights_are_told_of() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y) <int8[2] q = {1, 2}, float scale = {0.5}, float[2] w = {1, 2}>
    { d = DequantizeLinear(q, scale) h = Mul(x, d) y = Mul(h, w) }
    """)
    assert found.trained == ["w"]
    assert found.not_trained["q"] == QUANTIZED and found.heuristics == {"scale": "setting"}


def test_quantized_values_are_no_quantized_weights() -> None:
    found = training("""
    g (float[N, 2] x) => (float[N, 2] y) <float scale = {0.5}, float[2] w = {1, 2}>
    { q = QuantizeLinear(x, scale) d = DequantizeLinear(q, scale) y = Mul(d, w) }
    """)
    assert (found.trained, found.not_trained) == (["w"], {"scale": "quantization scale"})


@pytest.mark.parametrize(("others", "told"), [(3, "'a', 'b', 'c'"), (6, "'a', 'b', 'c', 'd', 'e', ...")])
def test_a_weight_that_an_exporter_has_merged_is_told_of(others: int, told: str) -> None:
    copies = "".join(f"{name} = Identity(w) " for name in "abcdef"[:others])
    text = f"""
    g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {{1, 2}}>
    {{ {copies} k = Identity(x) y = Sum({", ".join("abcdef"[:others])}, w, k) }}
    """
    merged = [caution for caution in training(text).cautions if "is read by" in caution.text]
    ((kind, name, said),) = [(caution.kind, caution.subject, caution.text) for caution in merged]
    assert (kind, name) == ("note", "w")
    assert told in said and options_in(said) == ["untie"]
    assert not [
        caution for caution in training(text, freeze=("w",), grad_of_input=("x",)).cautions if "is read" in str(caution)
    ]


def test_what_is_said_where_nothing_is_left() -> None:
    with raises(UnsupportedError, "refused") as refused:
        training(LINEAR, freeze=("*",))
    assert refused.value.details == (f"w: {FROZEN}", f"b: {FROZEN}")
    assert options_in(refused.value.hint or "") == ["freeze"]
    weights = [f"w{i}" for i in range(21)]
    many = ", ".join(f"float[2] {name} = {{1, 2}}" for name in weights)
    with pytest.raises(UnsupportedError) as refused:
        training(f"g (float[N, 2] x) => (float[N, 2] y) <{many}> {{ y = Sum(x, {', '.join(weights)}) }}", freeze=("*",))
    assert refused.value.details == tuple(f"{name}: {FROZEN}" for name in weights[:20])
    with raises(UsageError, "unknown_name", "grad_of_input", "i"):
        training(LINEAR.replace("(float[N, 3] x)", "(float[N, 3] x, int64 i)"), grad_of_input=("i",))
    with raises(UsageError, "unknown_name", "train", "bias"):
        training(LINEAR, train=("bias",))


@pytest.mark.parametrize(("values", "trained"), [("8, 16, 32", False), ("8, 16, 32.5", True)])
def test_whole_numbers_are_constants_with_a_caution(values: str, trained: bool) -> None:
    found = training(f"""
    g (float[N, 3] x) => (float[N, 3] y) <float[3, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, float[3] s = {{{values}}}>
    {{ h = MatMul(x, w) y = Mul(h, s) }}
    """)
    assert ("s" in found.trained) == trained
    texts = [caution.text for caution in found.cautions if caution.subject == "s"]
    assert list(map(options_in, texts)) == [["train='s'"]] * (not trained)


def test_what_only_its_values_speak_against_is_trained_where_there_is_nothing_else() -> None:
    found = training("g (float[N, 3] x) => (float[N, 3] y) <float[3] s = {8, 16, 32}> { y = Mul(x, s) }")
    assert (found.trained, [c for c in found.cautions if c.subject == "s"]) == (["s"], [])
    text = "g (float[N, 2] x) => (float[N, 2] y) <float s = {2}> { y = Mul(x, s) }"
    with raises(UnsupportedError, "refused") as refused:
        training(text)
    assert "Mul" in refused.value.details[0]
