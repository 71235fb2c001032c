"""The proof compares the optimizer's step of a build with a reference, and finds faults that are planted in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from onnxgrad_cli import metadata
from onnxgrad_cli.builder import build
from onnxgrad_cli.ir.node import ROLE, metadata_of
from onnxgrad_cli.metadata import StepGroup, StepSettings, describe
from onnxgrad_cli.optimizers import OPTIMIZERS, adaptive, optimizer
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer import groups, step
from onnxgrad_cli.verification.checks.optimizer_step import CUT
from onnxgrad_cli.verification.checks.reference_optimizers import REFERENCES
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import NOT_PROVED, PROVED, Proof
from tests.cli_harness import Shell
from tests.steps import exported, network, options

CHECK = "the optimizer's step against a reference"
EVERY = [(name, ()) for name in REFERENCES]
MORE = [
    ("adamw", ("--clip-norm", "1")),
    ("adamw", ("--clip-norm", "1e-4")),
    ("sgd", ("--clip-value", "0.1")),
    ("lamb", ("--clip-norm", "2", "--accumulate", "3")),
    ("momentum", ("--accumulate", "2", "--reduction", "sum", "--clip-value", "0.5")),
    ("momentum", ("--optimizer-option", "dampening=0.3", "--optimizer-option", "weight-decay=0.1")),
    ("nesterov", ("--optimizer-option", "momentum=0.5", "--ema", "0.9")),
    ("adam", ("--optimizer-option", "amsgrad=true", "--optimizer-option", "eps=0.1")),
    ("rmsprop", ("--optimizer-option", "centered=true", "--optimizer-option", "momentum=0.9")),
    ("adagrad", ("--optimizer-option", "lr-decay=0.1", "--optimizer-option", "initial-accumulator-value=0.1")),
    ("adamw", ("--group", "*.bias:weight-decay=0", "--group", "last.*:lr=0.3,beta1=0.8", "--freeze", "first.weight")),
    ("adam", ("--loss-scale", "1024")),
    *((each.name, ("--cycle-momentum",)) for each in OPTIMIZERS if each.cycled),
    ("adamw", ("--cycle-momentum", "--accumulate", "2", "--loss-scale", "dynamic", "--ema", "0.9")),
    ("lion", ("--loss-scale", "dynamic", "--accumulate", "2")),
    ("adamw", ("--ema", "0.99", "--accumulate", "4", "--no-embed-state")),
    ("adamw", ("--weights", "inputs", "--identifiers", "--lora", "2", "--group", "*lora*:lr=2")),
    ("adamw", ("--target", "portable", "--accumulate", "2", "--loss-scale", "dynamic")),
    ("adamw", ("--target", "ort-cpu", "--l2", "0.1", "--accumulate", "2")),
    ("adamw", ("--sample-weight", "weights", "--accumulate", "2")),
]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


@pytest.fixture
def net(shell: Shell) -> Path:
    path = shell.folder / "net.onnx"
    onnx.save(exported(network(torch.float32)), path)
    return path


def built(shell: Shell, net: Path, name: str, *more: object) -> Any:
    """Build a training model by the command; returns its outcome."""
    loss = ("--loss", "cross-entropy", "--label", "y", "--optimizer", name)
    return shell("build", net, *loss, "-o", shell.folder / "train.onnx", "--json", *more)


def step_of(proof: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = next(each for each in proof["steps"] if each["name"] == CHECK)
    return found


@pytest.mark.parametrize(("name", "more"), EVERY + MORE, ids=lambda value: value if isinstance(value, str) else None)
@pytest.mark.thinned(10, 3)
def test_a_build_compares_its_step(shell: Shell, net: Path, name: str, more: tuple[str, ...]) -> None:
    outcome = built(shell, net, name, *more)
    assert outcome.code == 0, outcome.out
    proof = outcome.json["proof"]
    assert proof["verdict"] == PROVED, proof["why"]
    detail = step_of(proof)["detail"]
    assert detail.startswith(name) and "relative difference" in detail
    assert ("clipped" in detail) == ("--clip-norm" in more or "--clip-value" in more)
    assert ("groups" in detail) == ("--group" in more)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
@pytest.mark.thinned(6, 2)
def test_other_element_types(name: str, dtype: str) -> None:
    """Weights of 16 bits are compared to their last digit, and float64 far beyond float32."""
    proof = proof_of(exported(network(getattr(torch, dtype))), options(name, clip_norm=1.0, accumulate=2))
    assert proof.verdict == PROVED
    difference = float(proof.steps[-1].detail.rsplit(" ", 1)[1])
    assert difference < {"float64": 1e-14, "float16": 5e-4}[dtype]


def proof_of(model: onnx.ModelProto, asked: Options) -> Proof:
    trained = build(model, asked).model
    return prove(trained, describe(trained), original=model)


# -- faults -----------------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def late_bias_correction(patch: pytest.MonkeyPatch) -> None:
    right = adaptive.mean_weight
    patch.setattr(adaptive, "mean_weight", lambda op, share, steps: right(op, share, steps + 1))


def no_bias_correction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adaptive, "mean_weight", lambda op, share, steps: op.const(1.0, steps))


def eps_in_the_root(patch: pytest.MonkeyPatch) -> None:
    def adam_step(op, g, state, rate, beta1, beta2, eps, amsgrad=False):  # type: ignore[no-untyped-def]
        m, v = (adaptive.decaying_mean(state, slot, b, x) for slot, b, x in (("m", beta1, g), ("v", beta2, g * g)))
        unbiased = v / adaptive.mean_weight(op, beta2, state.count + 1)
        return rate / adaptive.mean_weight(op, beta1, state.count + 1) * m / op.Sqrt(unbiased + eps)

    patch.setattr(adaptive, "adam_step", adam_step)


def eps_before_the_correction(patch: pytest.MonkeyPatch) -> None:
    def adam_step(op, g, state, rate, beta1, beta2, eps, amsgrad=False):  # type: ignore[no-untyped-def]
        m, v = (adaptive.decaying_mean(state, slot, b, x) for slot, b, x in (("m", beta1, g), ("v", beta2, g * g)))
        roots = op.Sqrt(adaptive.mean_weight(op, beta2, state.count + 1))
        return rate * roots / adaptive.mean_weight(op, beta1, state.count + 1) * m / (op.Sqrt(v) + eps)

    patch.setattr(adaptive, "adam_step", adam_step)


def swapped_settings(patch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        right = groups.settings(*arguments)
        return dict(zip(right, reversed(right.values()), strict=True))

    patch.setattr(step, "settings", wrong)


def unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "clipped", lambda op, gradients, options: gradients)


def clipped_before_the_mean(patch: pytest.MonkeyPatch) -> None:
    clips, right = step.clipped, step.accumulate

    def wrong(op: Any, state: Any, gradients: Any, *more: Any) -> Any:
        return right(op, state, clips(op, gradients, Options(clip_norm=1.0)), *more)

    patch.setattr(step, "accumulate", wrong)
    patch.setattr(step, "clipped", lambda op, gradients, options: gradients)


def clipped_one_by_one(patch: pytest.MonkeyPatch) -> None:
    right = step.clipped
    each = lambda op, gradients, options: {n: right(op, {n: g}, options)[n] for n, g in gradients.items()}  # noqa: E731
    patch.setattr(step, "clipped", each)


def one_run_more(patch: pytest.MonkeyPatch) -> None:
    right = step.accumulate
    late = lambda op, state, gradients, runs, weight: right(op, state, gradients, runs + 1, weight)  # noqa: E731
    patch.setattr(step, "accumulate", late)


def sum_of_the_runs(patch: pytest.MonkeyPatch) -> None:
    right = step.accumulate
    alone = lambda op, *more: replace(right(op, *more), count=op.const(1.0))  # noqa: E731
    patch.setattr(step, "accumulate", alone)


def mean_of_the_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "counted_by", lambda options, training: None)


def average_of_old_weights(patch: pytest.MonkeyPatch) -> None:
    right = step.ema_after
    old = lambda op, state, name, weight, *more: right(op, state, name, op.val(name), *more)  # noqa: E731
    patch.setattr(step, "ema_after", old)


def average_begins_at_zero(patch: pytest.MonkeyPatch) -> None:
    right = step.ema_after
    late = lambda op, state, name, weight, count, decay: right(op, state, name, weight, count + 1, decay)  # noqa: E731
    patch.setattr(step, "ema_after", late)


def scale_grows_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "INTERVAL", 2001)


def scale_shrinks_too_far(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "BACKOFF", 0.25)


def bad_steps_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "are_finite", lambda op, gradients: op.const(True))


def norm_of_the_step_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adaptive, "norm", lambda op, x: op.const(1.0, x))


FAULTS: list[tuple[Plant, str, dict[str, Any]]] = [
    (late_bias_correction, "adamw", {}),
    (late_bias_correction, "adamax", {}),
    (no_bias_correction, "adam", {}),
    (eps_in_the_root, "adamw", {}),
    (eps_before_the_correction, "adamw", {}),
    (swapped_settings, "adamw", {"--group": "*.bias:weight-decay=0"}),
    (swapped_settings, "sgd", {"--group": "last.weight:lr=0.5"}),
    (unclipped, "adamw", {"--clip-norm": "1"}),
    (unclipped, "sgd", {"--clip-value": "0.1"}),
    (clipped_before_the_mean, "adamw", {"--clip-norm": "1", "--accumulate": "2"}),
    (clipped_one_by_one, "adamw", {"--clip-norm": "1"}),
    (one_run_more, "adamw", {"--accumulate": "2"}),
    (one_run_more, "sgd", {"--accumulate": "4"}),
    (sum_of_the_runs, "sgd", {"--accumulate": "3"}),
    (average_of_old_weights, "sgd", {"--ema": "0.9"}),
    (average_begins_at_zero, "sgd", {"--ema": "0.9"}),
    (scale_grows_late, "adamw", {"--loss-scale": "dynamic"}),
    (scale_shrinks_too_far, "adamw", {"--loss-scale": "dynamic"}),
    (bad_steps_are_taken, "adamw", {"--loss-scale": "dynamic"}),
    (norm_of_the_step_alone, "lamb", {}),
]


@pytest.mark.parametrize(("plant", "name", "more"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.thinned(10, 2)
def test_faults_in_the_step_are_found(
    shell: Shell, net: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, name: str, more: dict[str, str]
) -> None:
    plant(monkeypatch)
    outcome = built(shell, net, name, *(word for pair in more.items() for word in pair))
    assert outcome.code == 4, outcome.out
    assert CHECK in outcome.document["error"]["details"][0]
    assert not (shell.folder / "train.onnx").exists()
    monkeypatch.undo()
    assert built(shell, net, name, *(word for pair in more.items() for word in pair)).code == 0


# -- the model changed after it was built -----------------------------------------------------------------------------


def after_a_change(model: onnx.ModelProto) -> Proof:
    return prove(model, describe(model))


def training_model(name: str, **more: Any) -> onnx.ModelProto:
    return build(exported(network(torch.float32)), options(name, **more)).model


def test_a_step_by_the_gradient_of_another_weight_is_found() -> None:
    net = network(torch.float32)
    net[2] = torch.nn.Linear(8, 8)  # two biases of one length
    model = exported(net)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 8
    model = build(model, options("sgd")).model
    for node in model.graph.node:
        if metadata_of(node, ROLE) == "optimizer":
            node.input[:] = ["last.bias_grad" if name == "first.bias_grad" else name for name in node.input]
    proof = after_a_change(model)
    assert proof.failed and "wrong: 'first.bias'" in proof.why


def onnx_sorted(model: onnx.ModelProto, node: onnx.NodeProto) -> onnx.ModelProto:
    """The model with a node after the ones that make its operands."""
    nodes = list(model.graph.node)
    at = 1 + max(i for i, each in enumerate(nodes) if set(each.output) & set(node.input))
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], node, *nodes[at:]])
    return model


def test_a_step_that_reads_something_else_is_not_proved() -> None:
    """A value of the model in the place of a gradient, of which no check speaks."""
    model = training_model("sgd")
    for node in model.graph.node:
        node.input[:] = ["h_mean" if name == "last.bias_grad" else name for name in node.input]
    made = helper.make_node("ReduceMean", ["logits"], ["h_mean"], axes=[0], keepdims=0)
    proof = after_a_change(onnx_sorted(model, made))
    assert proof.verdict == NOT_PROVED and proof.steps[-1].status == "skipped" and "'h_mean'" in proof.why


def test_runs_that_count_alike_are_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss divides by the labels that count, of which runs may have different numbers."""
    with monkeypatch.context() as patch:
        mean_of_the_runs(patch)
        proof = after_a_change(training_model("sgd", accumulate=2))
    assert proof.verdict == NOT_PROVED and proof.steps[-1].status == "skipped" and "count equally" in proof.why


def test_a_count_by_which_the_loss_does_not_divide_is_not_proved() -> None:
    model = training_model("sgd", accumulate=2)
    count = next(name for name, slot in describe(model).slots.items() if slot.kind == "counted")
    reader = next(node for node in model.graph.node if node.op_type == "Add" and count in node.input)
    divisor = next(name for name in reader.input if name != count)
    for node in model.graph.node:
        if node.name.startswith("optimizer"):
            node.input[:] = ["loss" if name == divisor else name for name in node.input]
    proof = after_a_change(model)
    assert proof.verdict == NOT_PROVED and proof.steps[-1].status == "skipped" and "'loss'" in proof.why


def test_a_state_that_stays_is_found() -> None:
    model = training_model("adamw")
    maker = next(node for node in model.graph.node if "first.weight_v_next" in node.output)
    at = list(model.graph.node).index(maker)
    maker.output[0] = "first.weight_v_computed"
    for node in model.graph.node:
        node.input[:] = ["first.weight_v_computed" if n == "first.weight_v_next" else n for n in node.input]
    kept = helper.make_node("Identity", ["first.weight_v"], ["first.weight_v_next"])
    model.graph.node.insert(at + 1, kept)
    proof = after_a_change(model)
    assert proof.failed and "wrong: 'first.weight_v'" in proof.why


def test_nodes_that_lost_their_tags_are_compared() -> None:
    """Other tools drop the metadata of nodes."""
    model = training_model("adamw", clip_norm=1.0)
    for node in model.graph.node:
        del node.metadata_props[:]
    assert after_a_change(model).verdict == PROVED


def test_a_model_without_its_settings_is_not_proved() -> None:
    model = training_model("adamw")
    roles = describe(model)
    assert roles.step == StepSettings(
        {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "amsgrad": 0.0}, accumulate=1
    )
    metadata.write(model, replace(roles, step=None))
    proof = after_a_change(model)
    assert proof.verdict == NOT_PROVED and CHECK in proof.why and "its settings" in proof.why
    assert proof.steps[-1].status == "skipped"


def test_an_optimizer_of_the_user_is_not_proved() -> None:
    """Under a name of its own, and under the name of one of onnxgrad's."""

    def mine(op, w, g, state):  # type: ignore[no-untyped-def]
        return w - 0.5 * g

    for name in ("mine", "sgd"):
        with OPTIMIZERS.scoped():
            optimizer(name, override=True)(mine)
            model = training_model(name)
        assert describe(model).step is None
        assert after_a_change(model).verdict == NOT_PROVED


def test_groups_are_recorded_by_weight() -> None:
    asked = tuple(groups.parse_group(text) for text in ("*.bias:weight-decay=0", "last.*:lr=0.3"))
    step = describe(training_model("sgd", group=asked)).step
    assert step is not None
    assert step.groups == (
        StepGroup(("first.bias", "last.bias"), {"weight_decay": 0.0}),
        StepGroup(("last.weight", "last.bias"), {"lr": 0.3}),
    )
    assert step.of("last.bias") == {"weight_decay": 0.0, "lr": 0.3}
    assert step.of("first.weight") == {"weight_decay": 0.0}


def test_large_weights_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix of a million elements, a few rows and columns are compared."""
    weight = onnx.numpy_helper.from_array(np.zeros((1000, 1000), np.float32), "w")
    x = helper.make_tensor_value_info("x", 1, ["batch", 1000])
    y = helper.make_tensor_value_info("y", 1, ["batch", 1000])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "large", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sizes = []
    right = REFERENCES["lamb"]

    def seen(w: np.ndarray, *more: Any) -> Any:
        sizes.append(w.shape)
        return right(w, *more)

    monkeypatch.setitem(REFERENCES, "lamb", seen)
    assert proof_of(model, Options(optimizer="lamb", clip_norm=1.0, accumulate=2)).verdict == PROVED
    assert set(sizes) == {(CUT, CUT)}


# -- the reference beside torch ---------------------------------------------------------------------------------------
