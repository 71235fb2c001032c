"""Every form of a gradient computes what the default does, and PyTorch; `onnxgrad tune` and `build --tuned` choose."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import ModelProto, helper, parser

from onnxgrad_cli.autodiff.kernel_variants import load_tuned
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.jobs.tune import run_tune
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.proof import prove
from tests.cli_harness import Shell
from tests.facts import raises

DIGITS = Path(__file__).parents[2] / "sample_models" / "digits_cnn.onnx"
FLOAT = onnx.TensorProto.FLOAT
Shape = tuple[int | str, ...]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def one_node(
    op_type: str, inputs: Mapping[str, Shape], types: Mapping[str, int] | None = None, **attributes: object
) -> ModelProto:
    """A node from inputs of some shapes, "" where one is left out, to y."""
    node = helper.make_node(op_type, list(inputs), ["y"], name="node", **attributes)
    given = [helper.make_tensor_value_info(n, (types or {}).get(n, FLOAT), shape) for n, shape in inputs.items() if n]
    graph = helper.make_graph([node], "one", given, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def conv(*image: int | str, weight: Shape, **attributes: object) -> ModelProto:
    return one_node("Conv", {"x": image, "w": weight}, **attributes)


def edges() -> ModelProto:
    """Rows of w, taken by i, are added to those of x that i names."""
    nodes = [
        helper.make_node("Gather", ["w", "i"], ["sent"], name="send"),
        helper.make_node("Unsqueeze", ["i", "one"], ["column"]),
        helper.make_node("Shape", ["sent"], ["shape"]),
        helper.make_node("Expand", ["column", "shape"], ["places"]),
        helper.make_node("ScatterElements", ["x", "places", "sent"], ["y"], name="sum", reduction="add"),
    ]
    given = [helper.make_tensor_value_info(name, FLOAT, (90, 64)) for name in "xw"]
    given.append(helper.make_tensor_value_info("i", onnx.TensorProto.INT64, ("N",)))
    one = onnx.numpy_helper.from_array(np.array([1]), "one")
    graph = helper.make_graph(nodes, "edges", given, [onnx.ValueInfoProto(name="y")], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


LSTM = {"x": (4, "B", 3), "w": (2, 20, 3), "r": (2, 20, 5), "b": (2, 40), "": (), "h": (2, "B", 5), "c": (2, "B", 5)}
MODELS = {
    "padded": conv("N", 3, 7, 6, weight=(5, 3, 3, 2), pads=[1, 0, 2, 1]),
    "grouped": conv("N", 4, 6, 6, weight=(6, 2, 3, 3), group=2, pads=[1, 1, 1, 1]),
    "depthwise": conv("N", 4, 6, 6, weight=(4, 1, 3, 3), group=4, dilations=[2, 1]),
    "strided": conv("N", 2, "H", "W", weight=(3, 2, 3, 3), strides=[2, 3], pads=[1, 2, 0, 1]),
    "single": conv("N", 5, 4, 4, weight=(3, 5, 1, 1)),
    "line": conv("N", 3, 9, weight=(4, 3, 3), pads=[2, 0]),
    "volume": conv("N", 2, 4, 4, 3, weight=(2, 2, 2, 2, 2), pads=[1, 0, 0, 0, 1, 0]),
    "lstm": one_node("LSTM", LSTM, direction="bidirectional", hidden_size=5),
    "gru": one_node("GRU", {"x": (3, "B", 3), "w": (1, 15, 3), "r": (1, 15, 5)}, hidden_size=5, direction="reverse"),
    "rnn": one_node("RNN", {"x": (1, "B", 3), "w": (1, 5, 3), "r": (1, 5, 5)}, hidden_size=5),
    "pool": one_node("MaxPool", {"x": ("N", 2, 6, 4)}, kernel_shape=[3, 2], strides=[3, 2]),
    "overlapping pool": one_node("MaxPool", {"x": ("N", 3, "H", "W")}, kernel_shape=[3, 2], pads=[1, 0, 1, 1]),
    "rows": one_node("Gather", {"w": (90, 64), "i": ("N", 5)}, {"i": onnx.TensorProto.INT64}),
    "edges": edges(),
    "many": one_node("Gather", {"w": (5000, 64), "i": ("N", 5)}, {"i": onnx.TensorProto.INT64}),
}
FORMS = {
    "Conv weight gradient": ("convolution", "channels", "pixels", "shifts", "diagonals", "product"),
    "Conv input gradient": ("transposed convolution", "convolution", "gathered product", "product"),
    "LSTM gates": ("kept", "recomputed"),
    **{f"{kind} steps": ("scan", "unrolled") for kind in ("LSTM", "GRU", "RNN")},
    "MaxPool gradient": ("indices", "compared"),
    "ScatterElements sum": ("gathered", "flat"),
    "Gather row sums": ("gathered", "sorted", "flat", "expanded"),
}


def sized(model: ModelProto, batch: int) -> dict[str, np.ndarray]:
    """Arrays for the inputs of a model, its cotangents too."""
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        known = {"N": batch, "B": batch, "H": 7, "W": 8}
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value or known.get(dim.dim_param, 0) for dim in dims]
        whole = value.type.tensor_type.elem_type == onnx.TensorProto.INT64
        feeds[value.name] = rng.integers(-90, 90, shape) if whole else rng.standard_normal(shape).astype(np.float32)
    return feeds


def gradients(model: ModelProto, feeds: dict[str, np.ndarray], tuned: Mapping[str, str]) -> dict[str, np.ndarray]:
    return Executor(derive(model, options=Options(tuned=tuned)), fallback=False)(feeds)


def forms_of(model: ModelProto) -> dict[str, tuple[str, ...]]:
    """The forms that a model's gradients have, by the names of the gradients."""
    copy = ModelProto()
    copy.CopyFrom(model)
    built = build(copy, Options(losses=(LossSpec("mse"),), grad_of_input=("*",)), stop_after="backward")
    return {made.name: made.forms for made in built.training.kernel_variants.choices.values()}


def test_all_forms_are_tried() -> None:
    tried: dict[str, set[str]] = {}
    for model in MODELS.values():
        for name, forms in forms_of(model).items():
            tried.setdefault(name, set()).update(forms)
    assert tried == {name: set(forms) for name, forms in FORMS.items()}


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3, 3)
def test_forms_agree(name: str, batch: int) -> None:
    model = MODELS[name]
    if batch == 0 and name in ("strided", "overlapping pool"):
        pytest.skip("rows and columns of unknown size are one axis of -1, which an empty batch does not have")
    if batch == 0 and name in ("lstm", "gru", "rnn"):
        pytest.skip("onnxruntime's LSTM aborts the process on an empty batch")
    shaped = derive(model)
    feeds = sized(model, batch)
    y = Executor(model, fallback=False)(feeds)["y"]
    feeds["y_grad"] = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    assert {value.name for value in shaped.graph.input} == set(feeds)
    default = gradients(model, feeds, {})
    for gradient, forms in forms_of(model).items():
        for form in forms:
            found = gradients(model, feeds, {gradient: form})
            for each, want in default.items():
                size = np.abs(want).max(initial=1e-6)
                np.testing.assert_allclose(found[each], want, rtol=0, atol=2e-5 * size, err_msg=f"{form}: {each}")


@pytest.mark.parametrize(("target", "counted"), [("standard", True), ("portable", False)])
def test_parts_are_counted_at_run_time_where_that_is_known_to_work(target: str, counted: bool) -> None:
    model = derive(edges(), options=Options(target=target))
    assert ("NonZero" in {node.op_type for node in model.graph.node}) == counted


POOLS = {
    "apart": ((2, 2, 6, 6), {"kernel_size": 2}),
    "overlapping": ((2, 2, 7, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "remainder": ((1, 2, 7, 6), {"kernel_size": (3, 2), "stride": (3, 4)}),
    "dilated": ((1, 3, 9, 8), {"kernel_size": 3, "stride": 1, "dilation": 2, "padding": 1}),
    "hanging over": ((2, 1, 6, 8), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "line": ((2, 3, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "volume": ((1, 2, 4, 5, 4), {"kernel_size": 2, "stride": 2, "ceil_mode": True}),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("case", POOLS)
@pytest.mark.thinned(3)
def test_pooled_maxima_that_are_equal(case: str, symbolic: bool) -> None:
    """The first of several maxima takes all, in both forms as in PyTorch."""
    shape, given = POOLS[case]
    axes = len(shape) - 2
    x = torch.tensor(np.random.default_rng(0).integers(-1, 1, shape), dtype=torch.float32, requires_grad=True)
    y = getattr(F, f"max_pool{axes}d")(x, **given)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    y.backward(g)
    size = given["kernel_size"]
    each = {"kernel_shape": size, "strides": given.get("stride", size), "dilations": given.get("dilation", 1)}
    attributes = {name: np.broadcast_to(value, axes).tolist() for name, value in each.items()}
    pads = [given.get("padding", 0)] * 2 * axes
    dims = [f"s{axis}" for axis in range(len(shape))] if symbolic else shape
    model = one_node("MaxPool", {"x": dims}, **attributes, pads=pads, ceil_mode=int(given.get("ceil_mode", False)))
    if symbolic:
        model.graph.output[0].type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
        model.graph.output[0].type.tensor_type.ClearField("shape")
    model.opset_import[0].version = 22
    feeds = {"x": x.detach().numpy(), "y_grad": g.numpy()}
    for form in FORMS["MaxPool gradient"]:
        found = gradients(model, feeds, {"MaxPool gradient": form})
        (got,) = (found[name] for name in found if name != "y")
        assert x.grad is not None
        np.testing.assert_allclose(got, x.grad.numpy(), atol=1e-6, err_msg=form)


@pytest.mark.parametrize("form", FORMS["Conv weight gradient"][:3])
def test_forms_beside_torch(form: str) -> None:
    feeds = sized(MODELS["strided"], 2)
    x, w = (torch.tensor(feeds[name], dtype=torch.float64, requires_grad=True) for name in "xw")
    y = F.conv2d(F.pad(x, (2, 1, 1, 0)), w, stride=(2, 3))
    feeds["y_grad"] = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(feeds["y_grad"], dtype=torch.float64))
    found = gradients(MODELS["strided"], feeds, {"Conv weight gradient": form})
    for name, leaf in (("x", x), ("w", w)):
        assert leaf.grad is not None
        np.testing.assert_allclose(found[f"{name}_grad"], leaf.grad.numpy(), atol=1e-4)


@pytest.mark.parametrize("attributes", [{"pads": [1, 1, 1, 1]}, {"strides": [3, 2], "pads": [0, 2, 2, 0]}])
def test_an_empty_batch_returns_in_the_textbook_form(attributes: dict[str, list[int]]) -> None:
    """A convolution of no channels, which the samples would be, never returns in onnxruntime."""
    model = conv("N", 8, 6, 4, weight=(6, 4, 1, 3), group=2, **attributes)
    feeds = sized(model, 0)
    feeds["y_grad"] = np.zeros(Executor(model, fallback=False)(feeds)["y"].shape, np.float32)
    found = gradients(model, feeds, {"Conv weight gradient": "convolution"})
    np.testing.assert_array_equal(found["w_grad"], np.zeros((6, 4, 1, 3)))


# -- the file of choices ----------------------------------------------------------------------------------------


def digits(tuned: Mapping[str, str]) -> TrainingModel:
    return build(onnx.load(DIGITS), Options(losses=(LossSpec("cross-entropy"),), tuned=tuned))


def outputs(built: TrainingModel) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    named = {value.name: value for value in built.model.graph.input}
    (x,) = built.training.inputs
    shape = [dim.dim_value or 4 for dim in named[x].type.tensor_type.shape.dim]
    label = np.arange(4, dtype=np.int64)
    feeds = {x: rng.standard_normal(shape).astype(np.float32), built.training.labels[0]: label}
    return Executor(built.model, fallback=False)(feeds)


def test_what_tune_writes_is_what_build_takes(tmp_path: Path) -> None:
    file = tmp_path / "digits.toml"
    found, written = run_tune(DIGITS, file, repeat=1, threads=1)
    assert written == file
    assert {each.place.split(":")[0] for each in found} >= {"Conv weight gradient"}
    chosen = load_tuned(file)
    assert chosen == {each.place: each.best for each in found if each.best != each.default}
    plain = digits({})
    others = {place: next(form for form in made.forms if form != made.default)
              for place, made in plain.training.kernel_variants.choices.items() if len(made.forms) > 1}  # fmt: skip
    assert set(chosen) <= set(others)  # keys with symbols: those of the model as it is, not as it was measured
    assert any("x1x8x8" in place and not place.split(": ")[1][0].isdigit() for place in others)
    for tuned in (chosen, others):
        again = digits(tuned)
        assert again.training.kernel_variants.measured == tuned
        for (name, one), (_, other) in zip(outputs(plain).items(), outputs(again).items(), strict=True):
            np.testing.assert_allclose(other, one, atol=1e-5 * max(1.0, np.abs(one).max()), err_msg=name)


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.thinned(2)
def test_bodies_and_dimensions_without_names_are_measured(tmp_path: Path, unnamed: bool) -> None:
    """The node of a body stands in no graph of its own when it is measured."""
    batch = None if unnamed else "N"
    image = [batch, 2, 5, 5]
    body = helper.make_graph(
        [helper.make_node("Conv", ["s", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
         helper.make_node("Tanh", ["c"], ["s_out"], name="tanh"),
         helper.make_node("Identity", ["on"], ["on_out"], name="on")],
        "body",
        [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, []),
         helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []),
         helper.make_tensor_value_info("s", FLOAT, image)],
        [helper.make_tensor_value_info("on_out", onnx.TensorProto.BOOL, []),
         helper.make_tensor_value_info("s_out", FLOAT, image)],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    stored = {"steps": np.array(3), "yes": np.array(True), "w": 0.2 * rng.standard_normal((2, 2, 3, 3)).astype("f")}
    graph = helper.make_graph(
        [helper.make_node("Loop", ["steps", "yes", "x"], ["y"], name="loop", body=body)], "looped",
        [helper.make_tensor_value_info("x", FLOAT, image)], [helper.make_tensor_value_info("y", FLOAT, image)],
        [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "looped.onnx")
    found, _ = run_tune(tmp_path / "looped.onnx", repeat=1, threads=1)
    assert {each.place.split(":")[0] for each in found} == {"Conv weight gradient", "Conv input gradient"}
    for form in FORMS["Conv weight gradient"]:
        built = build(onnx.load(tmp_path / "looped.onnx"), Options(tuned={"Conv weight gradient": form}))
        proof = prove(built.model, describe(built.model), None, force=True)
        assert proof.status == "passed", proof


def test_a_choice_that_is_none(shell: Shell) -> None:
    place = next(place for place in digits({}).training.kernel_variants.choices if "weight gradient" in place)
    with raises(UsageError, "unknown_name", place, "pixel"):
        digits({place: "pixel"})
    Path("wrong.toml").write_text(f"[kernel_variants]\n{json.dumps(place)} = 'pixel'\n")
    done = shell("build", str(DIGITS), "--loss", "cross-entropy", "--tuned", "wrong.toml", "-o", "t.onnx")
    assert (done.code, done.facts) == (2, ("unknown_name", place, "pixel")) and "pixels" in done.err
    assert not Path("t.onnx").exists()


def test_what_is_of_sizes_that_only_a_run_tells_is_not_measured(tmp_path: Path) -> None:
    """A drawn image may be narrower than the window."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 4, 9] x, int64[1] end) => (float[2, 4, m] y) <int64[1] axis = {2}, int64[1] zero = {0}> {
            part = Slice(x, zero, end, axis) y = Conv<group = 4>(part, w)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 1, 4), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    said: list[str] = []
    found, _ = run_tune(tmp_path / "m.onnx", repeat=1, threads=1, tell=lambda text, _: said.append(text))
    assert not found and any("is skipped" in text for text in said)


def test_a_file_that_is_no_tuning_is_neither_read_nor_replaced(shell: Shell) -> None:
    for text in ("[other]\na = 'b'\n", "no toml", "[kernel_variants]\na = 1\n", "kernel_variants = 3\n"):
        Path("mine.toml").write_text(text)
        for words in (["build", str(DIGITS), "--tuned", "mine.toml"], ["tune", str(DIGITS), "-o", "mine.toml"]):
            done = shell(*words)
            assert (done.code, done.facts) == (2, ("no_data", "mine.toml")), done
        assert Path("mine.toml").read_text() == text


def test_the_report_says_what_was_chosen(shell: Shell) -> None:
    made = digits({}).training.kernel_variants.choices
    place, form = next((place, each.forms[0]) for place, each in made.items() if each.forms[0] != each.default)
    Path("one.toml").write_text(f"[kernel_variants]\n{json.dumps(place)} = '{form}'\n'Conv elsewhere: 1' = 'pixels'\n")
    words = ["build", str(DIGITS), "--loss", "cross-entropy", "-o", "t.onnx", "--force"]
    done = shell(*words, "--tuned", "one.toml", "--json")
    assert done.json["tuned"] == {"choices": len(made), "measured": {place: form}}
    assert f"1 of {len(made)} chosen by measurements" in Path("t.onnx.report.md").read_text()
    Path("none.toml").write_text("[kernel_variants]\n'Conv elsewhere: 1' = 'pixels'\n")
    done = shell(*words, "--tuned", "none.toml", "--json")
    assert done.json["tuned"]["measured"] == {}
    assert any("none of its 1 choice" in each["text"] for each in done.json["cautions"])
    assert shell(*words, "--json").json["tuned"] is None
    assert tomllib.loads(Path("none.toml").read_text())
