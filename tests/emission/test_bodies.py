"""Loops and branches that are written give what numpy does, in each of their forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxgrad_cli.emission import bodies
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.type_inference import infer_types
from onnxgrad_cli.record import Training

X = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
START = np.float32([1, 2])


def emitter() -> Op:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[3, 2] x, float[2] start, bool on) => () {}'
    graph = Graph(onnx.parser.parse_model(text))
    infer_types(graph)
    return Op(graph)


def run(op: Op, *results: Val, on: bool = True) -> list[np.ndarray]:
    op.graph.nodes.extend(op.nodes)
    for result in results:
        op.graph.add_output(result.name, result.type)
    model = op.graph.commit()
    onnx.checker.check_model(model, full_check=True)
    found = Executor(model)({"x": X, "start": START, "on": np.array(on)})
    return [found[result.name] for result in results]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("form", ["scan", "unrolled"])
def test_steps(form: str, reverse: bool) -> None:
    """s <- 2 s + x from each row to the next; each step returns s and its square, of which the first is a state too."""

    def step(op: Op, states: list[Val], rows: list[Val]) -> tuple[list[Val], list[Val]]:
        after = states[0] * 2 + rows[0]
        return [after], [after, after * after]

    op = emitter()
    op.training, op.node = Training(), onnx.helper.make_node("RNN", ["x"], ["y"], name="node")
    op.training.kernel_variants.prefer = lambda *_: form
    states, results = bodies.scan(op, step, [op.val("start")], [op.val("x")], reverse=reverse)
    assert ("Scan" in {node.op_type for node in op.nodes}) == (form == "scan")
    state, wanted = START, np.zeros_like(X)
    for i in range(3)[::-1] if reverse else range(3):
        state = wanted[i] = state * 2 + X[i]
    last, every, squares = run(op, *states, *results)
    np.testing.assert_allclose(last, state, rtol=1e-6)
    np.testing.assert_allclose(every, wanted, rtol=1e-6)
    np.testing.assert_allclose(squares, wanted**2, rtol=1e-6)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("names", [["x"], ["x", "start"]])
@pytest.mark.parametrize("write", [bodies.when, bodies.select])
def test_values_are_replaced_where_a_condition_holds(
    write: Callable[..., dict[str, Val]], names: list[str], on: bool
) -> None:
    def then(op: Op) -> Mapping[str, Val]:
        op.scope = "elsewhere"
        return {name: op.val(name) * 3 for name in names}

    op = emitter()
    op.scope = "here"
    found = write(op, op.val("on"), then)
    assert list(found) == names and op.scope == "here"
    for name, value in zip(names, run(op, *found.values(), on=on), strict=True):
        given = {"x": X, "start": START}[name]
        np.testing.assert_allclose(value, given * 3 if on else given)
