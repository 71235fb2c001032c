"""The package as a library: its public names, its errors, and the sources that a model can come from."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

import onnxgrad_cli
from onnxgrad_cli import (
    Course,
    Group,
    LoraSpec,
    LossSpec,
    Options,
    RecomputeSpec,
    Trainer,
    UsageError,
    build,
    compat,
    derive,
    gradcheck,
    inspect,
    run_build,
    run_derive,
    run_tune,
)
from onnxgrad_cli.compat import DerivativeOptions, generate_artifacts, onnx_derivative, random_feed
from onnxgrad_cli.ir.weightless_copy import copied
from onnxgrad_cli.losses import LOSSES, loss
from onnxgrad_cli.optimizers import OPTIMIZERS, optimizer
from onnxgrad_cli.training.metrics import METRICS
from tests.cli_harness import Shell
from tests.facts import raises

PACKAGE = Path(onnxgrad_cli.__file__).parent

TEXT = """<ir_version: 10, opset_import: ["" : 18]> model (float[n, 3] x) => (float[n, 2] y)
<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {0, 1}> { h = MatMul(x, w) y = Add(h, b) }"""


def model() -> ModelProto:
    return onnx.parser.parse_model(TEXT)


# -- the names -----------------------------------------------------------------------------------------------------


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    for package in (onnxgrad_cli, compat):
        assert_the_same_names(package)


def assert_the_same_names(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    found = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onnxgrad_cli.")
        for alias in node.names
        if alias.name == alias.asname
    }
    assert {*package.__all__, "__version__"} == {*found, "__version__"}
    for name, home in found.items():
        assert getattr(package, name) is getattr(import_module(home), name), name


def test_every_job_is_public() -> None:
    jobs = {
        name
        for path in (PACKAGE / "jobs").glob("*.py")
        for name in re.findall(r"^def (run_\w+)", path.read_text(), re.M)
    }
    assert len(jobs) > 9 and jobs <= set(onnxgrad_cli.__all__)


# -- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossSpec("mze"), "there is no loss 'mze'"),
        (lambda: LossSpec("mse", weight=float("inf")), "the weight inf of 'mse' is not a finite number"),
        (lambda: LossSpec("mse", output=1), "`output=1`: expected a string or None"),
        (lambda: LoraSpec(0), "a rank of 0 leaves nothing to train"),
        (lambda: LoraSpec(8.0), "`lora=8.0`: expected a rank, got a float"),
        (lambda: LoraSpec(2, -1.0), "alpha must be a positive number, not -1.0"),
        (lambda: RecomputeSpec("blocks"), "`kind='blocks'` is none of 'elementwise', 'block', 'budget' and 'optimal'"),
        (lambda: RecomputeSpec("block"), "the kind 'block' requires a pattern"),
        (lambda: RecomputeSpec("budget", size=-1), "`size=-1`: expected a whole number of 0 or more"),
        (lambda: Group("*", {"lr": -1}), "lr takes a factor of the learning rate, not -1"),
        (lambda: Group("*", "lr=2"), "`options='lr=2'`: expected a dict"),
        (lambda: Course(epoch=3), "`Course` has no option 'epoch'"),
        (lambda: Course(epochs=0), "`epochs=0`: expected a whole number of 1 or more"),
        (lambda: Course(threads=0), "`threads=0`"),
        (
            lambda: Course(shuffle=False, samples=onnxgrad_cli.SampleOptions(balance=True)),
            "`balance` can't be combined with `shuffle=False`",
        ),
        (lambda: Course(init="kaiming"), "`init='kaiming'` is none of"),
        (lambda: Course(metrics="accuracy"), "`metrics='accuracy'`: expected a tuple"),
        (lambda: Course(learning_rate=float("nan")), "`learning_rate=nan`: expected a finite number"),
        (lambda: derive(model(), "hessians"), "there is no derivative 'hessians'"),
        (lambda: derive(model(), cotangents="Ones"), "`cotangents='Ones'` is none of"),
        (lambda: build(3), "expected a path, a ModelProto or its bytes, got int"),
    ],
)
def test_what_else_is_wrong_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as found:
        make()
    assert message in str(found.value)


def test_what_a_user_registers_can_be_asked_for() -> None:
    with LOSSES.scoped(), OPTIMIZERS.scoped():

        @loss("quartic")
        def quartic(op: Any, prediction: Any, label: Any) -> Any:
            """The fourth power."""
            return (prediction - label) ** 4.0

        @optimizer("halving")
        def halving(op: Any, weight: Any, gradient: Any, state: Any) -> Any:
            """Half of it."""
            return weight / 2.0

        built = build(model(), Options(losses=(LossSpec("quartic"),), optimizer="halving"))
    assert built.training.state["w"] == "w_next"
    with raises(UsageError, "unknown_name", "quartic"):
        LossSpec("quartic")


# -- the words of the command line -----------------------------------------------------------------------------------


# -- sources of a model ---------------------------------------------------------------------------------------------

SOURCES: dict[str, Callable[[Path], Any]] = {
    "path": lambda path: path,
    "str": str,
    "bytes": Path.read_bytes,
    "model": lambda path: onnx.load(path),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_may_come_from_anywhere(source: str, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(), path)
    given = SOURCES[source](path)
    before = copied(given) if isinstance(given, ModelProto) else None
    feed = {"x": np.ones((4, 3), np.float32), "label": np.zeros((4, 2), np.float32)}
    built = build(given, Options(optimizer="sgd"))
    assert built.model == build(model(), Options(optimizer="sgd")).model
    assert derive(given, "jvp") == derive(model(), "jvp")
    assert onnx_derivative(given, options=DerivativeOptions.Zero) == onnx_derivative(model())
    assert gradcheck(given, {"x": feed["x"]}) < 1e-6
    assert random_feed(given, seed=0)["x"].shape == (10, 3)
    assert inspect(given).status == "differentiable"
    assert run_build(given, tmp_path / "train.onnx", no_report=True).status == "built"
    assert run_derive(given, tmp_path / "vjp.onnx")[1] == [tmp_path / "vjp.onnx"]
    assert run_tune(given, tmp_path / "tuned.toml", repeat=1)[1] == tmp_path / "tuned.toml"
    assert generate_artifacts(given, loss="mse", artifact_directory=tmp_path / "artifacts")
    onnx.save(built.model, path)
    trainer = Trainer(SOURCES[source](path), threads=1)
    assert trainer.step(feed) > trainer.step(feed)
    assert before is None or given == before


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_every_other_job_takes_a_model_from_anywhere(source: str, shell: Shell) -> None:
    onnx.save(model(), "net.onnx")
    np.savez("d.npz", x=np.eye(3, dtype=np.float32), label=np.zeros((3, 2), np.float32))
    assert run_build("net.onnx", "t.onnx", Options(optimizer="sgd"), weights="inputs", no_report=True).status == "built"
    assert run_build("net.onnx", "plain.onnx", no_report=True).status == "built"
    given, built, plain = (SOURCES[source](Path(f"{name}.onnx")) for name in ("net", "t", "plain"))
    predicted = onnxgrad_cli.run_predict(given, {"x": np.eye(3, dtype=np.float32)}, "p.npz")
    np.testing.assert_array_equal(predicted.outputs["y"], [[1, 3], [3, 5], [5, 7]])
    assert onnxgrad_cli.run_evaluate(given, "d.npz").results["loss"] == pytest.approx(118 / 6)
    assert onnxgrad_cli.run_artifacts(given, "art", Options(optimizer="sgd")).status == "built"
    assert onnxgrad_cli.run_check(plain).verdict == "proved"
    assert onnxgrad_cli.run_explain(given, "d.npz").values.shape == (3, 3)
    assert len(onnxgrad_cli.run_attack(given, "d.npz").samples) == 3
    assert onnxgrad_cli.run_expand(given, "expanded.onnx")
    assert onnxgrad_cli.run_train(given, "d.npz", "trained.onnx", course=Course(epochs=1), run="run")
    assert onnxgrad_cli.run_export("run", given, "exported.onnx")
    assert onnx.load("exported.onnx").graph == onnx.load("trained.onnx").graph
    assert onnxgrad_cli.run_view(given, "net.html")[1] == Path("net.html").read_text()
    assert set(onnxgrad_cli.compat.get_train_initializer(given)) == {"w", "b"}
    if source in ("path", "str"):  # the values of its weights are in another file of the folder
        assert onnxgrad_cli.run_pack(built, "site", data="d.npz")


def test_what_has_no_file_needs_a_name_for_what_is_written(tmp_path: Path) -> None:
    for job in (run_build, run_derive, run_tune):
        with pytest.raises(UsageError, match="`out` is required"):
            job(model())


def test_bytes_are_checked_as_files_are() -> None:
    with pytest.raises(onnxgrad_cli.OnnxgradError, match="zip archive"):
        build(b"PK\x03\x04" + bytes(100))
    with pytest.raises(onnxgrad_cli.OnnxgradError, match="is empty"):
        derive(b"")


# -- arguments of wrong types ---------------------------------------------------------------------------------------

TAKE_A_MODEL: dict[str, Callable[[Any], object]] = {
    "build": build,
    "derive": derive,
    "inspect": inspect,
    "run_build": lambda it: run_build(it, "out.onnx"),
    "run_artifacts": lambda it: onnxgrad_cli.run_artifacts(it, "folder"),
    "run_check": onnxgrad_cli.run_check,
    "run_check on": lambda it: onnxgrad_cli.run_check("train.onnx", data=it),
    "run_derive": lambda it: run_derive(it, "out.onnx"),
    "run_explain": lambda it: onnxgrad_cli.run_explain(it, "d.npz"),
    "run_explain on": lambda it: onnxgrad_cli.run_explain("net.onnx", it),
    "run_attack": lambda it: onnxgrad_cli.run_attack(it, "d.npz"),
    "run_attack on": lambda it: onnxgrad_cli.run_attack("net.onnx", it),
    "run_expand": lambda it: onnxgrad_cli.run_expand(it, "out.onnx"),
    "run_export": lambda it: onnxgrad_cli.run_export("run", it, "out.onnx"),
    "run_export of": lambda it: onnxgrad_cli.run_export(it, "net.onnx", "out.onnx"),
    "run_pack": lambda it: onnxgrad_cli.run_pack(it, "folder", data="d.npz"),
    "run_train": lambda it: onnxgrad_cli.run_train(it, "d.npz", "out.onnx"),
    "run_train on": lambda it: onnxgrad_cli.run_train("net.onnx", it, "out.onnx"),
    "run_tune": lambda it: run_tune(it, "out.toml"),
    "run_view": lambda it: onnxgrad_cli.run_view(it, "out.html"),
    "generate_artifacts": lambda it: generate_artifacts(it, loss="mse", artifact_directory="folder"),
    "onnx_derivative": onnx_derivative,
    "add_loss_output": onnxgrad_cli.compat.add_loss_output,
    "get_train_initializer": onnxgrad_cli.compat.get_train_initializer,
    "gradcheck": lambda it: gradcheck(it, {}),
    "random_feed": random_feed,
    "open_artifacts": onnxgrad_cli.compat.open_artifacts,
    "run_evaluate": lambda it: onnxgrad_cli.run_evaluate(it, "d.npz"),
    "run_evaluate on": lambda it: onnxgrad_cli.run_evaluate("net.onnx", it),
    "run_predict": lambda it: onnxgrad_cli.run_predict(it, "d.npz"),
    "run_predict on": lambda it: onnxgrad_cli.run_predict("net.onnx", it),
    "save_checkpoint": lambda it: onnxgrad_cli.compat.save_checkpoint(it, it),
    "Trainer": Trainer,
}
"""Name of a function -> a call that passes its argument as a model, file or folder."""

TAKE_WORDS: dict[str, Callable[[Any], object]] = {
    "definition": lambda it: onnxgrad_cli.definition(it)(lambda op, x: x),
    "definition of": onnxgrad_cli.definition("Own"),
    "gradient_definition": lambda it: onnxgrad_cli.compat.gradient_definition(it, "Own"),
    "lookup": onnxgrad_cli.lookup,
    "loss": lambda it: loss(it)(lambda op, prediction, label: prediction),
    "loss of": loss("own"),
    "metric": lambda it: onnxgrad_cli.metric(it, higher=True)(lambda: None),
    "metric of": onnxgrad_cli.metric("own", higher=True),
    "no_gradient": onnxgrad_cli.no_gradient,
    "optimizer": lambda it: optimizer(it)(lambda op, weight, gradient, state: weight),
    "optimizer of": optimizer("own"),
    "parse_schedule": lambda it: onnxgrad_cli.parse_schedule(it, 0.1, 10),
    "refuse": lambda it: onnxgrad_cli.refuse(it, "why"),
    "rule": lambda it: onnxgrad_cli.rule(it)(lambda op, g, y, x: g),
    "rule of": onnxgrad_cli.rule("Own"),
    "Schedule": lambda it: onnxgrad_cli.Schedule(it, 0.1, 10),
    "stop_gradient": lambda it: onnxgrad_cli.stop_gradient(it, [0]),
    "stop_gradient at": lambda it: onnxgrad_cli.stop_gradient("Add", it),
}
"""Name of a function -> a call that passes its argument as a name or function."""


def test_a_wrong_thing_is_refused_in_words(shell: Shell) -> None:
    onnx.save(model(), "net.onnx")
    assert run_build("net.onnx", "train.onnx", no_report=True, verify=False).status == "built"
    before = shell.files()
    for name, call in TAKE_A_MODEL.items():
        for wrong in (3, None, 2.5, "gone.onnx", Path("gone.onnx")):
            if wrong is None and name == "run_check on":
                continue  # None means that the argument is omitted
            with pytest.raises(onnxgrad_cli.OnnxgradError) as found:
                call(wrong)
            assert found.value.message and "object" not in found.value.message, (name, wrong)
    assert {name for name in shell.files() if not name.startswith("folder")} == set(before)


@pytest.mark.parametrize("name", TAKE_WORDS)
def test_a_wrong_word_is_refused_and_nothing_is_registered(name: str) -> None:
    tables = (LOSSES, OPTIMIZERS, METRICS)
    known = [list(table) for table in tables]
    with onnxgrad_cli.scoped():
        rules = list(onnxgrad_cli.all_rules())
        for wrong in (3, None, -2.5):
            with pytest.raises(onnxgrad_cli.OnnxgradError) as found:
                TAKE_WORDS[name](wrong)
            assert found.value.message and "object" not in found.value.message, (name, wrong)
        assert list(onnxgrad_cli.all_rules()) == rules and [list(table) for table in tables] == known


def test_every_public_function_is_given_a_wrong_thing() -> None:
    offered = {name: package for package in (onnxgrad_cli, compat) for name in package.__all__}
    functions = {name for name, package in offered.items() if isfunction(getattr(package, name))}
    given = {name.partition(" ")[0] for name in (*TAKE_A_MODEL, *TAKE_WORDS)}
    assert functions - given == {"all_rules", "scoped"}, "these two take nothing"


@pytest.mark.slow
def test_a_text_is_a_path_everywhere(shell: Shell) -> None:
    onnx.save(model(), "net.onnx")
    feed = {"x": np.ones((8, 3), np.float32), "label": np.zeros((8, 2), np.float32)}
    np.savez("d.npz", **feed)
    np.savez("x.npz", x=feed["x"])
    sgd, lora, once = Options(optimizer="sgd"), Options(lora=LoraSpec(1)), Course(epochs=1)
    assert run_build("net.onnx", "t.onnx", sgd, test_data="x.npz", dump_passes="dump", reports=["r.md"]).proof
    assert onnxgrad_cli.run_check("t.onnx", data="x.npz", original="net.onnx").verdict == "proved"
    assert onnxgrad_cli.run_artifacts("net.onnx", "art", Options(optimizer="adamw"), test_data="x.npz").proof
    assert onnxgrad_cli.compat.open_artifacts("art")
    assert run_derive("net.onnx", "v.onnx", test_data="x.npz")[1]
    onnxgrad_cli.run_train("net.onnx", "d.npz", "a.onnx", lora, once, val="d.npz", run="run", adapter="a.safetensors")
    onnxgrad_cli.run_train("net.onnx", "d.npz", "b.onnx", lora, once, run="other", adapter_from="a.safetensors")
    trained = onnx.load("a.onnx")
    for source in ("run", "run/best.safetensors", "a.safetensors", Path("run")):
        onnxgrad_cli.run_export(source, "net.onnx", "e.onnx", force=True)
        assert onnx.load("e.onnx").graph == trained.graph, "of a folder the best checkpoint is taken"
    assert run_build("net.onnx", "w.onnx", sgd, weights="inputs", verify=False).status == "built"
    assert onnxgrad_cli.run_export("w.bin", "net.onnx", "e.onnx", roles="w.json", force=True)
    assert onnxgrad_cli.run_pack("w.onnx", "site", data="d.npz")


def test_a_training_model_is_no_original(shell: Shell) -> None:
    onnx.save(model(), "net.onnx")
    np.savez("d.npz", x=np.ones((8, 3), np.float32), label=np.zeros((8, 2), np.float32))
    run_build("net.onnx", "t.onnx", verify=False, no_report=True)
    for command in (("build", "t.onnx"), ("inspect", "t.onnx"), ("train", "t.onnx", "--data", "d.npz")):
        result = shell(*command)
        assert result.code == 2 and "is already a training model" in result.err, result.err


def test_labels_that_do_not_fit_name_what_would(shell: Shell) -> None:
    onnx.save(model(), "net.onnx")
    np.savez("d.npz", x=np.ones((8, 3), np.float32), label=np.arange(8) % 3)
    result = shell("train", "net.onnx", "--data", "d.npz")
    assert result.code == 2 and result.facts[1:] == ("d.npz", "label", "8", "2") and "cross-entropy" in result.hint
    result = shell("train", "net.onnx", "--data", "d.npz", "--loss", "cross-entropy")
    assert result.code == 2 and result.facts[1:] == ("d.npz", "label", "2", "2", "0", "0", "1", "-100", "2")
    assert shell("train", "net.onnx", "--data", "d.npz", "--loss", "cross-entropy", "--classes", "3").code == 0


def test_the_same_code_whichever_way_a_path_is_cut(shell: Shell) -> None:
    text = TEXT.replace("y = Add(h, b)", "c = Add(h, b) i = Floor(c) y = Neg(i)")
    onnx.save(onnx.parser.parse_model(text), "net.onnx")
    for more in ((), ("--train", "w"), ("--freeze", "b")):
        result = shell("build", "net.onnx", *more)
        assert result.code == 3 and "'Floor_i'" in result.err, (more, result.err)
