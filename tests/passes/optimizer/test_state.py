"""What a training model says of the state that its optimizer needs, stored in it or not."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Group, LoraSpec, Options
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.proof import prove
from tests.cli_harness import Shell
from tests.facts import raises
from tests.steps import RATE, batches, exported, network, options, trained

ALL = {"accumulate": 2, "loss_scale": "dynamic", "ema": 0.9, "clip_norm": 1.0}


def built(**given: object) -> onnx.ModelProto:
    return build(
        exported(network(torch.float32)), options("adagrad", {"initial_accumulator_value": 0.25}, **given)
    ).model


def test_each_state_is_described_as_it_is_stored() -> None:
    model = built(**ALL)
    said = json.loads({p.key: p.value for p in model.metadata_props}["onnxgrad.roles"])
    types = {value.name: value.type.tensor_type for value in model.graph.input}
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    states = [name for name, role in said["inputs"].items() if role == "state"]
    assert list(said["state"]).sort() == states.sort() and len(states) == 17
    for name, slot in said["state"].items():
        assert helper.np_dtype_to_tensor_dtype(np.dtype(slot["dtype"])) == types[name].elem_type
        assert slot["shape"] == [dim.dim_value for dim in types[name].shape.dim]
        np.testing.assert_array_equal(stored[name], np.full(slot["shape"], slot["initial"], slot["dtype"]))
    assert said["state"]["first.bias_v"] == {
        "of": "first.bias", "kind": "v", "dtype": "float32", "shape": [8], "initial": 0.25
    }  # fmt: skip
    assert said["state"]["loss_scale"]["initial"] == 65536


def test_state_that_is_not_stored_is_fed() -> None:
    """The same steps, by a host that reads the description, by the trainer, and proved."""
    stored, bare = built(**ALL), built(**ALL, embed_state=False)
    slots = describe(stored).slots
    assert describe(bare).slots == slots
    assert {t.name for t in stored.graph.initializer} - {t.name for t in bare.graph.initializer} == slots.keys()
    assert len(stored.SerializeToString()) > len(bare.SerializeToString())
    data = batches("float32", 8)
    expected, ours = trained(stored, data), trained(bare, data)
    trainer = Trainer(bare)
    for x, y in data:
        trainer.step({"x": x, "y": y}, RATE)
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value)
        np.testing.assert_array_equal({**trainer.weights(), **trainer.state()}[name], value)
    onnx.checker.check_model(bare, full_check=True)
    proof = prove(bare, describe(bare))
    assert {step.status for step in proof.steps} == {"passed"}


def test_stored_state_need_not_be_fed() -> None:
    ((x, y),) = batches("float32", 1)
    feeds = {"x": x, "y": y, "learning_rate": np.array(RATE, np.float32)}
    assert ort.InferenceSession(built(**ALL).SerializeToString()).run(["loss"], feeds)[0] > 0
    with pytest.raises(Exception, match=r"[Mm]issing"):
        ort.InferenceSession(built(embed_state=False).SerializeToString()).run(["loss"], feeds)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_of_16_bits_is_float32(dtype: torch.dtype) -> None:
    net = network(torch.float32)
    model = exported(net)
    for tensor in model.graph.initializer:
        kind = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.BFLOAT16
        tensor.CopyFrom(helper.make_tensor(tensor.name, kind, tensor.dims, numpy_helper.to_array(tensor).ravel()))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = kind
    made = build(model, options("adamw", **ALL)).model
    onnx.checker.check_model(made, full_check=True)
    slots = describe(made).slots.values()
    assert {slot.dtype for slot in slots if slot.of} == {"float32"}
    types = {value.name: value.type.tensor_type.elem_type for value in made.graph.output}
    assert types["first.weight_next"] == kind
    assert types["first.weight_grad"] == types["first.weight_ema_next"] == TensorProto.FLOAT


def test_adapters_and_running_statistics_go_along() -> None:
    """Groups name the factors; a running statistic moves at each run, and is described by its stored value alone."""
    model = onnx.load(Path(__file__).parents[3] / "sample_models" / "digits_cnn.onnx")
    group = (Group("*_lora_?", {"weight_decay": 0.1}),)
    asked = options("sgd", group=group, lora=LoraSpec(2), mode="train", train=("*.bias",), accumulate=2, ema=0.5)
    made = build(model, asked).model
    roles = describe(made)
    statistics = {n for n, role in roles.inputs.items() if role == "state"} - roles.slots.keys()
    assert statistics and all("running" in name for name in statistics)
    trainer = Trainer(made)
    before = {**trainer.state(), **trainer.weights()}
    rng = np.random.default_rng(0)
    trainer.step({"x": rng.standard_normal((8, 1, 8, 8)).astype(np.float32), "y": rng.integers(0, 10, 8)}, 0.1)
    after = {**trainer.state(), **trainer.weights()}
    assert all((after[name] != before[name]).any() for name in statistics)
    assert all((after[name] == before[name]).all() for name in trainer.weights())


def test_names_that_are_identifiers_are_described() -> None:
    model = built(**ALL, identifiers=True)
    roles = describe(model)
    assert {name for name, role in roles.inputs.items() if role == "state"} == roles.slots.keys()
    assert {slot.of for slot in roles.slots.values()} == {"", "first.weight", "first.bias", "last.weight", "last.bias"}
    assert all(name.isidentifier() for name in roles.slots)


@pytest.mark.slow
def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Built with everything, checked again, and its program takes steps."""
    shell = Shell(tmp_path, capsys)
    onnx.save(exported(network(torch.float32)), tmp_path / "net.onnx")
    out = tmp_path / "train.onnx"
    wanted = (
        "--loss cross-entropy --label y --optimizer lamb --group *.bias:weight-decay=0,lr=2 --clip-norm 1 --ema 0.9 "
        "--loss-scale dynamic --no-embed-state"
    )
    assert shell("build", str(tmp_path / "net.onnx"), "-o", str(out), *wanted.split()).code == 0
    assert shell("check", str(out)).code == 0
    text = (tmp_path / "train.onnx.report.md").read_text()
    assert "*.bias:weight-decay=0,lr=2" in text
    asked = options("lamb", embed_state=False, loss_scale="dynamic")
    report = run_build(tmp_path / "net.onnx", tmp_path / "again.onnx", asked)
    (program,) = (step.text for step in report.next if step.language == "python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with raises(UsageError, "missing_value", "embed_state"):
        build(exported(network(torch.float32)), Options(embed_state=False))
    onnx.save(exported(network(torch.float32)), tmp_path / "net.onnx")
    with raises(UsageError, "conflict", "embed_state=False", "training_info"):
        run_build(tmp_path / "net.onnx", options=options("sgd", embed_state=False, training_info=True))
