"""Options of several parts: what they are as text, and values that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.options.compound_values import DYNAMIC, Group, LoraSpec, RecomputeSpec, check_loss_scale


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (LoraSpec(8), "8"),
        (LoraSpec(8, 16), "8:16"),
        (LoraSpec(4, 0.5), "4:0.5"),
        (RecomputeSpec("elementwise"), "elementwise"),
        (RecomputeSpec("block", "layer*"), "block:layer*"),
        (RecomputeSpec("budget", size=1000), "budget:1000B"),
        (RecomputeSpec("optimal", size=5), "optimal:5B"),
        (Group("*.bias", {"weight_decay": 0, "lr": 0.1}), "*.bias:weight-decay=0,lr=0.1"),
    ],
)
def test_text(spec: object, text: str) -> None:
    assert str(spec) == text


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LoraSpec(0), "lora"),
        (lambda: LoraSpec(8, 0), "lora"),
        (lambda: LoraSpec(8, float("nan")), "lora"),
        (lambda: LoraSpec("8"), "lora"),
        (lambda: RecomputeSpec("blocks"), "kind"),
        (lambda: RecomputeSpec("block"), "recompute"),
        (lambda: RecomputeSpec("budget", "layer*"), "recompute"),
        (lambda: RecomputeSpec("budget", size=-1), "size"),
        (lambda: Group(3, {}), "pattern"),
        (lambda: Group("*", [1]), "options"),
        (lambda: Group("*", {"lr": -1}), "group"),
        (lambda: Group("*", {"lr": "0.1"}), "group"),
        *((lambda scale=scale: check_loss_scale(scale), "loss_scale") for scale in (0, -1.0, "static", float("inf"))),
    ],
)
def test_what_does_not_fit(make: Callable[[], object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert named in (caught.value.argument or caught.value.message)


@pytest.mark.parametrize("scale", [1024, 0.5, DYNAMIC])
def test_loss_scales(scale: float | str) -> None:
    assert check_loss_scale(scale) == scale
