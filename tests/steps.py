"""A small network of two layers in PyTorch and as an ONNX model, and a function that trains the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper

from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options

ort.set_default_logger_severity(3)  # onnxruntime warns about each initializer that is an input

STEPS, RATE = 50, 0.02
NAMES = {"0.weight": "first.weight", "0.bias": "first.bias", "2.weight": "last.weight", "2.bias": "last.bias"}
"""Name of a weight in PyTorch -> its name in the model."""

Batch = tuple[np.ndarray, ...]
"""Samples, their labels, and optionally the weights of the samples."""

KINDS = [("float32", 1e-5), ("float64", 1e-10)]
"""Element types, and the largest difference of weights from PyTorch's after 50 steps."""


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    """Return a session on one thread. Idle threads would spin and slow down the other test workers."""
    how = ort.SessionOptions()
    how.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), how)


def network(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return torch.nn.Sequential(*layers).to(dtype)


def exported(net: torch.nn.Sequential) -> onnx.ModelProto:
    """Return a network as a model with the values of PyTorch's weights."""
    weights = [numpy_helper.from_array(w.detach().numpy().copy(), NAMES[name]) for name, w in net.named_parameters()]
    kind = weights[0].data_type
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["h"], transB=1),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Gemm", ["t", "last.weight", "last.bias"], ["logits"], transB=1),
    ]
    x = helper.make_tensor_value_info("x", kind, ["batch", 6])
    y = helper.make_tensor_value_info("logits", kind, ["batch", 3])
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batches(dtype: Any, count: int = STEPS) -> list[Batch]:
    rng = np.random.default_rng(1)
    return [(rng.standard_normal((16, 6)).astype(dtype), rng.integers(0, 3, 16)) for _ in range(count)]


def whole(data: Sequence[Batch], runs: int) -> list[Batch]:
    """Return batches that are `runs` times as large, each made of consecutive batches."""
    return [tuple(map(np.concatenate, zip(*data[i : i + runs], strict=True))) for i in range(0, len(data), runs)]


def trained(
    model: onnx.ModelProto,
    data: Sequence[Batch],
    rate: float = RATE,
    begin: Mapping[str, Any] | None = None,
    see: Callable[[dict[str, np.ndarray]], None] = lambda held: None,
    engine: Callable[[onnx.ModelProto], Any] = session,
) -> dict[str, np.ndarray]:
    """Return weights and state after a step on each batch. Names and roles are read from the model's metadata.

    Args:
        model: the training model.
        data: the batches.
        rate: the learning rate.
        begin: initial values that replace the model's values of weights or state.
        see: function that is called after each step with the weights, the state and the outputs.
        engine: function that returns a session for a model.
    """
    roles = describe(model)
    running = engine(model)
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    stored |= {n: np.full(s.shape, s.initial, s.dtype) for n, s in roles.slots.items() if n not in stored}
    held = {name: stored[name] for name, role in roles.inputs.items() if role in ("weight", "state")}
    kind = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    (rate_name,) = [name for name, role in roles.inputs.items() if role == "learning rate"]
    fed = np.array(rate, helper.tensor_dtype_to_np_dtype(kind[rate_name]))
    held |= {name: np.array(value, held[name].dtype) for name, value in (begin or {}).items()}
    for batch in data:
        feeds = dict(zip(("x", "y", "sample_weight"), batch, strict=False))
        results = running.run(list(roles.outputs), {**feeds, rate_name: fed, **held})
        for (_, role), value in zip(roles.outputs.items(), results, strict=True):
            if role.role == "next state":
                held[role.of] = value
        see({**held, **dict(zip(roles.outputs, results, strict=True))})
    return held


def options(name: str, given: dict[str, Any] | None = None, **others: Any) -> Options:
    return Options(
        losses=(LossSpec("cross-entropy"),), label="y", optimizer=name, optimizer_options=given or {}, **others
    )


def loss(net: torch.nn.Module, batch: Batch, reduction: str = "mean") -> torch.Tensor:
    x, y, *weights = map(torch.tensor, batch)
    found = torch.nn.functional.cross_entropy(net(x), y, reduction="none")
    found = found * weights[0] if weights else found
    return found.mean() if reduction == "mean" else found.sum()


def clip(net: torch.nn.Module, *, clip_norm: float = 0, clip_value: float = 0, **others: Any) -> None:
    """Clip gradients with PyTorch as the options of the optimizer do."""
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    if clip_value:
        torch.nn.utils.clip_grad_value_(net.parameters(), clip_value)


def assert_same(ours: dict[str, np.ndarray], net: torch.nn.Module, bound: float) -> None:
    """Assert that the weights equal PyTorch's and that they have changed from their initial values."""
    before = network(next(net.parameters()).dtype).state_dict()
    for key, expected in net.state_dict().items():
        assert not torch.allclose(expected, before[key], atol=10 * bound)
        np.testing.assert_allclose(ours[NAMES[key]], expected.numpy(), rtol=bound, atol=bound, err_msg=key)


class NAdam(torch.optim.NAdam):
    """PyTorch's NAdam with the product of momenta in float64. PyTorch stores it in its default type, float32."""

    def step(self, closure: Any = None) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return super().step(closure)
        finally:
            torch.set_default_dtype(torch.float32)
