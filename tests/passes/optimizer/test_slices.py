"""Steps in slices are the steps of the whole in one run, to the last bit, and weights are updated in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.options import Group, Options
from onnxgrad_cli.passes.optimizer.slices import Update, slice_optimizer
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training import trainer
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.steps.in_place_optimizer import InPlace, Scratch
from onnxgrad_cli.training.trainer import Trainer

DTYPES = {"float16": TensorProto.FLOAT16, "float": TensorProto.FLOAT, "double": TensorProto.DOUBLE}

SLICED: list[tuple[str, dict[str, Any]]] = [
    *((each.name, {}) for each in OPTIMIZERS if each.name != "lamb"),
    ("adam", {"optimizer_options": {"amsgrad": True, "weight_decay": 0.1}}),
    ("rmsprop", {"optimizer_options": {"centered": True, "momentum": 0.5}}),
    ("adagrad", {"optimizer_options": {"lr_decay": 0.1, "initial_accumulator_value": 0.3}}),
    ("adamw", {"clip_norm": 0.1}),
    ("adamw", {"clip_value": 0.01}),
    ("adamw", {"ema": 0.9}),
    ("adamw", {"loss_scale": 8.0}),
    ("adamw", {"embed_state": True}),
    *((each.name, {"cycle_momentum": True}) for each in OPTIMIZERS if each.cycled),
]  # fmt: skip


def network(dtype: str = "float") -> onnx.ModelProto:
    """Weights of two layers, and those that end in an axis of size one."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g ({dtype}[N, 5] x) => ({dtype}[N, 3, 11, 1] y) <int64[2] axes = {{1, 3}}> {{
            h = MatMul(x, a) i = Add(h, b) j = Tanh(i) k = Unsqueeze(j, axes) y = Mul(k, c)
        }}""")
    rng, kind = np.random.default_rng(0), helper.tensor_dtype_to_np_dtype(DTYPES[dtype])
    shapes = {"a": (5, 11), "b": (11,), "c": (3, 11, 1)}
    tensors = {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def built(optimizer: str, dtype: str = "float", **options: Any) -> TrainingModel:
    return build(network(dtype), Options(losses=(LossSpec("mse"),), optimizer=optimizer, **options))


def batch(dtype: str = "float") -> dict[str, np.ndarray]:
    rng, kind = np.random.default_rng(1), helper.tensor_dtype_to_np_dtype(DTYPES[dtype])
    return {"x": rng.standard_normal((4, 5)).astype(kind), "label": np.ones((4, 3, 11, 1), kind)}


def both(model: TrainingModel) -> tuple[Trainer, Trainer]:
    """The model in slices, and whole."""
    first = Trainer(model, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "parts_of", lambda *_: None)
        return first, Trainer(model, threads=1)


def in_slices(trainer: Trainer) -> bool:
    """Whether the optimizer has a session of its own, for what is not sliced."""
    return len(trainer.sessions) > 1


def contents(of: Trainer) -> dict[str, np.ndarray]:
    return {**of.weights(), **of.state()}


def assert_same(first: Trainer, second: Trainer) -> None:
    found, wanted = contents(first), contents(second)
    assert list(found) == list(wanted)
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], name)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("optimizer", "options"), SLICED, ids=str)
@pytest.mark.thinned(2)
def test_steps_are_those_of_the_whole(optimizer: str, options: dict[str, Any]) -> None:
    first, second = both(built(optimizer, **options))
    assert in_slices(first)
    assert not in_slices(second)
    for rate in (0.1, 0.05, 0.02):
        assert first.step(batch(), rate) == second.step(batch(), rate)
        assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_a_momentum_that_changes_is_that_of_the_whole(optimizer: str) -> None:
    first, second = both(built(optimizer, cycle_momentum=True))
    cycle = parse_schedule("one-cycle:cycle-momentum=true,base-momentum=0.1", 0.1, 6)
    (momentum,) = {"momentum", "beta1"} & first.state().keys()
    for step in range(6):
        assert first.step(batch(), cycle) == second.step(batch(), cycle)
        assert_same(first, second)
        assert first.state()[momentum] == np.float32(cycle.momentum(step))


@pytest.mark.usefixtures("small_slices")
def test_of_doubles() -> None:
    first, second = both(built("adamw", "double"))
    assert in_slices(first)
    for _ in range(4):
        assert first.step(batch("double"), 0.1) == second.step(batch("double"), 0.1)
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_of_halves() -> None:
    """Where gradients are results they are rounded; the whole in one run takes them as they were before."""
    first, second = both(built("sgd", "float16"))
    assert in_slices(first)
    for _ in range(4):
        assert first.step(batch("float16"), 0.1) == pytest.approx(second.step(batch("float16"), 0.1), rel=1e-3)
    found, wanted = contents(first), contents(second)
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype
        np.testing.assert_allclose(array, wanted[name], atol=2e-3)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("lamb", {}), ("adamw", {"accumulate": 2}), ("adamw", {"loss_scale": "dynamic"})],
    ids=str,
)
def test_what_is_no_step_of_each_element_is_left_whole(optimizer: str, options: dict[str, Any]) -> None:
    """A norm of the whole update would compute it twice; what stands in a branch is one node."""
    assert slice_optimizer(split(built(optimizer, **options).model).optimizer, 2) is None


def test_updates_are_those_of_their_groups() -> None:
    parts = slice_optimizer(split(built("adamw", group=(Group("a", {"weight_decay": 0.0}),)).model).optimizer, 2)
    assert parts is not None
    assert [(update.weight, len(update.nodes)) for update in parts.updates] == [("a", 12), ("b", 13), ("c", 13)]


def operands(kinds: str) -> tuple[list[Any], list[np.ndarray]]:
    """Types of operands, b for bool, f for float, and arrays of theirs, among them what is not finite."""
    rng, odd = np.random.default_rng(0), np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    arrays = [rng.standard_normal(64).astype("f") for _ in kinds]
    for i, (kind, array) in enumerate(zip(kinds, arrays, strict=True)):
        array[i : i + 5] = odd
        arrays[i] = array > 0 if kind == "b" else array
    return [helper.np_dtype_to_tensor_dtype(array.dtype) for array in arrays], arrays


TAKEN = {"And": "bb", "Or": "bb", "Not": "b", "Where": "bff", "Max": "fff", "Min": "fff", "Sum": "fff"}
TAKEN |= dict.fromkeys(("Abs", "Cast", "Exp", "Log", "Neg", "Reciprocal", "Sign", "Sqrt", "Tanh"), "f")


def test_what_is_read_after_its_update_is_replaced_in_the_end() -> None:
    """And a value in scratch memory stays there as long as somebody reads it."""
    update = Update(
        "w",
        tuple(
            helper.make_node(op_type, read, [made])
            for op_type, read, made in [
                ("Mul", ["m", "share"], "t"),
                ("Add", ["t", "g"], "m_next"),
                ("Mul", ["m_next", "g"], "u"),
                ("Sub", ["w", "u"], "w_next"),
                ("Mul", ["w", "t"], "p"),
                ("Add", ["p", "m"], "v_next"),
            ]
        ),
        dict.fromkeys(["t", "m_next", "u", "w_next", "p", "v_next"], np.dtype("f")),
        ("w", "g", "m"),
        ("share",),
        {},
        {"w_next": "w", "m_next": "m", "v_next": "v"},
    )
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(10).astype("f") for name in "wgmv"} | {"share": np.array(0.5, "f")}
    values = {name: array.copy() for name, array in given.items()}
    scratch = Scratch(8)
    for start in (0, 8):
        InPlace(update).run(values, start, min(start + 8, 10), scratch)
    w, g, m, share = (given[name] for name in ("w", "g", "m", "share"))
    t = m * share
    wanted = {"w": w - (t + g) * g, "m": t + g, "v": w * t + m, "g": g}
    for name, array in wanted.items():
        np.testing.assert_array_equal(values[name], array, name)
