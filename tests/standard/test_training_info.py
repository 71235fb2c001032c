"""Training information, both ways: the inference graph stays what it was, and the expanded models train it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node_values import node_names
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.jobs.expand import Piece, expand_operators, run_expand
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from onnxgrad_cli.standard.training_info import check_training_info, initial_model, pack, step_model
from tests.cli_harness import MLP, Shell, save
from tests.facts import raises

SAMPLES = Path(__file__).parents[2] / "sample_models"
ort.set_default_logger_severity(3)
Arrays = dict[str, np.ndarray]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def packed(model: ModelProto, **options: Any) -> ModelProto:
    """A model with the training information that onnxgrad writes."""
    copy = ModelProto()
    copy.CopyFrom(model)
    built = TrainingModel(Graph(copy), Options(**{"optimizer": "sgd", "training_info": True, **options}))
    built.run()
    return pack(model, built)


class Host:
    """A training loop that knows of the expanded models what they say of themselves, and nothing of this project."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.variables: Arrays = {}
        self.steps = []
        for piece in pieces:
            if piece.kind == "step":
                session = ort.InferenceSession(piece.path)
                said = json.loads(session.get_modelmeta().custom_metadata_map["onnxgrad.roles"])
                replaced = {name: out["of"] for name, out in said["outputs"].items() if out["role"] == "next state"}
                self.steps.append((session, replaced))
                stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(piece.path).graph.initializer}
                taken = [i.name for i in session.get_overridable_initializers()]
                self.variables = {**{name: stored[name] for name in taken}, **self.variables}

    def begin(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "initialization":
                session = ort.InferenceSession(piece.path)
                results = dict(zip(piece.outputs, session.run(piece.outputs, {}), strict=True))
                self.variables.update({name: results[value] for name, value in piece.bindings.items()})

    def step(self, index: int, feeds: Arrays, fetch: str = "loss") -> float:
        session, replaced = self.steps[index]
        taken = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
        fed = {name: value for name, value in {**self.variables, **feeds}.items() if name in taken}
        loss, *new = session.run([fetch, *replaced], fed)
        self.variables.update(zip(replaced.values(), new, strict=True))
        return float(loss)


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = np.load(SAMPLES / "digits.npz")
    return data["train_x"][:320].astype(np.float32), data["train_y"][:320]


# -- the round trip --------------------------------------------------------------------------------------------------


def test_digits_train_from_the_expanded_files_as_in_pytorch(shell: Shell) -> None:
    source = SAMPLES / "digits_mlp.onnx"
    result = shell("build", source, "--loss", "cross-entropy", "--label", "y", "--optimizer", "nesterov",
                   "--training-info", "--init", "xavier", "--seed", 7, "-o", "described.onnx")  # fmt: skip
    assert result.code == 0, result.err
    assert onnx.load("described.onnx").graph.SerializeToString() == onnx.load(source).graph.SerializeToString()
    pieces = [Piece(**each) for each in shell("expand", "described.onnx", "-o", "plain.onnx", "--json").json]
    assert [piece.path for piece in pieces] == ["plain.onnx", "plain.step0.onnx", "plain.init0.onnx"]
    assert pieces[1].inputs == ["x", "y", "learning_rate"]
    host = Host(pieces)
    host.begin(pieces)
    begun = {name: value.copy() for name, value in host.variables.items()}
    x, y = digits()
    rate = np.array(0.05, np.float32)
    losses = [host.step(0, {"x": x[i::10], "y": y[i::10], "learning_rate": rate}) for _ in range(3) for i in range(10)]
    assert losses[-1] < 0.5 * losses[0]

    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU(),
        torch.nn.Linear(32, 10),
    )  # fmt: skip
    names = [f"fc{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")]
    with torch.no_grad():
        for parameter, name in zip(net.parameters(), names, strict=True):
            parameter.copy_(torch.tensor(begun[name]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    expected = []
    for _ in range(3):
        for i in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(torch.tensor(x[i::10])), torch.tensor(y[i::10]))
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for parameter, name in zip(net.parameters(), names, strict=True):
        np.testing.assert_allclose(host.variables[name], parameter.detach().numpy(), rtol=1e-3, atol=1e-5)
    assert host.variables["step"] == 30
    assert shell("check", "plain.step0.onnx").code == 0


def test_a_linear_regression_by_hand(tmp_path: Path) -> None:
    """Least squares by gradient descent, beside numpy; what is not drawn anew keeps its stored value."""
    described, out = tmp_path / "described.onnx", tmp_path / "plain.onnx"
    options = Options(label="y", optimizer="sgd", training_info=True)
    assert run_build(SAMPLES / "linear_regression.onnx", described, options, no_report=True).status == "built"
    pieces = run_expand(described, out)
    host = Host(pieces)
    host.begin(pieces)
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    weight, bias = sorted((name for name in stored if name in host.variables), key=lambda name: -stored[name].ndim)
    w, b = stored[weight].astype(np.float64), stored[bias].astype(np.float64)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 3)).astype(np.float32)
    y = (x @ np.array([[1.0], [-2.0], [0.5]]) + 0.25).astype(np.float32)
    forward = w.shape[0] == 3
    losses = []
    for _ in range(40):
        losses.append(host.step(0, {"x": x, "y": y, "learning_rate": np.array(0.2, np.float32)}))
        error = x @ (w if forward else w.T) + b - y
        gradient = 2 * x.T @ error / len(x)
        w, b = w - 0.2 * (gradient if forward else gradient.T), b - 0.2 * 2 * error.mean(axis=0)
    assert losses[-1] < 1e-3 * losses[0]
    np.testing.assert_allclose(host.variables[weight], w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(host.variables[bias], b, rtol=1e-4, atol=1e-5)


SAMPLE_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("linear_regression", {"losses": (LossSpec("mse"),)}),
    ("digits_mlp", {"optimizer": "adamw"}),
    ("digits_cnn", {"optimizer": "momentum"}),
    ("digits_cnn", {"mode": "train"}),
    ("tiny_transformer", {"optimizer": "rmsprop", "freeze": ("embed_*",)}),
    ("symbolic", {"optimizer": "adagrad", "identifiers": True}),
]


def sample_feeds(name: str, rng: np.random.Generator) -> Arrays:
    if name == "linear_regression":
        return {"x": rng.standard_normal((5, 3)), "y": rng.standard_normal((5, 1))}
    if name == "tiny_transformer":
        return {"input_ids": rng.integers(0, 4, (3, 7)), "y": rng.integers(0, 4, 3)}
    if name == "symbolic":
        return {"x": rng.standard_normal((3, 6, 12)), "mask": np.ones((3, 6)), "y": rng.integers(0, 5, 3)}
    return {"x": rng.standard_normal((4, 1, 8, 8)), "y": rng.integers(0, 10, 4)}


def run(model: ModelProto, feeds: Arrays) -> Arrays:
    session = ort.InferenceSession(model.SerializeToString())
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    fed = {name: np.asarray(x, helper.tensor_dtype_to_np_dtype(kinds[name])) for name, x in feeds.items()}
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, fed), strict=True))


@pytest.mark.parametrize(("name", "given"), SAMPLE_OPTIONS)
@pytest.mark.thinned(3)
def test_a_step_is_the_training_model(name: str, given: dict[str, Any]) -> None:
    """The graph keeps every byte; the two combined compute what `build` without --training-info writes."""
    options = {"losses": (LossSpec("cross-entropy"),), "optimizer": "sgd", "label": "y", **given}
    original = onnx.load(SAMPLES / f"{name}.onnx")
    model = packed(original, **options)
    assert model.graph.SerializeToString() == original.graph.SerializeToString()
    onnx.checker.check_model(model)
    check_training_info(model)
    plain = build(onnx.load(SAMPLES / f"{name}.onnx"), Options(**options)).model
    step = step_model(model, 0)
    onnx.checker.check_model(step, full_check=True)
    assert [value.name for value in step.graph.input] == [value.name for value in plain.graph.input]
    (info,) = model.training_info
    if given.get("identifiers"):
        own = [*node_names(info.algorithm), *node_names(info.initialization)]
        assert all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in own)
    assert len({node.name for node in step.graph.node}) == len(step.graph.node)
    feeds = {**sample_feeds(name, np.random.default_rng(0)), "learning_rate": np.array(0.1)}
    expected, found = run(plain, feeds), run(step, feeds)
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    forward = {value.name for value in original.graph.output}
    shared = {node.output[0] for node in original.graph.node} & {node.output[0] for node in step.graph.node}
    assert shared
    if given.get("mode") != "train":
        made = {name for node in plain.graph.node for name in node.output}
        checked = {name for name in forward if f"{name}_made" in made}  # its rank is, behind which the name stands
        assert forward - checked <= shared
        made = [node.op_type for node in model.training_info[0].algorithm.node]
        assert len(made) + len(original.graph.node) >= len(step.graph.node)


def test_statistics_are_updated_and_drawn_anew() -> None:
    """BatchNormalization in training mode stands in the algorithm, and its statistics are bound to the graph's."""
    original = onnx.load(SAMPLES / "digits_cnn.onnx")
    model = packed(original, losses=(LossSpec("cross-entropy"),), mode="train", init="he", seed=0)
    (info,) = model.training_info
    updates = {pair.key: pair.value for pair in info.update_binding}
    statistics = [t.name for t in original.graph.initializer if "running" in t.name]
    assert statistics
    assert set(statistics) <= set(updates)
    initial = initial_model(model, 0)
    assert initial is not None
    values = run(initial, {})
    bound = {pair.key: values[pair.value] for pair in info.initialization_binding}
    for name in statistics:
        assert (bound[name] == (1.0 if "var" in name else 0.0)).all()


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn"])
def test_the_compact_form(name: str, tmp_path: Path) -> None:
    """With --as-gradient-op the algorithm holds one Gradient node; expanded, it is the same step."""
    options = {"losses": (LossSpec("cross-entropy"),), "optimizer": "momentum", "label": "y"}
    original = onnx.load(SAMPLES / f"{name}.onnx")
    model = packed(original, as_gradient_op=True, **options)
    assert model.graph.SerializeToString() == original.graph.SerializeToString()
    kinds = [node.op_type for node in model.training_info[0].algorithm.node]
    assert kinds.count("Gradient") == 1
    feeds = sample_feeds(name, np.random.default_rng(0))
    x = {"x": feeds["x"].astype(np.float32)}
    runnable = ort.InferenceSession(model.SerializeToString()).run(None, x)  # stock onnxruntime passes the rest over
    np.testing.assert_array_equal(runnable[0], ort.InferenceSession(original.SerializeToString()).run(None, x)[0])
    onnx.save(model, tmp_path / "described.onnx")
    pieces = run_expand(tmp_path / "described.onnx", tmp_path / "plain.onnx")
    plain = build(onnx.load(SAMPLES / f"{name}.onnx"), Options(**options)).model
    feeds = {**feeds, "learning_rate": np.array(0.1)}
    expected, found = run(plain, feeds), run(onnx.load(pieces[1].path), feeds)
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


# -- where weights begin ---------------------------------------------------------------------------------------------


def begun(model: ModelProto, **options: Any) -> tuple[Arrays, ModelProto]:
    whole = packed(model, **options)
    initial = initial_model(whole, 0)
    assert initial is not None
    onnx.checker.check_model(initial, full_check=True)
    values = run(initial, {})
    return {pair.key: values[pair.value] for pair in whole.training_info[0].initialization_binding}, whole


# -- what is refused --------------------------------------------------------------------------------------------------

CONSTANT = MLP.replace("h = MatMul(x, w1)", "c = Constant <value = float[4, 3] {1,2,3,4,5,6,7,8,9,1,2,3}> ()\n"
                       "  h = MatMul(x, c)")  # fmt: skip
OLD = MLP.replace('"": 17', '"": 11')


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (MLP, ["--optimizer", "sgd", "--dim", "batch=4"], ("conflict", "dims", "shapes", "training_info")),
        (MLP, ["--optimizer", "sgd", "--yield", "keep"], ("conflict", "training_info", "yield_='keep'")),
        (MLP, [], ("missing_value", "training_info")),
        (CONSTANT, ["--optimizer", "sgd"], ("conflict", "training_info", "c")),
        (OLD, ["--optimizer", "sgd"], ("conflict", "training_info", "13", "11")),
    ],
)
def test_refused(text: str, options: list[str], expected: tuple[str, ...], shell: Shell) -> None:
    save(text, shell.folder / "model.onnx")
    before = shell.files()
    result = shell("build", "model.onnx", "--training-info", *options)
    assert result.code == 2 and result.facts == expected
    assert result.problem and result.problem.hint
    assert shell.files() == before


@pytest.mark.parametrize("text", [CONSTANT, OLD])
def test_the_hint_leads_on(text: str, shell: Shell) -> None:
    """What can't be told beside the model as it is can be beside the model as it is prepared."""
    save(text, shell.folder / "model.onnx")
    assert shell("build", "model.onnx", "--stop-after", "prepare", "-o", "prepared.onnx").code == 0
    result = shell("build", "prepared.onnx", "--training-info", "--optimizer", "sgd", "-o", "described.onnx")
    assert result.code == 0, result.err
    check_training_info(onnx.load("described.onnx"))


def test_a_second_training_information_is_refused(shell: Shell) -> None:
    save(MLP, shell.folder / "model.onnx")
    command = ("build", "--training-info", "--optimizer", "sgd", "--no-report")
    assert shell(*command, "model.onnx", "-o", "one.onnx").code == 0
    assert shell(*command, "model.onnx", "-o", "one.onnx").code == 0, "its own models are replaced"
    result = shell(*command, "one.onnx", "-o", "two.onnx")
    assert result.code == 2
    assert "onnxgrad expand" in result.err
    result = shell("check", "one.onnx")
    assert result.code == 2
    assert "onnxgrad expand" in result.err


@pytest.mark.parametrize("what", ["inner value", "output"])
def test_wrong_shapes_that_exporters_store_are_left_out(what: str, shell: Shell) -> None:
    """onnx's checker and inference believe them; onnxruntime finds its own."""
    model = onnx.parser.parse_model(MLP)
    first = model.graph.node[0].output[0]
    wrong = model.graph.output[0] if what == "output" else model.graph.value_info.add(name=first)
    wrong.CopyFrom(helper.make_tensor_value_info(wrong.name, TensorProto.FLOAT, [7]))
    onnx.save(model, "wrong.onnx")
    result = shell("build", "wrong.onnx", "--training-info", "--optimizer", "sgd", "-o", "described.onnx", "--json")
    assert result.code == 0 and result.json["proof"]["verdict"] == "proved", result.err
    described = onnx.load("described.onnx")
    assert len(described.graph.node) == len(model.graph.node) and not described.graph.value_info
    onnx.checker.check_model(described, full_check=True)


# -- the rules of the standard ----------------------------------------------------------------------------------------


def _first(model: ModelProto, field: str, **values: str) -> None:
    for name, value in values.items():
        setattr(getattr(model.training_info[0], field)[0], name, value)


def _read_the_algorithm(model: ModelProto) -> None:
    model.graph.node[0].input[0] = "learning_rate"


def _make_twice(model: ModelProto) -> None:
    model.training_info[0].algorithm.node[0].output[0] = model.graph.node[0].output[0]


def _read_nothing(model: ModelProto) -> None:
    model.training_info[0].algorithm.node[0].input[0] = "nowhere"


def _repeat(model: ModelProto) -> None:
    binding = model.training_info[0].update_binding
    binding.add(key=binding[0].key, value=binding[0].value)


def _repeat_elsewhere(model: ModelProto) -> None:
    model.training_info.add().CopyFrom(model.training_info[0])


def _feed_the_initialization(model: ModelProto) -> None:
    model.training_info[0].initialization.input.add(name="seed")


def _another_shape(model: ModelProto) -> None:
    updates = {pair.key: pair for pair in model.training_info[0].update_binding}
    updates["w1"].value = updates["w2"].value


def _another_type(model: ModelProto) -> None:
    updates = {pair.key: pair for pair in model.training_info[0].update_binding}
    updates["step"].value = "loss"


def _unknown_operator(model: ModelProto) -> None:
    model.training_info[0].algorithm.node[0].op_type = "Nonsense"


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda model: _first(model, "update_binding", key="w3"), "key 'w3', which is not an initializer"),
        (lambda model: _first(model, "update_binding", value="w3"), "value 'w3', which is not an output"),
        (lambda model: _first(model, "initialization_binding", value="w3"), "not an output of the initialization"),
        (lambda model: _first(model, "initialization_binding", key="x"), "key 'x', which is not an initializer"),
        (_repeat, "key 'w1' twice"),
        (_repeat_elsewhere, "training_info[1]: update_binding has the key 'w1' twice"),
        (_read_the_algorithm, "the inference graph reads 'learning_rate'"),
        (_make_twice, "which the inference graph also defines"),
        (_read_nothing, "reads 'nowhere', which is not defined"),
        (_feed_the_initialization, "its initialization has the input 'seed'"),
        (_another_shape, "but replaces 'w1' of shape"),
        (_another_type, "replaces 'step', but has another type"),
        (_unknown_operator, "Nonsense"),
    ],
)
def test_tampering_is_told(tamper: Callable[[ModelProto], None], words: str, shell: Shell) -> None:
    model = packed(parser.parse_model(MLP), init="he")
    check_training_info(model)
    tamper(model)
    with pytest.raises(OnnxgradError) as error:
        check_training_info(model)
    assert words in str(error.value)
    (shell.folder / "tampered.onnx").write_bytes(model.SerializeToString())
    before = shell.files()
    assert shell("expand", "tampered.onnx").code == 1
    assert shell.files() == before


# -- models of others ------------------------------------------------------------------------------------------------

BLOCKS = """
<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
blocks (float[n] x) => (float[n] y) <float[1] a = {0.5}, float[1] b = {-1}>
{
  h = Mul(x, a)
  y = Add(h, b)
}
"""
FIRST = """
first (float[n] t) => (float[1] a_new, float[1] va_new, int64 step_new, float loss)
<float r = {0.1}, int64 step = {0}, float[1] va = {0}, int64 one = {1}>
{
  d = Sub(y, t)
  s = Mul(d, d)
  loss = ReduceMean <keepdims = 0> (s)
  ga = ai.onnx.preview.training.Gradient <xs = ["a"], zs = ["x", "b", "t"], y = "loss"> (a, x, b, t)
  a_new, va_new = ai.onnx.preview.training.Momentum
    <alpha = 0.9, beta = 0.5, mode = "nesterov", norm_coefficient = 0.0> (r, step, a, ga, va)
  step_new = Add(step, one)
}
"""
SECOND = """
second (float[n] t, float r) => (float[1] b_new, float[1] m_new, float[1] v_new, int64 count_new, float loss)
<int64 count = {0}, float[1] m = {0}, float[1] v = {0}, int64 one = {1}>
{
  d = Sub(y, t)
  s = Mul(d, d)
  loss = ReduceMean <keepdims = 0> (s)
  gb = ai.onnx.preview.training.Gradient <xs = ["b"], zs = ["x", "a", "t"], y = "loss"> (b, x, a, t)
  count_new = Add(count, one)
  b_new, m_new, v_new = ai.onnx.preview.training.Adam
    <alpha = 0.9, beta = 0.75, epsilon = 0.001, norm_coefficient = 0.0> (r, count_new, b, gb, m, v)
}
"""
BEGIN = """
begin () => (float[1] a0, int64 zero)
{
  a0 = Constant <value = float[1] {2}> ()
  zero = Constant <value_int = 0> ()
}
"""


def two_blocks() -> ModelProto:
    """Block coordinate descent, as nobody here wrote it: one step for `a`, another for `b`."""
    model = parser.parse_model(BLOCKS)
    for text, updates in (
        (FIRST, {"a": "a_new", "va": "va_new", "step": "step_new"}),
        (SECOND, {"b": "b_new", "m": "m_new", "v": "v_new", "count": "count_new"}),
    ):
        info = model.training_info.add()
        info.algorithm.CopyFrom(parser.parse_graph(text))
        for key, value in updates.items():
            info.update_binding.add(key=key, value=value)
    model.training_info[0].initialization.CopyFrom(parser.parse_graph(BEGIN))
    for key, value in {"a": "a0", "step": "zero"}.items():
        model.training_info[0].initialization_binding.add(key=key, value=value)
    return model


def test_block_coordinate_descent(tmp_path: Path) -> None:
    source = tmp_path / "blocks.onnx"
    onnx.save(two_blocks(), source)
    pieces = run_expand(source, tmp_path / "plain.onnx")
    assert [Path(piece.path).name for piece in pieces] == [
        "plain.onnx", "plain.step0.onnx", "plain.init0.onnx", "plain.step1.onnx",
    ]  # fmt: skip
    assert pieces[1].inputs == ["x", "t"]
    assert pieces[3].inputs == ["x", "t", "r"]
    for piece in pieces:
        model = onnx.load(piece.path)
        onnx.checker.check_model(model, full_check=True)
        assert {node.domain for node in model.graph.node} == {""}
        assert {entry.domain for entry in model.opset_import} == {""}
        assert not model.training_info
    host = Host(pieces)
    host.begin(pieces)
    assert host.variables["a"] == 2.0
    rng = np.random.default_rng(0)
    x = rng.standard_normal(50).astype(np.float32)
    t = (3 * x + 1).astype(np.float32)
    a, b, va, m, v = 2.0, -1.0, 0.0, 0.0, 0.0
    first = np.mean((a * x + b - t) ** 2)
    for count in range(40):
        losses = [host.step(0, {"x": x, "t": t}), host.step(1, {"x": x, "t": t, "r": np.array(0.05, np.float32)})]
        d = a * x + b - t
        np.testing.assert_allclose(losses[0], np.mean(d * d), rtol=1e-4, atol=1e-6)
        g = np.mean(2 * d * x)
        va = 0.9 * va + (0.5 if count else 1.0) * g  # the operator's page: beta from the second step on
        a -= 0.1 * (g + 0.9 * va)
        d = a * x + b - t  # the second block sees what the first has done
        np.testing.assert_allclose(losses[1], np.mean(d * d), rtol=1e-4, atol=1e-6)
        g = np.mean(2 * d)
        m, v = 0.9 * m + 0.1 * g, 0.75 * v + 0.25 * g * g
        rate = 0.05 * np.sqrt(1 - 0.75 ** (count + 1)) / (1 - 0.9 ** (count + 1))
        b -= rate * m / (np.sqrt(v) + 0.001)
    np.testing.assert_allclose(host.variables["a"], [a], rtol=1e-4)
    np.testing.assert_allclose(host.variables["b"], [b], rtol=1e-4)
    assert losses[1] < 0.1 * first
    assert host.variables["step"] == host.variables["count"] == 40


def test_outputs_of_the_inference_graph_can_be_bound_and_kept() -> None:
    """A running count that the inference graph itself hands out, bound to one of its initializers."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        count (float[n] x) => (float[n] y, float[1] n_new, float[n] z) <float[1] seen = {0}>
        { n_new = Add(seen, seen) y = Mul(x, n_new) z = Neg(x) }
    """)
    model.training_info.add().update_binding.add(key="seen", value="n_new")
    check_training_info(model)
    step = step_model(model, 0)
    assert [value.name for value in step.graph.output] == ["n_new"]
    assert [value.name for value in step.graph.input] == ["x", "seen"]
    kept = step_model(model, 0, keep_outputs=True)
    assert [value.name for value in kept.graph.output] == ["y", "n_new", "z"]
    assert initial_model(model, 0) is None


def test_a_gradient_of_a_value_that_nothing_else_reads() -> None:
    """Its node names the loss in an attribute; what computes it comes behind the node, and is no output."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
        g (float[2] x) => (float[2] y) <float[2] w = {3, 4}> { y = Mul(x, w) }
    """)
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        parser.parse_graph("""
        train (float[2] t) => (float[2] w_next) {
            g = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x", "t"], y = "loss"> (w, x, t)
            w_next = Sub(w, g) d = Sub(y, t) q = Mul(d, d) loss = ReduceSum <keepdims = 0> (q)
        }""")
    )
    info.update_binding.add(key="w", value="w_next")
    check_training_info(model)
    step = expand_operators(step_model(model, 0))
    x, t, w = np.array([[1, 2], [5, 7], [3, 4]], np.float32)
    got = ort.InferenceSession(step.SerializeToString()).run(["w_next"], {"x": x, "t": t})[0]
    np.testing.assert_allclose(got, w - 2 * (w * x - t) * x)


def test_a_plain_build_leaves_training_information_out() -> None:
    """It is about the graph as it was: beside the training model it would name what is no longer there."""
    built = build(packed(parser.parse_model(MLP)))
    assert not built.model.training_info
    assert any("training information" in str(caution) for caution in built.training.cautions)


@pytest.mark.parametrize("mode", ["keep", "train"])
@pytest.mark.thinned(2)
def test_a_step_has_the_outputs_that_it_was_built_to_keep(mode: str, shell: Shell) -> None:
    for name in ("digits_mlp", "digits_cnn"):
        source = SAMPLES / f"{name}.onnx"
        result = shell("build", source, "--loss", "cross-entropy", "--optimizer", "sgd", "--training-info",
                       "--keep-outputs", "--mode", mode, "-o", "described.onnx", "--force")  # fmt: skip
        assert result.code == 0, result.err
        assert shell("expand", "described.onnx", "-o", "plain.onnx", "--force").code == 0
        outputs = [value.name for value in onnx.load("plain.step0.onnx").graph.output]
        assert [each for each in outputs if each.startswith("logits")]
        assert shell("check", "plain.step0.onnx").code == 0


def test_what_is_no_initializer_in_a_function_is_refused() -> None:
    """A weight inside a function of the model has no name in the main graph that an update could be bound to."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[n, 2] x) => (float[n, 2] z) { z = own.layer(x) }
        <domain: "own", opset_import: ["": 17]>
        layer (x) => (z) { w = Constant <value = float[2, 2] {1, 2, 3, 4}> () z = MatMul(x, w) }
    """)
    with raises(UsageError, "conflict", "training_info", "w"):
        packed(model)
