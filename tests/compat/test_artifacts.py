"""The quartet known from onnxruntime.training.artifacts: what is in it, how it trains, and its page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onnxgrad_cli import LossSpec, Options, Trainer, build
from onnxgrad_cli.checkpoints.tensors import load_words
from onnxgrad_cli.compat import LossType, OptimType, generate_artifacts
from onnxgrad_cli.compat.artifacts import Artifacts, make_artifacts, open_artifacts, save_checkpoint
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.metadata import describe, read
from onnxgrad_cli.training.run.folder import load_checkpoint
from tests.cli_harness import Shell
from tests.facts import facts, raises

pytest.importorskip("safetensors", reason="checkpoints are safetensors files")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "sample_models" / "digits_cnn.onnx"
PAGE = (ROOT / "docs" / "from-onnxruntime-training.md").read_text()
QUARTET = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def batch(size: int = 16, labels: str = "labels") -> dict[str, np.ndarray]:
    data = np.load(ROOT / "sample_models" / "digits.npz")
    return {"x": data["train_x"][:size], labels: data["train_y"][:size]}


def ports(path: str | Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def generate(**more: Any) -> list[Path]:
    given = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW, "artifact_directory": "art", **more}
    return generate_artifacts(MODEL, **given)


def test_what_is_in_it(shell: Shell) -> None:
    files = generate(frozen_params=["conv1.weight"])
    assert sorted(file.name for file in files) == QUARTET == sorted(Path(name).name for name in shell.files())
    weights = [n for n in load_checkpoint(Path("art/checkpoint"))[0] if not n.endswith(("_m", "_v", "step"))]
    inputs, outputs = ports("art/training_model.onnx")
    assert inputs[:2] == ["x", "labels"] and set(inputs[2:]) == set(weights)
    trained = [n for n in weights if n != "conv1.weight" and "running" not in n]
    statistics = [f"{n}_next" for n in weights if "running" in n]
    assert outputs[0] == "loss" and set(outputs[1:]) == {*(f"{n}_grad" for n in trained), *statistics}
    inputs, outputs = ports("art/eval_model.onnx")
    assert inputs[:2] == ["x", "labels"] and set(inputs[2:]) == set(weights) and outputs == ["loss", "logits"]
    inputs, outputs = ports("art/optimizer_model.onnx")
    slots = ["step", *(f"{n}_{slot}" for n in trained for slot in "mv")]
    assert set(inputs) == {"learning_rate", *trained, *slots, *(f"{n}_grad" for n in trained)}
    assert set(outputs) == {f"{n}_next" for n in (*trained, *slots)}
    values, said = load_checkpoint(Path("art/checkpoint"))
    assert set(values) == {*weights, *slots}
    assert set(said["weights"]) == set(trained) and said["frozen"] == ["conv1.weight"] and said["steps"] == 0
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(MODEL).graph.initializer}
    for name in weights:
        np.testing.assert_array_equal(values[name], stored[name])
    assert not any(values[name].any() for name in slots)
    kinds = describe(onnx.load("art/training_model.onnx")).inputs
    assert kinds["conv1.weight"] == "constant" and kinds["fc1.bias"] == "weight" and kinds["labels"] == "label"
    for name in ("training", "eval", "optimizer"):
        model = onnx.load(f"art/{name}_model.onnx")
        onnx.checker.check_model(model, full_check=True)
        assert not {t.name for t in model.graph.initializer} & set(values)
        assert {n.domain for n in model.graph.node} == {""}


def test_plain_sessions_take_the_steps_of_the_trainer(shell: Shell) -> None:
    generate(requires_grad=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"], optimizer="adamw")
    options = Options(losses=(LossSpec("cross-entropy"),), label="labels", optimizer="adamw", mode="train",
                      train=("fc*",))  # fmt: skip
    trainer = Trainer(build(onnx.load(MODEL), options), threads=1)
    values, _ = load_checkpoint(Path("art/checkpoint"))
    training, optimizer = (onnxruntime.InferenceSession(f"art/{n}_model.onnx") for n in ("training", "optimizer"))
    rate = {"learning_rate": np.array(0.01, np.float32)}

    def call(session: onnxruntime.InferenceSession, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [value.name for value in session.get_outputs()]
        found = session.run(names, {v.name: given[v.name] for v in session.get_inputs()})
        return dict(zip(names, found, strict=True))

    for _ in range(4):
        first = call(training, {**values, **batch()})
        second = call(optimizer, {**values, **first, **rate})
        assert abs(first["loss"] - trainer.step(batch(), 0.01)) < 1e-6
        values |= {name.removesuffix("_next"): x for name, x in {**first, **second}.items() if name.endswith("_next")}
    for name, array in {**trainer.weights(), **trainer.state()}.items():
        np.testing.assert_allclose(values[name], array, atol=1e-6)
    session = onnxruntime.InferenceSession("art/eval_model.onnx")
    loss, logits = session.run(None, {v.name: {**values, **batch()}[v.name] for v in session.get_inputs()})
    wanted = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(batch()["labels"]))
    assert abs(loss - wanted.item()) < 1e-5


def test_there_and_back(shell: Shell) -> None:
    generate(prefix="my_", optimizer=OptimType.SGD, frozen_params=["bn1.weight"])
    trainer = open_artifacts("art", "my_", threads=1)
    losses = [trainer.step(batch(64), 0.1) for _ in range(20)]
    assert losses[-1] < losses[0] / 2
    for _ in range(2):
        save_checkpoint("art/my_checkpoint", trainer)  # in the place of the one before
    Path("notes.txt").write_text("mine")
    for other in ("notes.txt", "art/my_training_model.onnx"):
        kept = Path(other).read_bytes()
        with raises(UsageError, "file_exists", Path(other).name):
            save_checkpoint(other, trainer)
        assert Path(other).read_bytes() == kept
    again = open_artifacts("art", "my_", threads=1)
    assert again.steps == 20 and again.step(batch(), 0.1) == trainer.step(batch(), 0.1)
    result = shell("export", "art/my_checkpoint", "--model", MODEL, "-o", "trained.onnx")
    assert result.code == 0, result.err
    (logits,) = onnxruntime.InferenceSession("trained.onnx").run(None, {"x": batch()["x"]})
    session = onnxruntime.InferenceSession("art/my_eval_model.onnx")
    values = {**load_checkpoint(Path("art/my_checkpoint"))[0], **batch()}
    judged = session.run(["logits"], {v.name: values[v.name] for v in session.get_inputs()})[0]
    np.testing.assert_allclose(logits, judged, atol=1e-5)


def test_the_command_makes_the_same(shell: Shell) -> None:
    generate(artifact_directory="python")
    result = shell("build", MODEL, "--loss", "cross-entropy", "--label", "labels", "--mode", "train", "--optimizer",
                   "adamw", "--optimizer-option", "eps=1e-6", "--optimizer-option", "weight-decay=0",
                   "--artifacts", "command", "--json")  # fmt: skip
    assert result.code == 0, result.err
    files = shell.files()
    for name in QUARTET[1:]:
        one, other = (onnx.load_from_string(files[f"{folder}/{name}"]) for folder in ("python", "command"))
        assert one.graph == other.graph
    report = files["command/training_model.onnx.report.md"].decode()
    assert "evaluation model" in report
    assert "open_artifacts('command')" in result.json["next"][-1]["text"]
    assert shell("check", "command/training_model.onnx").code == 0
    assert shell("build", MODEL, "--artifacts", "command", "--label", "labels").code == 0  # they are ours


def test_the_nominal_checkpoint(shell: Shell) -> None:
    generate(nominal_checkpoint=True)
    found = load_words(Path("art/checkpoint"))["progress"]["nominal"]
    stored = {t.name: [str(numpy_helper.to_array(t).dtype), list(t.dims)] for t in onnx.load(MODEL).graph.initializer}
    assert found["fc1.weight"] == stored["fc1.weight"] and found["step"] == ["int64", []]
    assert Path("art/checkpoint").stat().st_size < 10_000
    with raises(OnnxgradError, "no_data", "checkpoint"):
        open_artifacts("art")
    assert "nominal" in shell("export", "art/checkpoint", "--model", MODEL).err


def test_outputs_besides(shell: Shell) -> None:
    generate(additional_output_names=["logits"], optimizer=None)
    assert not Path("art/optimizer_model.onnx").exists()
    assert "logits" in ports("art/training_model.onnx")[1] and ports("art/eval_model.onnx")[1] == ["loss", "logits"]
    with raises(OnnxgradError, "missing_file", "optimizer_model.onnx"):
        open_artifacts("art")
    with raises(UsageError, "unknown_name", "logit"):
        generate(additional_output_names=["logit"])


@pytest.mark.parametrize(
    ("loss", "ours"),
    [
        (LossType.MSELoss, torch.nn.MSELoss()),
        (LossType.L1Loss, torch.nn.L1Loss()),
        (LossType.BCEWithLogitsLoss, torch.nn.BCEWithLogitsLoss()),
    ],
)
def test_the_losses_are_those_of_pytorch(shell: Shell, loss: LossType, ours: torch.nn.Module) -> None:
    generate(loss=loss)
    values = {**load_checkpoint(Path("art/checkpoint"))[0], "x": batch()["x"], "target": np.eye(16, 10, dtype="f")}
    session = onnxruntime.InferenceSession("art/eval_model.onnx")
    found, logits = session.run(None, {v.name: values[v.name] for v in session.get_inputs()})
    assert abs(found - ours(torch.tensor(logits), torch.tensor(values["target"])).item()) < 1e-5


SMALL_FROZEN = """
<ir_version: 8, opset_import: ["": 17]>
power (float[batch, 2] x) => (float[batch, 2] y)
<float[2, 2] w = {1, 2, 3, 4}, float[2] e = {2, 2}>
{ h = MatMul(x, w)  y = Pow(h, e) }
"""


def test_nothing_is_made_of_the_value_of_a_frozen_parameter(shell: Shell) -> None:
    model = onnx.parser.parse_model(SMALL_FROZEN)
    generate_artifacts(model, ["w"], ["e"], LossType.MSELoss, OptimType.SGD, "art")
    x, target = np.full((1, 2), 0.5, np.float32), np.zeros((1, 2), np.float32)
    weight, power = np.ones((2, 2), np.float32), np.array([3, 4], np.float32)
    session = onnxruntime.InferenceSession("art/training_model.onnx")
    loss, gradient = session.run(None, {"x": x, "target": target, "w": weight, "e": power})
    ours = torch.tensor(weight, requires_grad=True)
    wanted = torch.nn.functional.mse_loss((torch.tensor(x) @ ours) ** torch.tensor(power), torch.tensor(target))
    wanted.backward()
    assert abs(loss - wanted.item()) < 1e-6
    np.testing.assert_allclose(gradient, ours.grad, rtol=1e-5)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"ort_format": True}, ("wrong_value", "ort_format=True")),
        ({"custom_op_library": "x.so"}, ("wrong_value", "custom_op_library")),
        ({"loss_input_names": ["a", "b"]}, ("wrong_value", "loss_input_names")),
        ({"loss": 3}, ("wrong_value", "losses=3")),
        ({"loss": ""}, ("unknown_name", "")),
        ({"loss": []}, ("no_data", "losses")),
        ({"requires_grad": ["fc9.weight"]}, ("unknown_name", "train", "fc9.weight")),
        ({"frozen_params": ["fc9.weight"]}, ("unknown_name", "freeze", "fc9.weight")),
        ({"optimizer": "adamm"}, ("unknown_name", "adamm")),
    ],
)
def test_what_is_not_to_be_had_is_refused(shell: Shell, more: dict[str, Any], expected: tuple[str, ...]) -> None:
    with raises(UsageError, *expected):
        generate(**more)
    assert not shell.files()


@pytest.mark.parametrize(
    "arguments",
    [
        ("-o", "x.onnx"),
        ("--stop-after", "loss"),
        ("--yield", "keep"),
        ("--training-info",),
        ("--as-gradient-op",),
    ],
)
def test_artifacts_do_not_go_with(shell: Shell, arguments: tuple[str, ...]) -> None:
    result = shell("build", MODEL, "--artifacts", "art", *arguments)
    assert result.code == 2 and not shell.files()
    assert "--artifacts" in shell("build", MODEL, "--prefix", "a").err


def test_files_of_others_stay(shell: Shell) -> None:
    Path("art").mkdir()
    Path("art/checkpoint").write_text("mine")
    with raises(UsageError, "file_exists", "checkpoint"):
        generate()
    assert shell.files() == {"art/checkpoint": b"mine"}
    result = shell("build", MODEL, "--artifacts", "art", "--label", "labels", "-v")
    assert result.code == 2 and result.facts == ("file_exists", "checkpoint")
    assert "backward" not in result.err, "nothing is built for a place that is taken"
    assert shell.files() == {"art/checkpoint": b"mine"}
    generate(force=True)


def test_the_optimizer_describes_itself(shell: Shell) -> None:
    generate()
    roles = read(onnx.load("art/optimizer_model.onnx"))
    assert roles.optimizer == "adamw" and roles.inputs["fc1.bias_grad"] == "gradient"
    assert shell("export", "art/checkpoint", "--model", MODEL, "-o", "e.onnx", "--json").json["files"]


def test_every_block_of_the_page_runs(shell: Shell) -> None:
    scope: dict[str, Any] = {"__name__": "page"}
    Path("digits_cnn.onnx").write_bytes(MODEL.read_bytes())
    Path("digits.npz").write_bytes((ROOT / "sample_models" / "digits.npz").read_bytes())
    found = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    for block in found:
        exec(compile(block, "docs/from-onnxruntime-training.md", "exec"), scope)


LINE = """<ir_version: 8, opset_import: ["": 17]>
line (float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"""
NEWER = """<ir_version: 9, opset_import: ["": 20]>
loss (float[n, 2] prediction, float[n, 2] label) => (float l)
{ d = Sub(prediction, label) g = Gelu(d) l = ReduceMean<keepdims = 0>(g) }"""
OLDER = """<ir_version: 6, opset_import: ["": 11]>
loss (float[n, 2] prediction, float[n, 2] label) => (float l)
{ d = Sub(prediction, label) e = Erf(d) s = ReduceSum<axes = [0, 1]>(e) l = Squeeze<axes = [0, 1]>(s) }"""


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        (NEWER, lambda y, t: torch.nn.functional.gelu(y - t).mean()),
        (OLDER, lambda y, t: torch.erf(y - t).sum()),
    ],
    ids=["newer", "older"],
)
def test_a_loss_in_a_file_of_another_opset(shell: Shell, text: str, formula: Any) -> None:
    onnx.save(onnx.parser.parse_model(LINE), "line.onnx")
    onnx.save(onnx.parser.parse_model(text), "loss.onnx")
    generate_artifacts("line.onnx", loss="loss.onnx", optimizer="sgd", artifact_directory="art")
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 3)).astype(np.float32) * 0.1, "label": np.ones((4, 2), np.float32)}
    feeds["w"] = load_checkpoint(Path("art/checkpoint"))[0]["w"]
    w = torch.tensor(feeds["w"], requires_grad=True)
    wanted = formula(torch.tensor(feeds["x"]) @ w, torch.tensor(feeds["label"]))
    wanted.backward()
    for name in ("training", "eval"):
        onnx.checker.check_model(f"art/{name}_model.onnx", full_check=True)
        session = onnxruntime.InferenceSession(f"art/{name}_model.onnx")
        found = dict(zip([v.name for v in session.get_outputs()], session.run(None, feeds), strict=True))
        np.testing.assert_allclose(found["loss"], wanted.item(), rtol=1e-5)
        if name == "training":
            np.testing.assert_allclose(found["w_grad"], w.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "code"), [({"op_type": "Gelu"}, "unreadable_file"), ({"op_type": "Conv"}, "check_failed")]
)
def test_what_onnxruntime_would_refuse_is_not_written(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, fault: dict[str, str], code: str
) -> None:
    """What is wrong with a model that no proof has seen, the optimizer's, is noticed before a file is there."""
    onnx.save(onnx.parser.parse_model(LINE), "line.onnx")

    def broken(*given: Any) -> Artifacts:
        made = make_artifacts(*given)
        assert made.optimizer is not None
        made.optimizer.graph.node[-1].op_type = fault["op_type"]
        if fault["op_type"] == "Gelu":
            del made.optimizer.graph.node[-1].input[1:]
        return made

    monkeypatch.setattr("onnxgrad_cli.compat.artifacts.make_artifacts", broken)
    with pytest.raises(OnnxgradError) as caught:
        generate_artifacts("line.onnx", loss=LossType.MSELoss, optimizer="sgd", artifact_directory="art")
    assert facts(caught.value)[:2] == (code, "optimizer_model.onnx")
    assert not list(Path("art").iterdir())
