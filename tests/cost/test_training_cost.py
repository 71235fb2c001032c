"""The memory and the operations of a training step, counted by hand."""

from __future__ import annotations

import cProfile

import numpy as np
from onnx import helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.cost.training_cost import cost
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.options import Options
from onnxgrad_cli.record import Training
from onnxgrad_cli.report import make_report, render
from tests.report.test_build_report import f32, forward_cost, mlp, model


def test_backward_products_are_counted_per_gradient() -> None:
    built = build(mlp())
    found = make_report(built=built, sizes={"batch": 8}).cost
    assert found is not None
    products = {c.op: c for c in found.operators}["MatMul"]
    assert products.forward == 2 * 8 * 4 * 5 + 2 * 8 * 5 * 3
    assert products.backward == 2 * 8 * 4 * 5 + 2 * (2 * 8 * 5 * 3)  # dw1; dw2 and d(relu), but no dx
    assert (found.sizes, found.assumed, found.at_run_time) == ({"batch": 8}, {}, 0)
    assert found.weight_bytes == found.gradient_bytes == 4 * (20 + 15 + 3)


def test_kept_values_are_those_that_the_backward_part_reads() -> None:
    """y = sigmoid(reshape(x w)): the sigmoid needs its own output; the reshaped product is kept by nobody."""
    text = """g (float[batch, 4] x) => (float[batch, 3] y)
        { h = MatMul(x, w) s = Sigmoid(h) r = Reshape(s, k) y = Reshape(r, l) }"""
    weights = {"w": f32(4, 3), "k": np.array([-1]), "l": np.array([-1, 3])}
    built = build(model(text, **weights))
    found = make_report(built=built, sizes={"batch": 10}).cost
    assert found is not None
    made = {value.name: value for value in found.kept}
    assert made["s"].shape == (10, 3)
    assert made["s"].bytes == 10 * 3 * 4
    assert not {"x", "w", "h", "r", "y"} & set(made)
    assert found.kept_bytes == sum(value.bytes for value in found.kept)


def test_memory_goes_with_the_values_that_are_still_to_be_read() -> None:
    """Of n numbers of 4 bytes: h; h and s; the view r is s, and y takes the place of h, z that of y."""
    text = """g (float[n] x) => (float[m] z)
        { h = Exp(x) s = Sigmoid(h) r = Reshape(s, k) y = Add(r, h) z = Mul(y, r) }"""
    found = forward_cost(text, {"n": 10}, k=np.array([-1]))
    assert found.memory[:5] == [40, 80, 80, 80, 80]


def test_modules_cost_what_their_nodes_do() -> None:
    """The modules are those of the weights' names; a gradient counts with the node that it is of."""
    text = "g (float[n, 4] x) => (float[n, 3] y) { a = MatMul(x, net.0.w) b = Relu(a) y = MatMul(b, net.1.w) }"
    text = text.replace("net.0.w", "w0").replace("net.1.w", "w1")
    named = model(text, w0=f32(4, 5), w1=f32(5, 3))
    for tensor, name in zip(named.graph.initializer, ("net.0.w", "net.1.w"), strict=True):
        for node in named.graph.node:
            node.input[:] = [name if each == tensor.name else each for each in node.input]
        tensor.name = name
    found = make_report(built=build(named), sizes={"n": 8}).cost
    assert found is not None
    costs = {each.module: (each.forward, each.backward) for each in found.modules}
    assert costs["net.0"][0] == 2 * 8 * 4 * 5 + 8 * 5 and costs["net.1"][0] == 2 * 8 * 5 * 3
    assert costs["net.1"][1] == 2 * 2 * 8 * 5 * 3
    assert sum(each.forward for each in found.modules) == found.flops_forward
    assert sum(each.backward for each in found.modules) == found.flops_backward


def test_the_step_after_gathered_gradients_is_counted() -> None:
    """It stands in a branch; to gather takes an addition a weight besides, and the mean a division."""
    costs = []
    for runs in (1, 3):
        report = make_report(built=build(mlp(), Options(optimizer="adam", accumulate=runs)))
        assert report.cost is not None and report.cost.uncounted == {}
        costs.append(report.cost)
    plain, gathered = costs
    weights = 20 + 15 + 3
    assert 0 <= gathered.flops_optimizer - plain.flops_optimizer - 2 * weights < 10
    assert (plain.branches, gathered.branches) == (0, 1)
    assert "For 1 If" in render(report, "md")


def test_counting_takes_time_with_the_nodes() -> None:
    """Twice the nodes are twice the calls of functions, which no load of the machine changes."""

    def calls(count: int) -> int:
        nodes = [helper.make_node("Sigmoid", [f"x{i}"], [f"x{i + 1}"]) for i in range(count)]
        value = helper.make_tensor_value_info
        graph = Graph(
            helper.make_model(
                helper.make_graph(nodes, "g", [value("x0", 1, ["n", 4])], [value(f"x{count}", 1, ["n", 4])]),
                opset_imports=[helper.make_opsetid("", 18)],
            )
        )
        infer_types(graph)
        profile = cProfile.Profile()
        assert profile.runcall(cost, graph, Training(), {"n": 2}).flops_forward == count * 8
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(2_000) < 2.1 * calls(1_000)
