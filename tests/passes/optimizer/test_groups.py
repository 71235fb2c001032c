"""Parameter groups beside those of torch.optim."""

from __future__ import annotations

import pytest
import torch

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.options import Group
from onnxgrad_cli.passes.optimizer.groups import parse_group
from tests.facts import raises_as
from tests.steps import KINDS, RATE, assert_same, batches, exported, loss, network, options, trained


@pytest.mark.parametrize(("dtype", "bound"), KINDS)
def test_beside_torch(dtype: str, bound: float) -> None:
    """Biases without decay, the last layer slower and with another beta; where both match, the later group counts."""
    net = network(getattr(torch, dtype))
    data = batches(dtype)
    groups = tuple(
        parse_group(text) for text in ("*.bias:weight-decay=0", "last.*:lr=0.3,beta1=0.8", "last.bias:weight-decay=0.5")
    )
    ours = trained(build(exported(net), options("adamw", {"weight_decay": 0.2}, group=groups)).model, data)
    first, last = net[0], net[2]
    slow = {"lr": 0.3 * RATE, "betas": (0.8, 0.999)}
    theirs = torch.optim.AdamW(
        [
            {"params": [first.weight]},
            {"params": [first.bias], "weight_decay": 0.0},
            {"params": [last.weight], **slow},
            {"params": [last.bias], **slow, "weight_decay": 0.5},
        ],
        lr=RATE,
        weight_decay=0.2,
    )
    for batch in data:
        theirs.zero_grad()
        loss(net, batch).backward()
        theirs.step()
    assert_same(ours, net, bound)


def test_a_group_as_it_is_typed() -> None:
    assert parse_group("a:0/*:weight-decay=0,lr=2") == Group("a:0/*", {"weight_decay": 0, "lr": 2})
    assert str(parse_group("a:lr=2")) == "a:lr=2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*.bais:weight-decay=0", ("unknown_name", "group", "*.bais")),
        ("*:momentum=0.9", ("unknown_name", "group", "*:momentum=0.9", "momentum")),
        ("*:lr=-1", ("wrong_value", "group", "-1")),
        ("*:lr=true", "lr takes a factor"),
        ("*:beta1=x", "option beta1 takes a number"),
        ("*:beta1=1", ("wrong_value", "beta1", "1", "1")),
        ("*:", "not of the form GLOB:KEY=VALUE"),
        ("weight_decay=0", "not of the form GLOB:KEY=VALUE"),
        ("*:lr", "not of the form GLOB:KEY=VALUE"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, words: str | tuple[str, ...]) -> None:
    with raises_as(UsageError, words):
        build(exported(network(torch.float32)), options("adamw", group=(parse_group(text),)))
