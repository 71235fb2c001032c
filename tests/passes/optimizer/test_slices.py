"""Steps in slices are the steps of the whole in one run, to the last bit, and weights are updated in place."""

from __future__ import annotations

import itertools
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.options import Group, Options
from onnxgrad_cli.passes.optimizer.slices import ELEMENTWISE, Update, slice_optimizer
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training import trainer
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.steps import compiled as compiled_steps, sliced as sliced_steps
from onnxgrad_cli.training.steps.compiled import OPERANDS, CompiledUpdate, is_compiled, is_covered, update_of
from onnxgrad_cli.training.steps.in_place_optimizer import FUNCTIONS, InPlace, Scratch
from onnxgrad_cli.training.steps.sliced import parts_of
from onnxgrad_cli.training.trainer import NotFinite, Trainer

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


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_steps, "SLICE", 7)
    monkeypatch.setattr(sliced_steps, "ALONE", 5)
    monkeypatch.setattr(sliced_steps, "MIN_SLICED_ELEMENTS", 12)  # b is not sliced
    monkeypatch.setattr(sliced_steps, "MIN_SLICED_TOTAL", 12)
    monkeypatch.setattr(sliced_steps, "update_of", InPlace)


@pytest.fixture
def compiled(small_slices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(sliced_steps, "update_of", update_of)


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


@pytest.mark.parametrize(("op_type", "kinds"), [*[(op_type, "") for op_type in sorted(OPERANDS)], ("Equal", "bb")])
def test_terms_are_the_functions(op_type: str, kinds: str) -> None:
    """To the bit, also of what is not finite and of zeros with a sign, but for which of two zeros is the larger."""
    pytest.importorskip("llvmlite")
    count = OPERANDS[op_type]
    _, arrays = operands(kinds or TAKEN.get(op_type, "f" * count)[:count])
    given = dict(zip("abc", arrays, strict=False))
    kind = np.dtype(bool if op_type in TRUTHS else np.float32)
    nodes = (helper.make_node(op_type, list(given), ["t"]), helper.make_node("Where", ["t", "one", "zero"], ["new"]))
    nodes = nodes if op_type in TRUTHS else (helper.make_node(op_type, list(given), ["new"]),)
    constants = {"one": np.float32(1).reshape(1), "zero": np.float32(0).reshape(1)} if op_type in TRUTHS else {}
    dtypes = {name: array.dtype for name, array in given.items()} | {"t": kind, "new": np.dtype("f")}
    update = Update("w", nodes, dtypes, tuple(given), (), constants, {"new": "w"})
    assert is_covered(update)
    found, wanted = ({**given, "w": np.empty(64, "f")} for _ in range(2))
    CompiledUpdate(update).run({name: array.ctypes.data for name, array in found.items()}, 0, 64, Scratch(64))
    with np.errstate(all="ignore"):
        InPlace(update).run(wanted, 0, 64, Scratch(64))
    np.testing.assert_array_equal(found["w"].view(np.int32) << 1, wanted["w"].view(np.int32) << 1)
    signs = np.signbit(found["w"]) == np.signbit(wanted["w"])
    assert op_type in ("Clip", "Max", "Min") or np.all(signs | np.isnan(wanted["w"]))


def test_memory_between_is_taken_again_once_nobody_reads_it() -> None:
    """A chain needs one slice; two results that are read together need two."""
    g = np.linspace(1, 2, 8, dtype=np.float32)
    chain = [helper.make_node("Neg", [a], [b]) for a, b in itertools.pairwise(["g", "t0", "t1", "t2"])]
    for last, count, expected in ((("Neg", ["t2"]), 1, g), (("Mul", ["t2", "t1"]), 2, -g * g)):
        nodes = (*chain, helper.make_node(*last, ["new"]))
        dtypes = {name: g.dtype for name in ("g", "t0", "t1", "t2", "new")}
        update, scratch, w = Update("w", nodes, dtypes, ("g",), (), {}, {"new": "w"}), Scratch(8), np.empty(8, "f")
        InPlace(update).run({"g": g, "w": w}, 0, 8, scratch)
        assert len(scratch) == count
        np.testing.assert_array_equal(w, expected)


@pytest.mark.usefixtures("small_slices")
def test_threads_that_share_the_weights_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a and c, 88 numbers in slices of 7, each thread takes the next slice that is left; b is not sliced."""
    model = built("adamw")
    one, whole = both(model)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.model.graph.initializer}
    parts = parts_of(model.model, values)
    assert parts is not None
    assert parts.in_place == {"a", "a_m", "a_v", "c", "c_m", "c_v"}
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    several = Trainer(model)
    for _ in range(5):
        assert len({trainer.step(batch(), 0.1) for trainer in (several, one, whole)}) == 1
        assert_same(several, one)
        assert_same(several, whole)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_thread_that_breaks_off_is_told_of(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    trainer, calls = Trainer(built("adamw")), itertools.count()
    run = InPlace.run

    def broken(self: InPlace, *args: Any) -> None:
        if next(calls) == failing:
            raise RuntimeError("no memory")
        run(self, *args)

    monkeypatch.setattr(InPlace, "run", broken)
    with pytest.raises(OnnxgradError, match="no memory"):
        trainer.step(batch(), 0.1)


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


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("name", ["MIN_SLICED_ELEMENTS", "MIN_SLICED_TOTAL"])
def test_small_models_are_left_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_steps, name, 1000)
    assert not in_slices(Trainer(built("adamw"), threads=1))


@pytest.mark.usefixtures("small_slices")
def test_weights_stay_where_they_are() -> None:
    first, second = both(built("adamw"))
    for each, stays in ((first, True), (second, False)):
        place = each.buffers["a"].array.ctypes.data
        each.step(batch(), 0.1)
        assert (each.buffers["a"].array.ctypes.data == place) is stays


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
TRUTHS = frozenset("And Equal Greater GreaterOrEqual Less LessOrEqual Not Or".split())
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


@pytest.mark.usefixtures("small_slices")
def test_a_step_goes_on_from_what_is_loaded() -> None:
    first, second = both(built("adamw"))
    first.step(batch(), 0.1)
    second.load(contents(first), 1)
    assert first.step(batch(), 0.1) == second.step(batch(), 0.1)
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_a_loss_that_is_no_number_changes_nothing() -> None:
    first, second = both(built("adamw"))
    wrong = {**batch(), "x": np.full((4, 5), np.nan, np.float32)}
    for each in (first, second):
        each.step(batch(), 0.1)
        with pytest.raises(NotFinite):
            each.step(wrong, 0.1)
        each.step(batch(), 0.1)
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_an_interrupt_waits_for_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = both(built("adamw"))
    run = InPlace.run

    def interrupted(self: InPlace, *args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        run(self, *args)

    monkeypatch.setattr(InPlace, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.step(batch(), 0.1)
    second.step(batch(), 0.1)
    assert first.steps == 1
    assert_same(first, second)


@pytest.mark.usefixtures("small_slices")
def test_a_step_that_breaks_off_says_that_the_weights_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = both(built("adamw"))

    def broken(self: InPlace, *args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(InPlace, "run", broken)
    with pytest.raises(OnnxgradError, match="no memory") as caught:
        first.step(batch(), 0.1)
    assert "checkpoint" in caught.value.hint
