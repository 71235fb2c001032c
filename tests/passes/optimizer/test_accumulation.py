"""Gradients gathered over several runs, beside PyTorch's step on the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.training.trainer import Trainer
from onnxgrad_cli.verification.proof import prove
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
        totals = {name: g + (totals[name] if run % RUNS else 0) for name, g in zip(weights, gradients, strict=True)}
        trainer.step({"x": x, "y": y}, RATE)
        after = {**trainer.weights(), **trainer.state()}
        assert after["accumulated"] == (run + 1) % RUNS
        assert after["step"] == (run + 1) // RUNS
        for name, total in totals.items():
            np.testing.assert_allclose(after[f"{name}_acc"], total, rtol=1e-5, atol=1e-7)
        for name in after.keys() - {"accumulated", *(f"{name}_acc" for name in weights)}:
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


def test_a_mean_of_means_that_is_no_mean_is_told() -> None:
    asked = options("sgd", accumulate=RUNS, loss_options={"ignore_index": 0})
    texts = [str(caution) for caution in build(exported(network(torch.float32)), asked).training.cautions]
    assert any("`accumulate`: with ignore_index" in text for text in texts)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"accumulate": 0}, "`accumulate` must be 1 or more"),
        ({"accumulate": 2, "optimizer": ""}, "`accumulate`: there is no optimizer"),
        ({"accumulate": 2, "l2": 0.1, "reduction": "sum"}, "the penalty would count at each run"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(exported(network(torch.float32)), Options(**{"optimizer": "sgd", **given}))
