"""Gradients gathered over several runs, beside PyTorch's step on the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.optimizer.split import split
from onnxgrad_cli.training.steps.split_trainer import SplitTrainer
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.proof import prove
from tests.facts import raises_as
from tests.steps import KINDS, RATE, STEPS, assert_same, batches, clip, exported, loss, network, options, trained, whole

RUNS = 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
def test_beside_torch_on_the_whole_batch(reduction: str, dtype: str, bound: float) -> None:
    """With weight decay, and clipping of what was gathered."""
    net = network(getattr(torch, dtype))
    data = batches(dtype, RUNS * STEPS)
    limit, rate = (0.1, RATE) if reduction == "mean" else (2.0, RATE / 16)
    asked = options("momentum", {"weight_decay": 0.1}, accumulate=RUNS, clip_norm=limit, reduction=reduction)
    ours = trained(build(exported(net), asked).model, data, rate)
    theirs = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=0.1)
    for batch in whole(data, RUNS):
        theirs.zero_grad()
        loss(net, batch, reduction).backward()
        clip(net, clip_norm=limit)
        theirs.step()
    assert ours["step"] == STEPS
    assert_same(ours, net, bound)


def test_runs_without_a_step_change_nothing_but_what_is_gathered() -> None:
    model = build(exported(network(torch.float32)), options("adam", accumulate=RUNS, ema=0.5)).model
    trainer, session = Trainer(model), ort.InferenceSession(model.SerializeToString())
    weights = list(trainer.weights())
    totals: dict[str, Any] = {}
    for run, (x, y) in enumerate(batches("float32", 2 * RUNS)):
        before = {**trainer.weights(), **trainer.state()}
        fed = {"x": x, "y": y, "learning_rate": np.array(0, np.float32), **trainer.weights()}
        gradients = session.run([f"{name}_grad" for name in weights], fed)
        counted = {name: g * len(x) for name, g in zip(weights, gradients, strict=True)}
        totals = {name: g + (totals[name] if run % RUNS else 0) for name, g in counted.items()}
        trainer.step({"x": x, "y": y}, RATE)
        after = {**trainer.weights(), **trainer.state()}
        assert after["accumulated"] == (run + 1) % RUNS
        assert after["step"] == (run + 1) // RUNS
        assert after["counted"] == (run % RUNS + 1) * len(x)
        for name, total in totals.items():
            np.testing.assert_allclose(after[f"{name}_acc"], total, rtol=1e-5, atol=1e-7)
        for name in after.keys() - {"accumulated", "counted", *(f"{name}_acc" for name in weights)}:
            assert (after[name] != before[name]).any() == ((run + 1) % RUNS == 0), name


def test_the_work_of_a_step_stands_in_a_branch() -> None:
    model = build(exported(network(torch.float32)), options("adam", accumulate=RUNS)).model
    (branch,) = [node for node in model.graph.node if node.op_type == "If"]
    roots = [node for node in model.graph.node if node.op_type == "Sqrt"]
    inner = {a.name: [node.op_type for node in a.g.node] for a in branch.attribute}
    assert not roots and "Sqrt" in inner["then_branch"]
    assert set(inner["else_branch"]) == {"Identity"}


def test_the_proof_passes() -> None:
    model = build(exported(network(torch.float32)), options("adam", accumulate=RUNS, clip_value=0.5)).model
    proof = prove(model, describe(model))
    assert proof.status == "passed"
    assert {step.status for step in proof.steps} == {"passed"}


DECODER = """
<ir_version: 8, opset_import: ["": 17]>
decoder (int64[batch, places] tokens) => (float[batch, places, 7] logits)
<float[7, 7] table = {TABLE}>
{ logits = Gather(table, tokens) }
"""


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_a_mean_over_tokens_is_that_of_all_micro_batches(optimizer: str) -> None:
    """Padded micro-batches, of as many tokens as they happen to have: the mean is over all tokens of the step."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((7, 7)).astype(np.float32)
    text = DECODER.replace("TABLE", ", ".join(str(value) for value in table.flat))
    asked = Options(losses=(LossSpec("causal-lm"),), optimizer=optimizer, accumulate=RUNS, l2=0.1)
    built = build(parser.parse_model(text), asked)
    assert not any(caution.subject == "`accumulate`" for caution in built.training.cautions)
    trainer, split_trainer = Trainer(built), SplitTrainer(split(built.model))
    theirs = torch.nn.Embedding.from_pretrained(torch.tensor(table), freeze=False)
    steps = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9 if optimizer == "momentum" else 0.0)
    for _ in range(3):
        sums, count = torch.zeros(()), 0
        for length in rng.integers(2, 9, RUNS):
            tokens = rng.integers(0, 7, (3, length))
            label = np.where(rng.random((3, length)) < 0.4, -100, tokens)
            label[0, 1] = tokens[0, 1]  # one at least
            for each in (trainer, split_trainer):
                each.step({"tokens": tokens, "label": label}, 0.5)
            logits, following = theirs(torch.tensor(tokens))[:, :-1], torch.tensor(label)[:, 1:]
            sums = sums + torch.nn.functional.cross_entropy(
                logits.reshape(-1, 7), following.reshape(-1), reduction="sum"
            )
            count += int((following != -100).sum())
        steps.zero_grad()
        (sums / count + 0.1 * (theirs.weight**2).sum()).backward()
        steps.step()
        wanted = theirs.weight.detach().numpy()
        np.testing.assert_allclose(trainer.weights()["table"], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(split_trainer.weights()["table"], wanted, rtol=1e-5, atol=1e-6)


def test_a_mean_of_means_that_is_no_mean_is_told() -> None:
    asked = replace(options("sgd", accumulate=RUNS, loss_options={"ignore_index": 0}))
    subjects = [caution.subject for caution in build(exported(network(torch.float32)), asked).training.cautions]
    assert "`accumulate`" not in subjects
    two = replace(asked, losses=(asked.losses[0], replace(asked.losses[0], label="other")))
    cautions = build(exported(network(torch.float32)), two).training.cautions
    assert any("ignore_index" in caution.text for caution in cautions if caution.subject == "`accumulate`")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"accumulate": 0}, ("wrong_value", "accumulate=0", "1")),
        ({"accumulate": 2, "optimizer": ""}, "`accumulate` requires an optimizer"),
        ({"accumulate": 2, "l2": 0.1, "reduction": "sum"}, ("conflict", "accumulate", "l1", "l2", "reduction='sum'")),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, words):
        build(exported(network(torch.float32)), Options(**{"optimizer": "sgd", **given}))
