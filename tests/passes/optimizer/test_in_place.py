"""What may be replaced in the memory it lies in: whatever all readers of have run before its next value is written.

Which of the nodes that wait for nothing of each other runs first is the runtime's choice. So a reader must be among the
nodes that the next value is computed from: that no order can break.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.losses import LossSpec
from onnxgrad_cli.metadata import Roles, describe
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.slices import ELEMENTWISE

Wanted = Callable[[Roles, str], bool]
VARIANTS = {"adam": {"amsgrad": True}, "adamw": {"amsgrad": True}, "rmsprop": {"momentum": 0.9, "centered": True}}
"""Options with which an optimizer keeps all its slots."""

COUNT_NO_STEPS = {"sgd", "momentum", "nesterov", "rmsprop", "adagrad", "adadelta", "lion"}


@cache
def layers(size: int) -> onnx.ModelProto:
    rng, nodes = np.random.default_rng(0), []
    weights = [numpy_helper.from_array(rng.normal(0, 0.05, (size, size)).astype("f"), f"w{i}") for i in range(3)]
    for i in range(3):
        nodes.append(helper.make_node("MatMul", [f"a{i}", f"w{i}"], [f"h{i}"]))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"a{i + 1}"]))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size]) for name in ("a0", "a3")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def step(size: int, optimizer: str, **more: Any) -> onnx.ModelProto:
    options = Options(losses=(LossSpec("mse"),), label="t", optimizer=optimizer, **more)
    return build(layers(size), options).model


def is_slot(roles: Roles, name: str) -> bool:
    return name in roles.slots and bool(roles.slots[name].of)


def waits_for_all_readers(model: onnx.ModelProto, name: str, successor: str) -> bool:
    """Whether the successor of a state is computed from all that read the state; by one of these itself only where that
    takes an element for each element, as runtimes do in place on their own."""
    graph = Graph(model)
    makers, reached, names = graph.producers(), [], [successor]
    while names:
        maker = makers.get(names.pop())
        if maker is not None and maker not in reached:
            reached.append(maker)
            names += maker.input
    readers = [node for node in graph.nodes if name in node.input]
    last = makers[successor]
    return all(node in reached for node in readers) and (last not in readers or last.op_type in ELEMENTWISE)


@pytest.mark.parametrize("optimizer", [optimizer.name for optimizer in OPTIMIZERS])
def test_slots_wait_for_all_their_readers_and_weights_do_not(optimizer: str) -> None:
    for clip_norm in (None, 1.0):
        model = step(8, optimizer, clip_norm=clip_norm, optimizer_options=VARIANTS.get(optimizer, {}))
        roles = describe(model)
        waits = {name: waits_for_all_readers(model, name, after) for name, after in roles.successors.items()}
        slots = [name for name in waits if is_slot(roles, name)]
        assert len(slots) == 3 * len(OPTIMIZERS.lookup(optimizer).slots)
        assert all(waits[name] == (optimizer != "lion") for name in slots)  # its step and its next mean read the last
        assert not waits["step"] or optimizer in COUNT_NO_STEPS
        assert waits["w0"]  # no gradient goes through the first layer's weight
        assert waits["w1"] == waits["w2"] == (clip_norm is not None)  # then every update waits for all gradients


def after_steps(model: onnx.ModelProto, in_place: Wanted) -> dict[str, np.ndarray]:
    """Weights and state after four steps on two threads, some of them in one buffer, the others alternating."""
    roles, rng = describe(model), np.random.default_rng(1)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    here, there = ({n: ort.OrtValue.ortvalue_from_numpy(np.array(stored[n])) for n in roles.successors} for _ in "ab")
    there |= {name: value for name, value in here.items() if in_place(roles, name)}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    batch = {name: rng.standard_normal((64, 300)).astype("f") for name in ("a0", "t")}
    for _ in range(4):
        binding = session.io_binding()
        for name, array in {**batch, "learning_rate": np.array(0.01, "f")}.items():
            binding.bind_cpu_input(name, array)
        for name, successor in roles.successors.items():
            binding.bind_ortvalue_input(name, here[name])
            binding.bind_ortvalue_output(successor, there[name])
        session.run_with_iobinding(binding)
        here, there = there, here
    return {name: value.numpy().copy() for name, value in here.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adadelta", "nesterov"])
@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "ema": 0.9}], ids=["plain", "accumulated"])
@pytest.mark.thinned(4)
def test_slots_in_one_buffer_give_the_same_numbers(optimizer: str, more: dict[str, Any]) -> None:
    model = step(300, optimizer, **more)
    apart, together = after_steps(model, lambda roles, name: False), after_steps(model, is_slot)
    assert together.keys() == apart.keys() and describe(model).slots
    for name, value in apart.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)


def test_weights_in_one_buffer_give_the_same_numbers_where_updates_wait_for_all_gradients() -> None:
    model = step(300, "adamw", clip_norm=1.0)
    apart = after_steps(model, lambda roles, name: False)
    together = after_steps(model, lambda roles, name: name != "step")
    for name, value in apart.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)
