"""The description in a model: it describes what was built, and a stranger's that can't be right is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.cli import run
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import DERIVED, LOSS, ROLES, VERSION, Role, describe
from onnxgrad_cli.options import Options
from tests.cli_harness import MLP, Result, Shell, save
from tests.facts import facts, raises
from tests.report.test_build_report import mlp

Lie = Callable[[Any], object]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    save(MLP, tmp_path / "mlp.onnx")
    np.savez("d.npz", x=np.ones((3, 4), np.float32))
    return Shell(tmp_path, capsys)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A training model that passes `check`."""
    folder = tmp_path_factory.mktemp("checked")
    model, out = save(MLP, folder / "mlp.onnx"), folder / "t.onnx"
    assert run(["build", str(model), "--optimizer", "adam", "-o", str(out), "--no-report"]) == 0
    assert run(["check", str(out)]) == 0
    return out.read_bytes()


def lied(file: str, key: str, lie: Lie) -> None:
    """Change what an entry of a model's metadata says."""
    model = onnx.load(file)
    entry = next(entry for entry in model.metadata_props if entry.key == key)
    said = json.loads(entry.value)
    lie(said)
    entry.value = json.dumps(said)
    onnx.save(model, file)


def named_steps(done: Result) -> set[str]:
    """The names that the check's output has in quotes, apart from those of files."""
    return {name for name in re.findall(r"(?<!\w)'([^'\n]+)'(?!\w)", done.out) if not name.endswith(".onnx")}


@pytest.mark.parametrize(
    "names",
    ["{[]: 1}", "{{1}}", "{0: 0x" + "f" * 5000 + "}", "(" * 10_000, "-" * 10_000 + "1", "['a'] * 2", "{0: ...}", "1"],
)
def test_names_of_classes_that_are_none(shell: Shell, names: str) -> None:
    model = onnx.load("mlp.onnx")
    model.metadata_props.add(key="names", value=names)
    onnx.save(model, "mlp.onnx")
    done = shell("predict", "mlp.onnx", "--data", "d.npz", "-o", "p.csv")
    assert done.code == 0, done.err
    assert Path("p.csv").read_text().splitlines()[0].startswith("y_0,y_1")


def test_names_of_classes_that_a_terminal_or_a_spreadsheet_would_obey(shell: Shell) -> None:
    model = onnx.load("mlp.onnx")
    model.metadata_props.add(key="onnxgrad.classes", value=json.dumps({"y": ["=1+1", "a\x1b[2J\u202e"]}))
    onnx.save(model, "mlp.onnx")
    said = set()
    for x in (np.ones((3, 4), np.float32), -np.ones((3, 4), np.float32)):
        np.savez("d.npz", x=x)
        assert shell("predict", "mlp.onnx", "--data", "d.npz", "-o", "p.csv", "--force").code == 0
        said |= {line.rpartition(",")[2] for line in Path("p.csv").read_text().splitlines()}
    assert said <= {"y_label", "'=1+1", "a\\x1b[2J\\u202e"} and len(said) > 1


@pytest.mark.parametrize(
    ("key", "lie", "said"),
    [
        (ROLES, lambda said: said["outputs"]["w1_grad"].update(of=[]), "of can't be []"),
        (ROLES, lambda said: said["outputs"]["w1_grad"].update(of="nobody"), ("mismatch", "nobody")),
        (ROLES, lambda said: said["inputs"].update(x=3), "can't be 3"),
        (ROLES, lambda said: said["inputs"].pop("w1"), ("mismatch", "w1")),
        (ROLES, lambda said: said["state"].update(nobody=next(iter(said["state"].values()))), ("mismatch", "nobody")),
        (ROLES, lambda said: next(iter(said["state"].values())).update(shape=[None]), "can't be None"),
        (ROLES, lambda said: said.update(adapters=[{"rank": 0}]), "has no 'weight'"),
        (ROLES, lambda said: said.update(quantized={"weights": {}}), "can't be read"),
        (ROLES, lambda said: said.update(held=[[]]), "can't be []"),
        (ROLES, lambda said: said.update(held=["w1"]), ("mismatch", "w1")),
        (ROLES, lambda said: said["outputs"].pop("w1_grad"), ("mismatch", "w1_grad")),
        (ROLES, lambda said: said["inputs"].pop("x"), ("mismatch", "x")),
        (ROLES, lambda said: said["outputs"]["w1_grad"].update(role="note"), ("mismatch", "w1_grad", "note")),
        (ROLES, lambda said: said["inputs"].update(w1="frozen"), ("mismatch", "w1", "frozen")),
        (ROLES, lambda said: said["outputs"]["w1_grad"].update(role="loss"), ("mismatch", "loss")),
        (ROLES, lambda said: said["outputs"]["w1_grad"].update(of="w2"), ("mismatch", "gradient", "w2")),
        (LOSS, lambda said: said["terms"][0].update(classes="many"), "classes can't be 'many'"),
        (LOSS, lambda said: said["terms"].append(3), "can't be 3"),
        (LOSS, lambda said: said.update(reduction=None), "reduction can't be None"),
    ],
)  # fmt: skip
@pytest.mark.thinned(2)
def test_roles_that_lie(shell: Shell, checked: bytes, key: str, lie: Lie, said: str | tuple[str, ...]) -> None:
    Path("t.onnx").write_bytes(checked)
    lied("t.onnx", key, lie)
    done = shell("check", "t.onnx")
    assert done.code == 1 and done.facts[0] in ("mismatch", "unreadable_file"), done.err
    assert done.facts == said if isinstance(said, tuple) else said in done.err


def negated(file: str, gradient: str) -> None:
    """Change the sign of an output that is a gradient."""
    model = onnx.load(file)
    for node in model.graph.node:
        node.output[:] = ["right" if name == gradient else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Neg", ["right"], [gradient]))
    onnx.save(model, file)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda said: None, "w1 (2.0e+00)"),
        (
            lambda said: said["outputs"]["w1_grad"].update(role="kept output", of=""),
            "no output is the gradient of 'w1'",
        ),
        (
            lambda said: (said["inputs"].update(w1="constant"), said["outputs"]["w1_grad"].update(role="kept output")),
            "'w1_grad' depends on labels",
        ),
        (
            lambda said: (
                said["inputs"].update(w1="state"),
                said["outputs"].update(w1_grad={"role": "next state", "of": "w1"}),
            ),
            "'w1_grad' depends on labels, but is described as a running statistic",
        ),
        (lambda said: said.update(partial=["w1"]), "the gradient of 'w1' leaves out"),
        (lambda said: said.update(held=["h"]), "'h' is treated as a constant"),
        (lambda said: said.update(estimated=True), "straight-through estimates"),
        (
            lambda said: [said["outputs"][f"{name}_grad"].update(role="kept output") for name in ("w1", "b1", "w2")],
            "no output is a gradient",
        ),
    ],
)
def test_what_a_description_leaves_out_is_not_proved(shell: Shell, lie: Lie, said: str) -> None:
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    negated("t.onnx", "w1_grad")
    lied("t.onnx", ROLES, lie)
    done = shell("check", "t.onnx")
    assert done.code == 4 and said in done.out + done.err, done.out + done.err


def changed(file: str, without: str = "", nodes: str = "", **values: float) -> None:
    """Append nodes to a model, of which the last makes the gradient that is now called `right`, or drop that output."""
    model = onnx.load(file)
    if without:
        for output in [each for each in model.graph.output if each.name == without]:
            model.graph.output.remove(output)
    else:
        more = onnx.parser.parse_graph(f"g () => () {{ {nodes} }}")
        gradient = more.node[-1].output[0]
        for node in model.graph.node:
            node.output[:] = ["right" if name == gradient else name for name in node.output]
        model.graph.node.extend(more.node)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value, np.float32), name) for name, value in values.items()
    )
    onnx.save(model, file)


def test_a_weight_that_is_called_state(shell: Shell) -> None:
    """Statistics and an optimizer's state are read by no loss."""
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    changed("t.onnx", without="w1_grad")
    lied("t.onnx", ROLES, lambda said: (said["inputs"].update(w1="state"), said["outputs"].pop("w1_grad")))
    done = shell("check", "t.onnx")
    assert done.code == 4 and named_steps(done) == {"w1"}, done.out + done.err


def test_what_is_called_a_gradient_and_knows_no_label(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    changed("t.onnx", nodes="w1_grad = Tanh(w1)")
    lied("t.onnx", ROLES, lambda said: (said["inputs"].update(w1="constant"),
                                        said["outputs"].update(w1_grad={"role": "kept output"})))  # fmt: skip
    done = shell("check", "t.onnx")
    assert done.code == 4 and "w1_grad" in named_steps(done), done.out + done.err


def test_a_gradient_that_is_wrong_behind_noise(shell: Shell) -> None:
    """It is twice as large, and the last digits of w1 change it by half: in float32 that hides it."""
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    nodes = "a = Mul(w1, big) b = Sin(a) c = Mul(b, half) d = Add(c, one) e = Mul(right, d) w1_grad = Mul(e, two)"
    changed("t.onnx", nodes=nodes, big=3e8, half=0.5, one=1, two=2)
    done = shell("check", "t.onnx")
    assert done.code == 4 and "wrong: w1" in done.out, done.out + done.err


def test_a_small_gradient_that_is_right_in_float64_alone(shell: Shell) -> None:
    """What is added to b1's is rounding, and most of it; beside the largest gradient it is small."""
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    nodes = "a = Add(b1, big) b = Sub(a, big) c = Sub(b, b1) d = Mul(c, little) b1_grad = Add(right, d)"
    changed("t.onnx", nodes=nodes, big=1e9, little=1e-2)
    done = shell("check", "t.onnx")
    assert done.code == 4 and named_steps(done) == {"b1"}, done.out + done.err


def test_a_root_that_is_no_norm_of_an_adapter(shell: Shell) -> None:
    """The weight is the root of its square, times its sign: held, its gradient is zero."""
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    changed("t.onnx", nodes="w1_grad = Sub(w1, w1)")
    model = onnx.load("t.onnx")
    nodes = list(onnx.parser.parse_graph("g () => () { a = Mul(w1, w1) b = Sqrt(a) c = Sign(w1) w = Mul(b, c) }").node)
    model.graph.node[0].input[1] = "w"
    nodes += model.graph.node
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, "t.onnx")
    adapter = {"weight": "w2", "a": "w2", "b": "w1", "rank": 1, "alpha": 1.0, "scaling": "lora", "magnitude": "b1"}
    lied("t.onnx", ROLES, lambda said: said.update(held=["b"], adapters=[adapter]))
    done = shell("check", "t.onnx")
    assert done.code == 4 and named_steps(done) == {"b"}, done.out + done.err


def test_a_model_that_is_described_twice(shell: Shell) -> None:
    """As a model of some derivatives of its own loss."""
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    negated("t.onnx", "w1_grad")
    model = onnx.load("t.onnx")
    said = {"kind": "vjp", "of": ["loss"], "wrt": ["w2"], "inputs": [], "outputs": ["w2_grad"], "mode": "keep"}
    model.metadata_props.add(key=DERIVED, value=json.dumps(said))
    onnx.save(model, "t.onnx")
    done = shell("check", "t.onnx")
    assert done.code == 1 and done.facts == ("mismatch",), done.out + done.err


@pytest.mark.parametrize("options", [(), ("--option", "keep-outputs")])
def test_a_derivative_that_the_description_leaves_out(shell: Shell, options: tuple[str, ...]) -> None:
    original = ("--original", "mlp.onnx")
    assert shell("derive", "mlp.onnx", "-o", "t.onnx", *options).code == 0
    how: tuple[str, ...]
    for how in (original, ()):
        assert shell("check", "t.onnx", *how).code == (0 if how or options else 4)
    negated("t.onnx", "w1_grad")
    lied(
        "t.onnx",
        DERIVED,
        lambda said: [said[each].remove(name) for each, name in (("wrt", "w1"), ("outputs", "w1_grad"))],
    )
    for how in (original, ()):
        done = shell("check", "t.onnx", *how)
        assert done.code == 4, done.out
        assert named_steps(done) == {"w1_grad"} or not (how or options), done.out


def test_a_derivative_by_what_is_not_finite_in_one_place(shell: Shell) -> None:
    assert shell("derive", "mlp.onnx", "-o", "t.onnx", "--option", "keep-outputs").code == 0
    model = onnx.load("t.onnx")
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "w1")
    w1 = onnx.numpy_helper.to_array(tensor).copy()
    w1[0, 0] = -np.inf
    tensor.CopyFrom(onnx.numpy_helper.from_array(w1, "w1"))
    onnx.save(model, "t.onnx")
    np.savez("d.npz", x=np.linspace(0.1, 1, 8, dtype=np.float32).reshape(2, 4))
    done = shell("check", "t.onnx", "--data", "d.npz")
    assert done.code == 0, done.out + done.err
    negated("t.onnx", "w1_grad")
    done = shell("check", "t.onnx", "--data", "d.npz")
    assert done.code == 4 and "wrong: w1" in done.out, done.out + done.err


def test_a_loss_that_is_no_number(shell: Shell) -> None:
    """Another output is called the loss, and another the gradient."""
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0

    def swapped(said: dict[str, dict[str, dict[str, str]]]) -> None:
        outputs = said["outputs"]
        outputs["loss"], outputs["w1_grad"] = outputs["w1_grad"], outputs["loss"]

    lied("t.onnx", ROLES, swapped)
    done = shell("check", "t.onnx")
    assert done.code == 4 and named_steps(done) == {"w1_grad"}, done.out + done.err


@pytest.mark.parametrize("role", ["loss", "gradient"])
def test_integers_are_no_loss_and_no_gradient(shell: Shell, role: str) -> None:
    assert shell("build", "mlp.onnx", "-o", "t.onnx", "--no-report").code == 0
    model = onnx.load("t.onnx")
    model.graph.node.append(onnx.helper.make_node("Shape", ["x"], ["sizes"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("sizes", onnx.TensorProto.INT64, [2]))
    onnx.save(model, "t.onnx")
    lied("t.onnx", ROLES, lambda said: said["outputs"].update(sizes={"role": role, "of": "w1"}))
    done = shell("check", "t.onnx")
    assert done.code == 1 and done.facts == ("mismatch", "sizes", role), done.err


@pytest.mark.parametrize(
    ("kind", "lie", "said"),
    [
        ("vjp", lambda said: said.update(wrt=["x", "w1", "w2", "nobody"]), "no input or weight 'nobody'"),
        ("vjp", lambda said: said.update(wrt=["x"]), "the numbers of inputs and outputs don't fit"),
        ("vjp", lambda said: said.update(wrt=["x", "w1", "w1", "w2"]), "'w1' is listed twice"),
        ("vjp", lambda said: said.update(kind="hessian"), "the numbers of inputs and outputs don't fit"),
        ("vjp", lambda said: said.update(kind="gradient"), "of kind 'gradient'"),
        ("vjp", lambda said: said.update(mode=""), "mode ''"),
        ("vjp", lambda said: said.update(pick="the best"), "no class 'the best'"),
        ("vjp", lambda said: said.update(pick="label"), "no class 'label'"),
        ("vjp", lambda said: said.update(pick="9" * 5000), "no class '9999"),
        ("vjp", lambda said: said.update(of=3), "of can't be 3"),
        ("vjp", lambda said: said.update(pick="9"), "not proved"),
        ("vjp", lambda said: said.update(pick="1", class_axis=7), "not proved"),
        ("vjp", lambda said: said["wrt"].reverse(), "not proved"),
        ("vjp", lambda said: said.update(inner=["nobody"]), "not proved"),
        ("jacobian", lambda said: said.update(per_sample=["x"]), "not proved"),
        ("jacobian", lambda said: said.update(kind="hessian"), "not proved"),
        ("gnvp", lambda said: said.update(weights=["x"]), "not proved"),
        ("hessian-diagonal", lambda said: said.update(kind="laplacian"), "not proved"),
        ("laplacian", lambda said: said.update(kind="hessian-diagonal"), "not proved"),
        ("hvp", lambda said: said.update(weights=["x", "x"]), "the numbers of inputs and outputs don't fit"),
        ("vjp", lambda said: said.update(weights=["x"]), "the numbers of inputs and outputs don't fit"),
    ],
)  # fmt: skip
@pytest.mark.thinned(2)
def test_derivatives_that_lie(shell: Shell, kind: str, lie: Lie, said: str) -> None:
    original = ("--original", "mlp.onnx")
    assert shell("derive", "mlp.onnx", "--kind", kind, "-o", "t.onnx").code == 0
    assert shell("check", "t.onnx", *original).code == 0
    lied("t.onnx", DERIVED, lie)
    for how in (original, ()):
        done = shell("check", "t.onnx", *how)
        assert done.code in (1, 4), done.out
        assert "internal" not in done.err
        assert said in done.out + done.err


def test_a_training_model_describes_itself() -> None:
    built = build(mlp(), Options(grad_of_input=("x",), label="t", keep_outputs=True))
    stored = onnx.load_model_from_string(built.model.SerializeToString())
    roles = describe(stored)
    assert roles.loss == "loss"
    assert roles.fed == ["x", "t"]
    assert roles.gradients == {name: f"{name}_grad" for name in ("w1", "w2", "b", "x")}
    assert roles.outputs["y"] == Role("kept output")
    assert [(term.name, term.output, term.label) for term in roles.losses] == [("mse", "y", "t")]
    assert roles.reduction == "mean"


def test_a_second_build_describes_the_second_model() -> None:
    again = build(build(mlp()).model, Options(losses=(LossSpec("mse", "w1_grad", "t2"),), train=("w2",)))
    keys = [entry.key for entry in again.model.metadata_props]
    assert len(keys) == len(set(keys))
    assert describe(again.model).losses[0].output == "w1_grad"
    assert describe(again.model).loss == again.training.loss


def test_other_metadata_stay() -> None:
    proto = mlp()
    helper.set_model_props(proto, {"author": "somebody", VERSION: "0.0.0"})
    props = {entry.key: entry.value for entry in build(proto).model.metadata_props}
    assert props["author"] == "somebody"
    assert props[VERSION] != "0.0.0"


def test_a_model_without_a_description_is_refused() -> None:
    with raises(UsageError, "wrong_type", "onnxgrad.roles"):
        describe(mlp())


@pytest.mark.parametrize("value", ["", "{", "[]", '{"inputs": {}}', '{"inputs": {}, "outputs": {"loss": "loss"}}'])
def test_a_broken_description_is_an_error(value: str) -> None:
    proto = build(mlp()).model
    helper.set_model_props(proto, {ROLES: value, LOSS: '{"terms": [], "reduction": "mean"}'})
    with pytest.raises(OnnxgradError) as caught:
        describe(proto)
    assert facts(caught.value)[:2] == ("unreadable_file", ROLES)


def test_a_description_that_no_longer_fits_is_an_error() -> None:
    proto = build(mlp()).model
    del proto.graph.output[1]
    with raises(OnnxgradError, "mismatch", "w1_grad"):
        describe(proto)
