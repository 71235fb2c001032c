"""The optimizers beside torch.optim: the same network, the same batches, the same weights after 50 steps.

Lion and LAMB have no twin there: they are beside their papers' algorithms, in numpy.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxgrad_cli import cli
from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.optimizers import OPTIMIZERS, optimizer
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.groups import parse_group
from onnxgrad_cli.report.summary import glance
from onnxgrad_cli.verification.proof import prove
from tests.facts import raises, raises_as
from tests.steps import (
    KINDS,
    RATE,
    STEPS,
    NAdam,
    assert_same,
    batches,
    clip,
    exported,
    loss,
    network,
    options,
    trained,
    whole,
)

SAMPLES = Path(__file__).parents[2] / "sample_models"
ort.set_default_logger_severity(3)

SETTINGS: list[tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", {}, torch.optim.SGD, {}),
    ("sgd", {"weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
    ("momentum", {}, torch.optim.SGD, {"momentum": 0.9}),
    (
        "momentum",
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    (
        "nesterov",
        {"momentum": 0.8, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    ),
    ("rmsprop", {}, torch.optim.RMSprop, {}),
    ("rmsprop", {"weight_decay": 0.1, "alpha": 0.9}, torch.optim.RMSprop, {"weight_decay": 0.1, "alpha": 0.9}),
    (
        "rmsprop",
        {"centered": True, "momentum": 0.5, "eps": 1e-3, "weight_decay": 0.1},
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.5, "eps": 1e-3, "weight_decay": 0.1},
    ),
    ("adagrad", {}, torch.optim.Adagrad, {}),
    (
        "adagrad",
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    ("adam", {}, torch.optim.Adam, {}),
    ("adam", {"weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    ("adam", {"beta1": 0.0, "beta2": 0.0}, torch.optim.Adam, {"betas": (0.0, 0.0)}),
    (
        "adam",
        {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "amsgrad": True},
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "weight_decay": 0.1, "amsgrad": True},
    ),
    ("adamax", {}, torch.optim.Adamax, {}),
    (
        "adamax",
        {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1},
        torch.optim.Adamax,
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    ("nadam", {}, NAdam, {}),
    (
        "nadam",
        {"beta1": 0.8, "beta2": 0.95, "momentum_decay": 0.1, "weight_decay": 0.1},
        NAdam,
        {"betas": (0.8, 0.95), "momentum_decay": 0.1, "weight_decay": 0.1},
    ),
    ("nadam", {"momentum_decay": 0.0}, NAdam, {"momentum_decay": 0.0}),
    ("radam", {}, torch.optim.RAdam, {}),
    (
        "radam",
        {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1},
        torch.optim.RAdam,
        {"betas": (0.8, 0.95), "weight_decay": 0.1},
    ),
    ("radam", {"beta2": 0.5}, torch.optim.RAdam, {"betas": (0.9, 0.5)}),
    ("adadelta", {}, torch.optim.Adadelta, {}),
    (
        "adadelta",
        {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
        torch.optim.Adadelta,
        {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1},
    ),
    ("adamw", {}, torch.optim.AdamW, {}),
    ("adamw", {"weight_decay": 0.3, "eps": 1e-4}, torch.optim.AdamW, {"weight_decay": 0.3, "eps": 1e-4}),
]


class Paper(torch.optim.Optimizer):
    """An optimizer as its paper's algorithm says it, in numpy, weight by weight."""

    def __init__(self, params: Any, step: Callable[..., np.ndarray], lr: float, **options: float) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.algorithm, self.count = step, 0
        self.slots: dict[int, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                slots = self.slots.setdefault(id(p), {"m": 0.0, "v": 0.0})
                w, g = p.numpy().astype(np.float64), p.grad.numpy().astype(np.float64)
                p.copy_(torch.tensor(self.algorithm(w, g, slots, self.count, **options)))


def lion(
    w: Any, g: Any, s: Any, t: int, lr: float, *, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0
) -> Any:
    """Chen et al. 2023, algorithm 2."""
    c = np.sign(b1 * s["m"] + (1 - b1) * g)
    s["m"] = b2 * s["m"] + (1 - b2) * g
    return w - lr * (c + weight_decay * w)


def lamb(
    w: Any, g: Any, s: Any, t: int, lr: float, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Any:  # fmt: skip
    """You et al. 2020, algorithm 2."""
    s["m"] = b1 * s["m"] + (1 - b1) * g
    s["v"] = b2 * s["v"] + (1 - b2) * g * g
    r = s["m"] / (1 - b1**t) / (np.sqrt(s["v"] / (1 - b2**t)) + eps)
    update = r + weight_decay * w
    return w - lr * np.linalg.norm(w) / np.linalg.norm(update) * update


def paper(algorithm: Callable[..., np.ndarray]) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, lr, **same: Paper(params, algorithm, lr, **same)


SETTINGS += [
    ("lion", {}, paper(lion), {}),
    (
        "lion",
        {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1},
        paper(lion),
        {"b1": 0.8, "b2": 0.9, "weight_decay": 0.1},
    ),
    ("lamb", {}, paper(lamb), {}),
    (
        "lamb",
        {"beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1},
        paper(lamb),
        {"b2": 0.95, "eps": 1e-3, "weight_decay": 0.1},
    ),
    ("lamb", {"weight_decay": 0.0}, paper(lamb), {"weight_decay": 0.0}),
]
IDS = [f"{name}-{'-'.join(given) or 'default'}" for name, given, _, _ in SETTINGS]


@pytest.mark.parametrize(("name", "given", "kind", "same"), SETTINGS, ids=IDS)
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
@pytest.mark.thinned(10, 3)
def test_beside_torch(
    name: str,
    given: dict[str, Any],
    kind: Callable[..., torch.optim.Optimizer],
    same: dict[str, Any],
    dtype: str,
    bound: float,
) -> None:
    net = network(getattr(torch, dtype))
    data = batches(dtype)
    rate = 1.0 if name == "adadelta" else RATE
    ours = trained(build(exported(net), options(name, given)).model, data, rate)
    theirs = kind(net.parameters(), lr=rate, **same)
    for batch in data:
        theirs.zero_grad()
        loss(net, batch).backward()
        theirs.step()
    assert ours["step"] == STEPS
    assert_same(ours, net, bound)


def test_every_optimizer_has_a_twin() -> None:
    assert {each.name for each in OPTIMIZERS} == {name for name, *_ in SETTINGS}
    assert {each.name for each in OPTIMIZERS} == {name for name, *_ in DECAYED}


DECAYED = [setting for setting in SETTINGS if setting[1].get("weight_decay")]
"""Every optimizer with weight decay, and most with all that they have besides."""

WITH: dict[str, dict[str, Any]] = {
    "clip-norm": {"clip_norm": 0.1},
    "clip-value": {"clip_value": 0.02},
    "accumulate": {"accumulate": 3},
    "group": {"group": ("*.bias:weight-decay=0.05", "last.*:lr=0.3")},
}
WITH["all"] = {**WITH["clip-norm"], **WITH["accumulate"], **WITH["group"]}
WITH["all-by-value"] = {**WITH["clip-value"], **WITH["accumulate"], **WITH["group"]}


@pytest.mark.parametrize("asked", WITH.values(), ids=WITH.keys())
@pytest.mark.parametrize(("name", "given", "kind", "same"), DECAYED, ids=[name for name, *_ in DECAYED])
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
@pytest.mark.thinned(40, 8)
def test_with_what_goes_with_a_step_beside_torch(
    asked: dict[str, Any],
    name: str,
    given: dict[str, Any],
    kind: Callable[..., torch.optim.Optimizer],
    same: dict[str, Any],
    dtype: str,
    bound: float,
) -> None:
    """Clipping, accumulation, groups and weight decay, one at a time and together."""
    net = network(getattr(torch, dtype))
    runs, rate = asked.get("accumulate", 1), 1.0 if name == "adadelta" else RATE
    data = batches(dtype, runs * STEPS)
    groups = tuple(map(parse_group, asked.get("group", ())))
    ours = trained(build(exported(net), options(name, given, **{**asked, "group": groups})).model, data, rate)
    bias, slow = ({"weight_decay": 0.05}, {"lr": 0.3 * rate}) if groups else ({}, {})
    each = [{}, bias, slow, {**bias, **slow}]
    params = [{"params": [p], **own} for p, own in zip(net.parameters(), each, strict=True)]
    theirs = kind(params, lr=rate, **same)
    for batch in whole(data, runs):
        theirs.zero_grad()
        loss(net, batch).backward()
        clip(net, **asked)
        theirs.step()
    assert ours["step"] == STEPS
    assert_same(ours, net, bound)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_the_proof_passes(name: str) -> None:
    model = build(exported(network(torch.float32)), options(name, {})).model
    onnx.checker.check_model(model, full_check=True)
    proof = prove(model, describe(model))
    assert proof.status == "passed"
    assert {step.status for step in proof.steps} == {"passed"}


def test_names_order_and_roles() -> None:
    model = build(exported(network(torch.float32)), options("adam", {})).model
    weights = ["first.weight", "first.bias", "last.weight", "last.bias"]
    slots = [f"{w}_{slot}" for w in weights for slot in ("m", "v")]
    assert [v.name for v in model.graph.input] == ["x", "y", "learning_rate", *weights, "step", *slots]
    assert [v.name for v in model.graph.output] == [
        "loss", *(f"{w}_grad" for w in weights), *(f"{w}_next" for w in weights), "step_next",
        *(f"{slot}_next" for slot in slots),
    ]  # fmt: skip
    roles = describe(model)
    assert roles.optimizer == "adam"
    assert roles.fed == ["x", "y", "learning_rate"]
    assert {roles.inputs[name] for name in ("step", *slots)} == {"state"}
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert stored["step"].dtype == np.int64
    assert all(not stored[name].any() and stored[name].shape == stored[name[:-2]].shape for name in slots)
    assert {node.domain for node in model.graph.node} == {""}


def test_running_statistics_go_on() -> None:
    """The statistics of BatchNormalization in training are outputs as without an optimizer, with the same values."""

    def built(name: str) -> onnx.ModelProto:
        model = onnx.load(SAMPLES / "digits_cnn.onnx")
        losses = (LossSpec("cross-entropy"),)
        return build(model, Options(losses=losses, label="y", mode="train", optimizer=name)).model

    plain, whole = built(""), built("momentum")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 8)
    names = [v.name for v in plain.graph.output]
    assert any("running" in name for name in names)
    assert [v.name for v in whole.graph.output][: len(names)] == names
    expected = ort.InferenceSession(plain.SerializeToString()).run(names, {"x": x, "y": y})
    rate = np.array(0.1, np.float32)
    ours = ort.InferenceSession(whole.SerializeToString()).run(names, {"x": x, "y": y, "learning_rate": rate})
    for name, a, b in zip(names, ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=name)
    roles = describe(whole)
    assert all(role.role == "next state" for name, role in roles.outputs.items() if name.endswith("_next"))


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_weights_of_16_bits_have_state_in_float32(kind: int) -> None:
    weight = helper.make_tensor("w", kind, [2, 2], [1.0, 2.0, 3.0, 4.0])
    x, y = (helper.make_tensor_value_info(name, kind, [4, 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "half", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    built = build(model, Options(optimizer="adam", label="t")).model
    onnx.checker.check_model(built, full_check=True)
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*built.graph.input, *built.graph.output)}
    assert kinds["w_next"] == kinds["w"] == kind
    assert kinds["learning_rate"] == kinds["w_m"] == kinds["w_v_next"] == TensorProto.FLOAT
    if kind == TensorProto.FLOAT16:  # onnxruntime has no bfloat16 MatMul on the CPU
        session = ort.InferenceSession(built.SerializeToString())
        half = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float16)
        fed = {"x": half, "t": half, "learning_rate": np.array(0.5, np.float32)}
        new, gradient = session.run(["w_next", "w_grad"], fed)
        moved = numpy_helper.to_array(weight) - 0.5 * np.sign(gradient)  # the first step of Adam has the rate's size
        np.testing.assert_allclose(new, moved, atol=4e-3)


def test_the_count_of_steps_does_not_lose_digits() -> None:
    """After 1000 steps Adam still divides by 1 - beta2**steps as float64 has it."""
    model = build(exported(network(torch.float32)), options("adam", {})).model
    session = ort.InferenceSession(model.SerializeToString())
    x, y = batches(np.float32)[0]
    for steps in (1, 2, 10, 1000, 10**6):
        fed = {"x": x, "y": y, "learning_rate": np.array(1.0, np.float32), "step": np.array(steps - 1)}
        new, m, v = session.run(["first.weight_next", "first.weight_m_next", "first.weight_v_next"], fed)
        m, v = (np.float64(a) for a in (m, v))
        step = m / (1 - 0.9**steps) / (np.sqrt(v / (1 - 0.999**steps)) + 1e-8)
        before = network(torch.float32)[0].weight.detach().numpy()
        np.testing.assert_allclose(new, before - step, rtol=2e-6, atol=2e-6 * max(1.0, float(np.abs(step).max())))


def test_the_report_names_the_optimizer_and_its_program_takes_steps(tmp_path: Path) -> None:
    onnx.save(exported(network(torch.float32)), tmp_path / "net.onnx")
    report = run_build(tmp_path / "net.onnx", options=options("adam", {"weight_decay": 0.1, "eps": 1e-6}))
    assert report.asked.optimizer == "adam (weight_decay=0.1, eps=1e-06)"
    assert ("optimizer", report.asked.optimizer) in glance(report)
    assert sum(row.optimizer for row in report.operators) == report.cost.nodes["optimizer"] > 0
    assert {value.name: value.role for value in report.inputs}["learning_rate"] == "learning rate"
    (program,) = (step.text for step in report.next if step.language == "python")
    assert "rate *" not in program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_the_list_of_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["list", "optimizers", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["result"]}
    assert list(found["adam"]["slots"]) == ["m", "v", "vmax"]
    assert {"name": "weight_decay", "kind": "float", "default": 0.01}.items() <= next(
        option.items() for option in found["adamw"]["options"] if option["name"] == "weight_decay"
    )
    assert cli.run(["list", "optimizers"]) == 0
    assert "weight-decay=0.01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("adan", {}, ("unknown_name", "adan")),
        ("", {"momentum": 0.9}, "requires an optimizer"),
        ("sgd", {"momentum": 0.9}, ("unknown_name", "momentum")),
        ("adam", {"beta1": 1.0}, ("wrong_value", "beta1", "1", "1")),
        ("adam", {"beta2": -0.5}, ("wrong_value", "beta2", "-0.5")),
        ("adam", {"amsgrad": 0.5}, "option amsgrad takes true or false"),
        ("momentum", {"momentum": -1.0}, ("wrong_value", "-1")),
        ("adamw", {"weight_decay": math.nan}, "option `weight_decay` takes a number"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, given: dict[str, Any], words: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, words):
        build(exported(network(torch.float32)), options(name, given))


def test_lamb_leaves_a_weight_of_zeros_its_plain_step() -> None:
    """The factor is 1 where a norm is zero."""
    net = network(torch.float32)
    with torch.no_grad():
        net[0].bias.zero_()
    batch = batches("float32", 1)
    ours = trained(build(exported(net), options("lamb", {"weight_decay": 0.0})).model, batch)
    loss(net, batch[0]).backward()
    np.testing.assert_allclose(ours["first.bias"], -RATE * np.sign(net[0].bias.grad.numpy()), rtol=1e-2)


def test_nothing_trained_is_refused() -> None:
    asked = Options(optimizer="sgd", freeze=("*",), grad_of_input=("x",))
    with pytest.raises(UsageError, match="no weight"):
        build(exported(network(torch.float32)), asked)


def test_an_optimizer_of_ones_own() -> None:
    with OPTIMIZERS.scoped():

        @optimizer("sign", slots={"n": "how often"}, options={"scale": "of a step"})
        def sign(op, w, g, state, *, scale: float = 1.0):
            """The sign of the gradient."""
            state["n"] = state["n"] + 1
            return w - state.rate * scale * op.Sign(g)

        held = trained(build(exported(network(torch.float32)), options("sign", {"scale": 2.0})).model,
                       batches(np.float32)[:3], 0.5)  # fmt: skip
        assert (held["first.weight_n"] == 3).all()
        with pytest.raises(OnnxgradError, match="two optimizers"):
            optimizer("sign", options={"scale": "of a step"})(sign)

        @optimizer("wrong")
        def wrong(op, w, g, state):
            return w - state["m"]

        with raises(OnnxgradError, "unknown_name", "m"):
            build(exported(network(torch.float32)), options("wrong", {}))
    with pytest.raises(UsageError):
        OPTIMIZERS.lookup("sign")
