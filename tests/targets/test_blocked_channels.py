"""Training models for one runtime: they compute what the standard's do, whatever the processor's blocks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.derivatives.kinds import derive
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.targets import blocked_channels
from onnxgrad_cli.targets.blocked_channels import BLOCK, DENSE, DEPTHWISE
from onnxgrad_cli.targets.standard import DOMAIN
from tests.cli_harness import Shell
from tests.facts import raises

SAMPLES = Path(__file__).parents[2] / "sample_models"
CNN = SAMPLES / "digits_cnn.onnx"

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 32, 9, 7), (48, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    "5x3": ((2, 16, 9, 7), (32, 16, 5, 3), {"pads": [2, 1, 2, 1]}),
    "uneven pads": ((2, 16, 8, 7), (16, 16, 3, 3), {"pads": [0, 1, 2, 0]}),
    "no pads": ((1, 16, 6, 6), (16, 16, 2, 2), {}),
    "strides": ((2, 32, 9, 8), (16, 32, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "dilations": ((2, 16, 9, 9), (16, 16, 3, 3), {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
    "groups": ((2, 32, 7, 7), (64, 16, 3, 3), {"pads": [1, 1, 1, 1], "group": 2}),
    "depthwise": ((2, 48, 7, 9), (48, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 48}),
    "strided depthwise": ((2, 32, 9, 9), (32, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 32, "strides": [2, 2]}),
}


def model(x: tuple[int, ...], w: tuple[int, ...], given: dict[str, Any], batch: int | str = "batch") -> ModelProto:
    """A convolution with a bias."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal(w), "b": rng.standard_normal(w[0])}
    stored = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv", kernel_shape=w[2:], **given)],
        "convolution",
        [helper.make_tensor_value_info("x", 1, [batch, *x[1:]])],
        [helper.make_tensor_value_info("y", 1, ["batch", w[0], "h", "w"])],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def made(source: ModelProto | Path, target: str = "ort-cpu", **more: Any) -> TrainingModel:
    copy = onnx.load(source) if isinstance(source, Path) else ModelProto.FromString(source.SerializeToString())
    return build(copy, Options(**{"losses": (LossSpec("mse"),), "target": target, **more}))


def session(proto: ModelProto, level: str = "ORT_ENABLE_ALL", threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def calls(proto: ModelProto) -> list[str]:
    return sorted(f"{node.domain}::{node.op_type}" for node in proto.graph.node if node.domain.startswith(DOMAIN))


def by_torch(case: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The loss and its gradients, of a convolution, by autograd in float64."""
    _, _, given = CASES[case]
    weights = {t.name: numpy_helper.to_array(t) for t in model(*CASES[case]).graph.initializer}
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in {**weights, **feeds}.items()}
    top, left, bottom, right = given.get("pads", [0] * 4)
    padded = torch.nn.functional.pad(leaves["x"], (left, right, top, bottom))
    y = torch.nn.functional.conv2d(
        padded, leaves["w"], leaves["b"], tuple(given.get("strides", (1, 1))), 0, tuple(given.get("dilations", (1, 1))),
        given.get("group", 1),
    )  # fmt: skip
    loss = torch.nn.functional.mse_loss(y, leaves["label"])
    loss.backward()
    return {"loss": loss.detach().numpy(), **{f"{n}_grad": leaves[n].grad.numpy() for n in ("w", "b", "x")}}


def feeds_of(case: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(CASES[case][0]).astype(np.float32)
    shape = session(model(*CASES[case])).run(None, {"x": x})[0].shape
    return {"x": x, "label": rng.standard_normal(shape).astype(np.float32)}


def assert_gradients_of_pytorch(built: ModelProto, case: str, level: str) -> None:
    """Loss and gradients of a training model of a case are autograd's."""
    feeds = feeds_of(case)
    got = session(built, level, threads=2)
    results = dict(zip([v.name for v in got.get_outputs()], got.run(None, feeds), strict=True))
    for name, expected in by_torch(case, feeds).items():
        np.testing.assert_allclose(results[name], expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(3)
def test_gradients_are_those_of_pytorch(case: str, level: str) -> None:
    built = made(model(*CASES[case]), grad_of_input=("x",))
    onnx.checker.check_model(built.model, full_check=True)
    assert_gradients_of_pytorch(built.model, case, level)


def test_what_is_replaced() -> None:
    dense, transposed, deep = f"{DENSE}::Conv", f"{DENSE}::ConvTranspose", f"{DEPTHWISE}::Conv"
    found = {case: calls(made(model(*CASES[case]), grad_of_input=("x",)).model) for case in CASES}
    plain = ["3x3", "5x3", "uneven pads", "no pads", "dilations"]
    assert {case: found[case] for case in plain} == {case: [dense, transposed] for case in plain}
    assert found["strides"] == [dense] and dense in found["groups"]
    assert found["depthwise"] == [deep, deep] and found["strided depthwise"] == [deep]


@pytest.mark.parametrize(
    ("x", "w", "given"),
    [
        ((1, 32, 5, 5), (32, 32, 1, 1), {}),
        ((1, 32, 5, 5), (32, 1, 1, 1), {"group": 32}),
        ((1, 3, 5, 5), (32, 3, 3, 3), {}),
        ((1, 16, 5, 5), (24, 16, 3, 3), {}),
        ((1, 24, 5, 5), (24, 1, 3, 3), {"group": 24}),
        ((1, 32, 5, 5), (32, 8, 3, 3), {"group": 4}),
    ],
    ids=["1x1", "1x1 depthwise", "few channels", "uneven channels", "uneven depthwise", "small groups"],
)
def test_what_is_not(x: tuple[int, ...], w: tuple[int, ...], given: dict[str, Any]) -> None:
    built = made(model(x, w, given), grad_of_input=("x",))
    assert not calls(built.model) and not built.model.functions
    assert built.training.targeted is not None and not built.training.targeted.operators


def test_a_constant_weight_is_left_to_the_optimizer_of_onnxruntime() -> None:
    assert not calls(made(model(*CASES["3x3"]), freeze=("w",), grad_of_input=("x",)).model)


def agree(source: ModelProto | Path, feeds: dict[str, np.ndarray], **more: Any) -> None:
    """The results of the training models for onnxruntime and for any runtime."""
    models = [made(source, target, **more).model for target in ("ort-cpu", "standard")]
    assert calls(models[0]) and not calls(models[1])
    for got, expected in zip(*(session(each).run(None, feeds) for each in models), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(initial=1e-6))


@pytest.mark.parametrize("case", ["3x3", "depthwise"])
def test_an_empty_batch(case: str) -> None:
    feeds = {name: x[:0] for name, x in feeds_of(case).items()}
    agree(model(*CASES[case]), feeds, reduction="sum", grad_of_input=("x",))


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_automatic_pads(auto_pad: str, stride: int) -> None:
    source = model((2, 16, 8, 7), (16, 16, 3, 3), {"auto_pad": auto_pad, "strides": [stride, stride]})
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 16, 8, 7)).astype(np.float32)
    label = rng.standard_normal(session(source).run(None, {"x": x})[0].shape).astype(np.float32)
    agree(source, {"x": x, "label": label}, grad_of_input=("x",))


@pytest.mark.parametrize(
    "more",
    [
        {"identifiers": True},
        {"recompute": RecomputeSpec("elementwise")},
        {"recompute": RecomputeSpec("block", "node_maxpool*")},
        {"yield_": "input"},
        {"optimizer": "sgd", "accumulate": 2},
        {"optimizer": "momentum", "clip_norm": 1.0, "ema": 0.9},
    ],
    ids=str,
)
@pytest.mark.thinned(8, 2)
def test_with_other_options(more: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((8, 1, 8, 8)).astype(np.float32), "label": rng.integers(0, 10, 8)}
    given = made(CNN, "standard", losses=(LossSpec("cross-entropy"),), **more).model
    fed = {value.name for value in given.graph.input} - {tensor.name for tensor in given.graph.initializer}
    feeds |= {name: np.full((), 0.01, np.float32) for name in fed - feeds.keys()}
    agree(CNN, feeds, losses=(LossSpec("cross-entropy"),), **more)


# -- processors with other blocks -------------------------------------------------------------------------------------


def processor(block: int) -> list[type[OpRun]]:
    """The operators of a processor whose blocks have so many channels: data lie as there, under their plain shapes."""

    class ReorderInput(OpRun):
        op_domain = "com.microsoft.nchwc"

        def _run(self, x: np.ndarray, channels_last: int = 0) -> tuple[np.ndarray]:
            return (in_blocks(np.pad(x, [(0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)]), block),)

    class ReorderOutput(OpRun):
        op_domain = "com.microsoft.nchwc"

        def _run(self, x: np.ndarray, channels: int = 0, channels_last: int = 0) -> tuple[np.ndarray]:
            return (out_of_blocks(x, block)[:, :channels],)

    class Conv(OpRun):
        op_domain = "com.microsoft.nchwc"

        def _run(
            self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, auto_pad: Any = None,
            dilations: Any = None, group: Any = None, kernel_shape: Any = None, pads: Any = None, strides: Any = None,
        ) -> tuple[np.ndarray]:  # fmt: skip
            out, each, *kernel = w.shape
            if each == 1:
                weight = np.moveaxis(w.reshape(out // block, *kernel, block), 3, 1).reshape(w.shape)
            else:
                weight = w.reshape(out // block, each // block, *kernel, block, block)
                weight = weight.transpose(0, 5, 1, 4, 2, 3).reshape(w.shape)
            top, left, bottom, right = pads or [0] * 4
            padded = np.pad(out_of_blocks(x, block), [(0, 0), (0, 0), (top, bottom), (left, right)])
            bias = None if b is None else torch.tensor(b)
            steps, spread = tuple(strides or (1, 1)), tuple(dilations or (1, 1))
            y = torch.nn.functional.conv2d(
                torch.tensor(padded), torch.tensor(weight), bias, steps, 0, spread, group or 1
            )
            return (in_blocks(y.numpy(), block),)

    return [ReorderInput, ReorderOutput, Conv]


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    parts = x.reshape(len(x), -1, block, *x.shape[2:])
    return np.ascontiguousarray(np.moveaxis(parts, 2, 4)).reshape(x.shape)


def out_of_blocks(x: np.ndarray, block: int) -> np.ndarray:
    parts = x.reshape(len(x), x.shape[1] // block, *x.shape[2:], block)
    return np.ascontiguousarray(np.moveaxis(parts, 4, 2)).reshape(x.shape)


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thinned(4)
def test_blocks_of_any_size_give_the_same(case: str, block: int) -> None:
    built = made(model(*CASES[case]), grad_of_input=("x",)).model
    feeds = feeds_of(case)
    names = [value.name for value in built.graph.output]
    weights = {t.name: numpy_helper.to_array(t) for t in built.graph.initializer if t.name in ("w", "b")}
    run = ReferenceEvaluator(onnx.inliner.inline_local_functions(built), new_ops=processor(block)).run
    results = dict(zip(names, run(None, {**weights, **feeds}), strict=True))
    for name, expected in by_torch(case, feeds).items():
        np.testing.assert_allclose(results[name], expected, atol=2e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_blocks_that_channels_do_not_fill_are_refused(case: str) -> None:
    """No processor has such blocks; a later one that did would get an error, not another result."""
    built = onnx.inliner.inline_local_functions(made(model(*CASES[case])).model)
    weights = {t.name: numpy_helper.to_array(t) for t in built.graph.initializer if t.name in ("w", "b")}
    with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)):
        ReferenceEvaluator(built, new_ops=processor(5 * BLOCK)).run(None, {**weights, **feeds_of(case)})


# -- what becomes of such a model --------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(*CASES["3x3"]), "conv.onnx")
    return Shell(tmp_path, capsys)


def test_the_report_says_what_was_used(shell: Shell) -> None:
    result = shell("build", "conv.onnx", "--target", "ort-cpu", "--grad-of-input", "x", "--json", "-o", "train.onnx")
    assert result.code == 0, result.err
    nchwc = "com.microsoft.nchwc::"
    operators = {f"{nchwc}ReorderInput": 6, f"{nchwc}Conv": 2, f"{nchwc}ReorderOutput": 2}
    assert result.json["targeted"] == {"name": "ort-cpu", "nodes": 2, "operators": operators}
    assert result.json["asked"]["options"]["--target"] == "ort-cpu"
    assert f"2 nodes by {nchwc}ReorderInput (6), {nchwc}Conv (2)" in Path("train.onnx.report.md").read_text()
    assert result.json["cost"]["flops_forward"] > 2 * 48 * 32 * 9
    conv = next(row for row in result.json["operators"] if row["op"] == "Conv")
    assert (conv["model"], conv["differentiated"], conv["derivative"]) == (1, 1, "rule")
    assert "com.microsoft.nchwc" in {entry.domain for entry in onnx.load("train.onnx").opset_import}
    step = "computes what the operators of the standard compute"
    assert {each["name"]: each["status"] for each in result.json["proof"]["steps"]}[step] == "passed"


def test_check_proves_it_in_float64(shell: Shell) -> None:
    shell("build", "conv.onnx", "--target", "ort-cpu", "--no-verify", "-o", "train.onnx")
    result = shell("check", "train.onnx", "--json")
    assert result.code == 0 and "float64" in result.out


@pytest.mark.parametrize(
    ("domain", "name", "right", "wrong"),
    [
        (DENSE, "Conv", "perm = [0, 1, 3, 2, 4]", "perm = [0, 1, 3, 4, 2]"),
        (DENSE, "ConvTranspose", "w = Reshape (flipped", "w = Reshape (turned"),
    ],
)
def test_check_finds_a_function_that_computes_something_else(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, domain: str, name: str, right: str, wrong: str
) -> None:
    body = blocked_channels.BODIES[domain, name]
    assert right in body
    monkeypatch.setitem(blocked_channels.BODIES, (domain, name), body.replace(right, wrong))
    blocked_channels.function_of.cache_clear()
    result = shell("build", "conv.onnx", "--target", "ort-cpu", "--grad-of-input", "x", "-o", "train.onnx")
    blocked_channels.function_of.cache_clear()
    assert (result.code, result.facts[0]) == (4, "check_failed") and not Path("train.onnx").exists()
    assert "standard compute:" in result.err


def test_it_can_be_differentiated_again() -> None:
    """What is built of a training model is of standard operators, and the same as what is built of a standard one."""
    feeds = feeds_of("3x3")
    results = []
    for target in ("ort-cpu", "standard"):
        again = derive(made(model(*CASES["3x3"]), target, grad_of_input=("x",)).model, wrt=("x",), of=("loss",))
        assert not calls(again) and not again.functions
        run = session(again)
        names = [value.name for value in run.get_inputs()]
        results.append(run.run(None, {name: feeds.get(name, np.ones((), np.float32)) for name in names}))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_halves_of_a_step_keep_the_functions_that_they_call() -> None:
    halves = split(made(CNN, losses=(LossSpec("cross-entropy"),), mode="train", optimizer="sgd").model)
    assert calls(halves.gradient) and not calls(halves.optimizer)
    assert not halves.optimizer.functions
    for half in (halves.gradient, halves.optimizer):
        onnx.checker.check_model(half, full_check=True)
        session(half)


def test_training_is_that_of_the_standard(shell: Shell) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    losses = []
    for target in ("standard", "ort-cpu"):
        result = shell(
            "train", CNN, "--loss", "cross-entropy", "--data", SAMPLES / "digits.npz", "--prefix", "train_",
            "--label", "y", "--threads", "1", "--mode", "train", "--epochs", "1", "--target", target,
            "-o", f"{target}.onnx", "--json",
        )  # fmt: skip
        assert result.code == 0, result.err
        losses.append(result.json["epochs"][0]["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    assert not calls(onnx.load("ort-cpu.onnx"))


def test_artifacts_run(shell: Shell) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    result = shell("build", CNN, "--loss", "cross-entropy", "--mode", "train", "--optimizer", "adamw", "--target",
                   "ort-cpu", "--artifacts", "made")  # fmt: skip
    assert result.code == 0, result.err
    found = {path.name: calls(onnx.load(path, load_external_data=False)) for path in Path("made").glob("*.onnx")}
    assert found["training_model.onnx"] and not found["optimizer_model.onnx"]
    for path in Path("made").glob("*.onnx"):
        ort.InferenceSession(path)


def test_a_target_for_cuda_asks_for_other_forms_of_standard_operators() -> None:
    built = made(model(*CASES["depthwise"]), "ort-cuda", grad_of_input=("x",))
    assert not built.model.functions and {entry.domain for entry in built.model.opset_import} == {""}
    made_of = [node.op_type for node in built.model.graph.node]
    assert made_of.count("ConvTranspose") == 1
    assert "ConvTranspose" not in [n.op_type for n in made(model(*CASES["depthwise"]), "standard").model.graph.node]


def test_an_unknown_target() -> None:
    with raises(UsageError, "wrong_value", "target='ort-cup'", "standard", "portable", "ort-cpu", "ort-cuda") as error:
        made(model(*CASES["3x3"]), "ort-cup")
    assert "'ort-cpu' or 'ort-cuda'" in str(error.value.hint)
