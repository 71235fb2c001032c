"""The order of the nodes that the backward pass writes, and that nothing of them stays in memory beside the model."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.models.files import chain
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.cost.live_memory import run_order
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.ir.node_values import reads


def test_values_of_the_backward_part_are_gone_after_it_without_a_search_for_cycles(tmp_path: Path) -> None:
    def values() -> int:
        return sum(type(thing) is Val for thing in gc.get_objects())

    path = chain(100, tmp_path / "chain.onnx")
    gc.collect()
    gc.disable()
    try:
        before = values()
        made = build(path, Options(losses=(LossSpec("mse"),)))
        left = values() - before
    finally:
        gc.enable()
    assert len(made.graph.nodes) > 300
    assert left < 60


def test_onnxruntime_makes_each_mask_when_it_has_the_cotangent_that_it_is_for() -> None:
    """Not all of them before the first: then they would lie in memory together."""
    depth, rng = 4, np.random.default_rng(0)
    nodes = [
        node
        for i in range(depth)
        for node in (
            helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"h{i}"], f"product{i}"),
            helper.make_node("Relu", [f"h{i}"], [f"x{i + 1}"], f"relu{i}"),
        )
    ]
    first, last = (helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, ["n", 3]) for i in (0, depth))
    weights = [numpy_helper.from_array(rng.standard_normal((3, 3)).astype("f"), f"w{i}") for i in range(depth)]
    graph = helper.make_graph(nodes, "g", [first], [last], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    made = build(model, Options(losses=(LossSpec("mse"),))).graph.nodes
    makers = {name: i for i, node in enumerate(made) for name in node.output}
    course = [made[i] for i in run_order([[makers[name] for name in reads(node) if name in makers] for node in made])]
    makers = {name: i for i, node in enumerate(course) for name in node.output}
    masked = [
        (i, makers[name])
        for i, node in enumerate(course)
        for name in reads(node)
        if course[makers.get(name, 0)].op_type == "HardSigmoid"
    ]
    assert len(masked) == depth
    assert all(used == mask + 1 for used, mask in masked)
