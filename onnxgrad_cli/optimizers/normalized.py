"""Steps whose length is set apart from that of the gradient: by its sign, or by the norm of the weight."""

from __future__ import annotations

from onnxgrad_cli.common.settings import require
from onnxgrad_cli.emission.sums import norm
from onnxgrad_cli.optimizers.adaptive import ADAM, MEANS, SHRINK, adam_step, decaying_mean, require_shares
from onnxgrad_cli.optimizers.registry import optimizer


@optimizer(
    "lion",
    slots={"m": "the decaying mean of the gradients"},
    options={
        "beta1": "how much of the mean stays in the direction of a step",
        "beta2": "how much of it stays for the next step",
        "weight_decay": SHRINK,
    },
)
def lion(op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.0):
    """w (1 - rate weight_decay) - rate sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.

    Source: X. Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, algorithm 2.
    """
    require_shares(beta1=beta1, beta2=beta2)
    require(weight_decay >= 0, "weight_decay must not be negative")
    direction = op.Sign(beta1 * state["m"] + (1 - beta1) * g)
    decaying_mean(state, "m", beta2, g)
    return w - state.rate * (direction + weight_decay * w if weight_decay else direction)


@optimizer(
    "lamb",
    slots={slot: MEANS[slot] for slot in ("m", "v")},
    options={
        **{option: ADAM[option] for option in ("beta1", "beta2", "eps")},
        "weight_decay": "added to Adam's direction: this times the weight",
    },
)
def lamb(
    op, w, g, state, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01
):  # fmt: skip
    """w - rate |w| / |r| r, r Adam's direction plus weight_decay w; the factor is 1 where a norm is zero.

    Source: Y. You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020,
    algorithm 2, with the norm of the weight itself.
    """
    require(weight_decay >= 0, "weight_decay must not be negative")
    r = adam_step(op, g, state, 1.0, beta1, beta2, eps)
    r = r + weight_decay * w if weight_decay else r
    ours, theirs = norm(op, w), norm(op, r)
    moves = op.And(ours > 0.0, theirs > 0.0)
    return w - state.rate * op.Where(moves, ours / theirs, op.const(1.0, ours)) * r
