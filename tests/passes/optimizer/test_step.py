"""Averages of weights, bounds of gradients and the order of updates in an optimizer's step, beside PyTorch.

onnxruntime chooses the order of nodes that do not wait for each other. So the nodes that read a slot must be among the
nodes from which its next value is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from onnxgrad_cli.adapters.own_file import adapter_bytes
from onnxgrad_cli.builder import build
from onnxgrad_cli.checkpoints.tensors import save_tensors
from onnxgrad_cli.compat.artifacts import save_checkpoint
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.losses import LossSpec
from onnxgrad_cli.metadata import Roles, describe
from onnxgrad_cli.optimizers import OPTIMIZERS
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.slices import ELEMENTWISE
from onnxgrad_cli.training.run.folder import load_checkpoint
from onnxgrad_cli.training.trainer import Trainer
from tests.cli_harness import Shell
from tests.facts import raises
from tests.steps import KINDS, NAMES, RATE, assert_same, batches, clip, exported, loss, network, options, trained


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
def test_averages_beside_torch(runs: int, dtype: str, bound: float) -> None:
    net = network(getattr(torch, dtype))
    data = batches(dtype)
    ours = trained(build(exported(net), options("adam", ema=0.9, accumulate=runs)).model, data)
    theirs = torch.optim.Adam(net.parameters(), lr=RATE)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for at in range(0, len(data), runs):
        theirs.zero_grad()
        for batch in data[at : at + runs]:
            (loss(net, batch) / runs).backward()
        theirs.step()
        average.update_parameters(net)
    assert_same(ours, net, bound)
    for key, expected in average.module.state_dict().items():
        assert not np.allclose(expected, net.state_dict()[key], atol=10 * bound)
        np.testing.assert_allclose(ours[f"{NAMES[key]}_ema"], expected.numpy(), rtol=bound, atol=bound)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_what_is_no_share_is_refused(decay: float) -> None:
    with raises(UsageError, "wrong_value", f"ema={decay}", "0", "1"):
        build(exported(network(torch.float32)), options("sgd", ema=decay))


def test_a_run_writes_the_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are what is judged, too."""
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    onnx.save(exported(network(torch.float32)), "net.onnx")
    xs, ys = zip(*batches("float32", 4), strict=True)
    np.savez("data.npz", x=np.concatenate(xs), y=np.concatenate(ys))
    asked = "net.onnx --data data.npz --val data.npz --loss cross-entropy --label y --batch-size 8 --epochs 2 --ema 0.9"
    asked += " --accumulate 2 --threads 1 --json"
    result = shell("train", *asked.split(), "--use-ema", "-o", "average.onnx")
    assert result.code == 0, result.err
    assert shell("train", *asked.split(), "-o", "last.onnx").code == 0
    average, last = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(name).graph.initializer}
        for name in ("average.onnx", "last.onnx")
    )
    values, said = load_checkpoint(tmp_path / "average.onnx.run" / "checkpoint.safetensors")
    assert said["steps"] == 16 and values["step"] == 8
    for name in average:
        np.testing.assert_array_equal(average[name], values[f"{name}_ema"])
        np.testing.assert_array_equal(last[name], values[name])
        assert (average[name] != last[name]).any()
    net = network(torch.float32)
    net.load_state_dict({key: torch.tensor(average[name]) for key, name in NAMES.items()})
    exported_to = ("--model", "net.onnx", "--use-ema", "-o", "exported.onnx")
    assert shell("export", "last.onnx.run/checkpoint.safetensors", *exported_to).code == 0
    assert Path("exported.onnx").read_bytes() == Path("average.onnx").read_bytes()
    judged = result.json["epochs"][result.json["best"] - 1]["val_loss"]
    np.testing.assert_allclose(judged, loss(net, (np.concatenate(xs), np.concatenate(ys))).item(), rtol=1e-5)
    refused = shell("train", "net.onnx", "--data", "data.npz", "--loss", "cross-entropy", "--label", "y", "--use-ema")
    assert refused.code == 2 and "there are no moving averages" in refused.err
    refused = shell("train", *asked.split(), "--accumulate", "9", "-o", "none.onnx")
    assert refused.code == 2 and "no step would be taken" in refused.err


def held(folder: Path, kind: str, **others: Any) -> Path:
    """A checkpoint of a run that has taken no step."""
    model = build(exported(network(getattr(torch, kind))), options("adam", **others))
    save_checkpoint(folder / "held", Trainer(model))
    return folder / "held"


def test_the_averages_of_a_checkpoint(tmp_path: Path) -> None:
    """Of one that Python code has written, too: the export has their values, and the rest as it was."""
    onnx.save(exported(network(torch.float32)), tmp_path / "net.onnx")
    trainer = Trainer(build(exported(network(torch.float32)), options("adam", ema=0.9)))
    for x, y in batches("float32", 3):
        trainer.step({"x": x, "y": y}, RATE)
    save_checkpoint(tmp_path / "held", trainer)
    run_export(tmp_path / "held", tmp_path / "net.onnx", tmp_path / "out.onnx", use_ema=True)
    out = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    state, weights = trainer.state(), trainer.weights()
    assert out.keys() == weights.keys()
    for name, array in out.items():
        np.testing.assert_array_equal(array, state[f"{name}_ema"])
        assert (array != weights[name]).any()


def test_what_has_no_averages_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    onnx.save(exported(network(torch.float32)), model)

    def refused(words: str, source: Path) -> None:
        with pytest.raises(UsageError, match=words):
            run_export(source, model, tmp_path / "out.onnx", use_ema=True)
        assert not (tmp_path / "out.onnx").exists()

    refused("`use_ema`: there are no moving averages", held(tmp_path, "float32"))
    refused("'first.weight' is float16, but its average float32", held(tmp_path, "float16", ema=0.9))
    refused("no step was taken", held(tmp_path, "float32", ema=0.9))
    values, said = load_checkpoint(held(tmp_path, "float32", ema=0.9))
    said.pop("averages")
    save_tensors(tmp_path / "held", values, {"progress": said})
    refused("`use_ema`: there are no moving averages", tmp_path / "held")
    (tmp_path / "held").write_bytes(adapter_bytes([], values))
    refused("an adapter file stores no moving averages", tmp_path / "held")


Wanted = Callable[[Roles, str], bool]


VARIANTS = {"adam": {"amsgrad": True}, "adamw": {"amsgrad": True}, "rmsprop": {"momentum": 0.9, "centered": True}}
"""Options with which an optimizer keeps all its slots."""


COUNT_NO_STEPS = {"sgd", "momentum", "nesterov", "rmsprop", "adagrad", "adadelta", "lion"}


@cache
def layers(size: int) -> onnx.ModelProto:
    rng, nodes = np.random.default_rng(0), []
    weights = [numpy_helper.from_array(rng.normal(0, 0.05, (size, size)).astype("f"), f"w{i}") for i in range(3)]
    for i in range(3):
        nodes.append(helper.make_node("MatMul", [f"a{i}", f"w{i}"], [f"h{i}"]))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"a{i + 1}"]))
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size]) for name in ("a0", "a3")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def step(size: int, optimizer: str, **more: Any) -> onnx.ModelProto:
    options = Options(losses=(LossSpec("mse"),), label="t", optimizer=optimizer, **more)
    return build(layers(size), options).model


def is_slot(roles: Roles, name: str) -> bool:
    return name in roles.slots and bool(roles.slots[name].of)


def waits_for_all_readers(model: onnx.ModelProto, name: str, successor: str) -> bool:
    """Whether the successor of a state is computed from all that read the state; by one of these itself only where that
    takes an element for each element, as runtimes do in place on their own."""
    graph = Graph(model)
    makers, reached, names = graph.producers(), [], [successor]
    while names:
        maker = makers.get(names.pop())
        if maker is not None and maker not in reached:
            reached.append(maker)
            names += maker.input
    readers = [node for node in graph.nodes if name in node.input]
    last = makers[successor]
    return all(node in reached for node in readers) and (last not in readers or last.op_type in ELEMENTWISE)


@pytest.mark.parametrize("optimizer", [optimizer.name for optimizer in OPTIMIZERS])
def test_slots_wait_for_all_their_readers_and_weights_do_not(optimizer: str) -> None:
    for clip_norm in (None, 1.0):
        model = step(8, optimizer, clip_norm=clip_norm, optimizer_options=VARIANTS.get(optimizer, {}))
        roles = describe(model)
        waits = {name: waits_for_all_readers(model, name, after) for name, after in roles.successors.items()}
        slots = [name for name in waits if is_slot(roles, name)]
        assert len(slots) == 3 * len(OPTIMIZERS.lookup(optimizer).slots)
        assert all(waits[name] == (optimizer != "lion") for name in slots)  # its step and its next mean read the last
        assert not waits["step"] or optimizer in COUNT_NO_STEPS
        assert waits["w0"]  # no gradient goes through the first layer's weight
        assert waits["w1"] == waits["w2"] == (clip_norm is not None)  # then every update waits for all gradients


def after_steps(model: onnx.ModelProto, in_place: Wanted) -> dict[str, np.ndarray]:
    """Weights and state after four steps on two threads, some of them in one buffer, the others alternating."""
    roles, rng = describe(model), np.random.default_rng(1)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    here, there = ({n: ort.OrtValue.ortvalue_from_numpy(np.array(stored[n])) for n in roles.successors} for _ in "ab")
    there |= {name: value for name, value in here.items() if in_place(roles, name)}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    batch = {name: rng.standard_normal((64, 300)).astype("f") for name in ("a0", "t")}
    for _ in range(4):
        binding = session.io_binding()
        for name, array in {**batch, "learning_rate": np.array(0.01, "f")}.items():
            binding.bind_cpu_input(name, array)
        for name, successor in roles.successors.items():
            binding.bind_ortvalue_input(name, here[name])
            binding.bind_ortvalue_output(successor, there[name])
        session.run_with_iobinding(binding)
        here, there = there, here
    return {name: value.numpy().copy() for name, value in here.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adadelta", "nesterov"])
@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "ema": 0.9}], ids=["plain", "accumulated"])
@pytest.mark.thinned(4)
def test_slots_in_one_buffer_give_the_same_numbers(optimizer: str, more: dict[str, Any]) -> None:
    model = step(300, optimizer, **more)
    apart, together = after_steps(model, lambda roles, name: False), after_steps(model, is_slot)
    assert together.keys() == apart.keys() and describe(model).slots
    for name, value in apart.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)


def test_weights_in_one_buffer_give_the_same_numbers_where_updates_wait_for_all_gradients() -> None:
    model = step(300, "adamw", clip_norm=1.0)
    apart = after_steps(model, lambda roles, name: False)
    together = after_steps(model, lambda roles, name: name != "step")
    for name, value in apart.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)


@pytest.mark.parametrize("given", [("clip_norm", 0.02), ("clip_norm", 0.3), ("clip_norm", 1e6), ("clip_value", 0.01)])
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
@pytest.mark.thinned(2)
def test_clipping_beside_torch(given: tuple[str, float], dtype: str, bound: float) -> None:
    how, limit = given
    net = network(getattr(torch, dtype))
    data = batches(dtype)
    asked = options("momentum", {"weight_decay": 0.1}, **{how: limit})
    ours = trained(build(exported(net), asked).model, data)
    theirs = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)
    for batch in data:
        theirs.zero_grad()
        loss(net, batch).backward()
        clip(net, **{how: limit})
        theirs.step()
    assert_same(ours, net, bound)


def test_the_norm_of_large_weights_loses_no_digits() -> None:
    """A step of length MAX, from gradients of a million elements."""
    weight = np.zeros((1000, 1000), np.float32)
    x, z = (helper.make_tensor_value_info(name, 1, ["n", 1000]) for name in "xz")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"])]
    graph = helper.make_graph(nodes, "large", [x], [z], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    rng = np.random.default_rng(0)
    batch = (rng.standard_normal((4, 1000)).astype(np.float32) * 1000, np.ones((4, 1000), np.float32))
    after = trained(build(model, Options(label="y", optimizer="sgd", clip_norm=1.0)).model, [batch], 1.0)
    np.testing.assert_allclose(np.linalg.norm(after["w"].astype(np.float64)), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip_norm": 0.0}, "`clip_norm=0.0`: expected a finite number above 0"),
        ({"clip_value": float("nan")}, "`clip_value=nan`: expected a finite number above 0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "can't be combined"),
        ({"clip_norm": 1.0, "optimizer": ""}, "`clip_norm` requires an optimizer"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(exported(network(torch.float32)), Options(**{"optimizer": "sgd", **given}))
