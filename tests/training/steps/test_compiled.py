"""Compiled updates of weights are those of onnxruntime, to the last bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxgrad_cli.options import Group
from onnxgrad_cli.passes.optimizer.slices import ELEMENTWISE, slice_optimizer
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training.steps import compiled as compiled_steps, sliced as sliced_steps
from onnxgrad_cli.training.steps.compiled import CompiledUpdate, is_compiled, is_covered, update_of
from onnxgrad_cli.training.steps.in_place_optimizer import FUNCTIONS, InPlace
from onnxgrad_cli.training.trainer import Trainer
from tests.passes.optimizer.test_slices import (
    SLICED,
    TAKEN,
    assert_same,
    batch,
    both,
    built,
    in_slices,
    operands,
)


@pytest.fixture
def compiled(small_slices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(sliced_steps, "update_of", update_of)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("optimizer", "options"), SLICED, ids=str)
@pytest.mark.thinned(4)
def test_compiled_steps_are_those_of_the_whole(optimizer: str, options: dict[str, Any]) -> None:
    model = built(optimizer, **options)
    parts = slice_optimizer(split(model.model).optimizer, 12)
    assert parts is not None and all(map(is_covered, parts.updates))
    first, second = both(model)
    assert in_slices(first)
    for rate in (0.1, 0.05, 0.02):
        assert first.step(batch(), rate) == second.step(batch(), rate)
        assert_same(first, second)


@pytest.mark.usefixtures("compiled")
def test_compiled_steps_of_doubles_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("adamw", "double")
    _, whole = both(model)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    several = Trainer(model)
    for _ in range(4):
        assert several.step(batch("double"), 0.1) == whole.step(batch("double"), 0.1)
    assert_same(several, whole)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("version", ["0.44.0", None])
def test_without_llvm_or_with_an_old_one_nothing_is_compiled(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> SimpleNamespace:
        if version is None:
            raise ImportError(f"No module named '{name}'")
        return SimpleNamespace(__version__=version)

    monkeypatch.setattr(compiled_steps, "import_module", load)
    compiled_steps.load_llvm.cache_clear()
    parts = slice_optimizer(split(built("adamw").model).optimizer, 12)
    assert parts is not None and not any(map(is_compiled, parts.updates))
    assert all(isinstance(update_of(update), InPlace) for update in parts.updates)
    compiled_steps.load_llvm.cache_clear()


def test_halves_are_not_compiled() -> None:
    parts = slice_optimizer(split(built("sgd", "float16").model).optimizer, 12)
    assert parts is not None and not any(map(is_covered, parts.updates))


def test_weights_that_are_updated_alike_are_compiled_once() -> None:
    pytest.importorskip("llvmlite")
    parts = slice_optimizer(split(built("adamw", group=(Group("a", {"weight_decay": 0.0}),)).model).optimizer, 2)
    assert parts is not None
    alone, *alike = map(CompiledUpdate, parts.updates)
    assert alike[0].loop is alike[1].loop is not alone.loop


EXACT = ELEMENTWISE - {"Exp", "Log", "Tanh", "Pow"}


@pytest.mark.parametrize("op_type", sorted(ELEMENTWISE))
def test_functions_are_onnxruntimes_kernels(op_type: str) -> None:
    """Also where the result lies in the place of an operand."""
    types, arrays = operands(TAKEN.get(op_type, "ff"))
    if op_type == "Clip":
        types, arrays = [TensorProto.FLOAT] * 3, [arrays[0], np.array(-0.5, "f"), np.array(0.5, "f")]
        arrays[0] = np.nan_to_num(arrays[0], posinf=1.0, neginf=-1.0)
    names = [f"x{i}" for i in range(len(arrays))]
    attributes = {"to": TensorProto.FLOAT16} if op_type == "Cast" else {}
    node = helper.make_node(op_type, names, ["y"], **attributes)
    given = [helper.make_tensor_value_info(n, t, a.shape) for n, t, a in zip(names, types, arrays, strict=True)]
    graph = helper.make_graph([node], "g", given, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    wanted = onnxruntime.InferenceSession(shape_inference.infer_shapes(model).SerializeToString()).run(
        None, dict(zip(names, arrays, strict=True))
    )[0]
    for i in [None, *range(len(arrays))]:
        taken = [array.copy() for array in arrays]
        out = np.empty_like(wanted) if i is None else taken[i]
        if out.dtype == wanted.dtype and out.shape == wanted.shape:
            with np.errstate(all="ignore"):
                FUNCTIONS[op_type](*taken, out)
            np.testing.assert_allclose(out, wanted, rtol=0 if op_type in EXACT else 1e-6)
