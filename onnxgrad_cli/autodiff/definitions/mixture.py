"""Definitions of mixtures of experts (domain com.microsoft) with float weights or quantized weights.

Every expert computes all tokens. If a token is not routed to an expert, the expert's result is multiplied by 0. This
takes one matrix product for all experts. Computing only the routed tokens would need separate nodes for each expert.
Settings for which onnxruntime has no CPU kernel are refused, because their gradient could not be checked.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrad_cli.autodiff.definitions.contrib import dequantized
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.unpacking import unpacked
from onnxgrad_cli.emission.values import Val, require
from onnxgrad_cli.errors import Unknown
from onnxgrad_cli.ir.domains import MICROSOFT

Layer = tuple[Val, Val | None]
"""One layer of all experts: weights [experts, outputs, inputs], and biases [experts, outputs] or None."""

ACTIVATIONS: dict[str, Callable[[Op, Val], Val]] = {
    "relu": lambda op, x: op.Relu(x),
    "gelu": lambda op, x: op.Gelu(x, approximate="tanh"),
    "silu": lambda op, x: x * op.Sigmoid(x),
    "identity": lambda op, x: x,
}
"""Map from an activation to a function that writes it. swiglu is not included, because it has two operands."""


@definition("MoE", domain=MICROSOFT, needs_opset=20)
def mixture(
    op, x, router, fc1, fc1_bias=None, fc2=None, fc2_bias=None, fc3=None, fc3_bias=None, *,
    k=1, normalize_routing_weights=0, use_sparse_mixer=0, activation_type="relu", activation_alpha=1.0,
    activation_beta=0.0, swiglu_fusion=0, swiglu_limit=None, swiglu_limit_after_activation=0,
):  # fmt: skip
    """The sum of the results of the k most probable experts, weighted by their probabilities.

    An expert is fc2(activation(fc1(x))).
    """
    _is_known(fc3, use_sparse_mixer, activation_type, swiglu_fusion, swiglu_limit_after_activation)
    share = _chosen(op, router, k) * op.Softmax(router, axis=-1)
    if normalize_routing_weights:
        share = share / op.sum(share, [1])
    swiglu = activation_alpha, activation_beta, swiglu_limit
    return _mixed(op, x, share, (fc1, fc1_bias), (fc2, fc2_bias), activation_type, swiglu)


@definition("QMoE", domain=MICROSOFT, needs_opset=21)
def quantized_mixture(
    op, x, router, fc1, fc1_scales=None, fc1_bias=None, fc2=None, fc2_scales=None, fc2_bias=None, fc3=None,
    fc3_scales=None, fc3_bias=None, fc1_zeros=None, fc2_zeros=None, fc3_zeros=None, router_weights=None, *,
    k=1, normalize_routing_weights=0, use_sparse_mixer=0, activation_type="relu", activation_alpha=1.0,
    activation_beta=0.0, swiglu_fusion=0, swiglu_limit=None, swiglu_limit_after_activation=0, expert_weight_bits=4,
    fc1_expert_weight_bits=0, fc2_expert_weight_bits=0, block_size=0, quant_type="int", weights_prepacked=-1,
    accuracy_level=0,
):  # fmt: skip
    """The operator MoE with quantized weights. Probabilities are always normalized over the chosen experts.

    With `router_weights`, the router only chooses the experts, and their results are weighted by `router_weights`,
    which are normalized only if `normalize_routing_weights` is set. Inputs are never quantized, even if
    `accuracy_level` allows that.
    """
    _is_known(fc3, use_sparse_mixer, activation_type, swiglu_fusion, swiglu_limit_after_activation)
    if quant_type != "int" or fc1_scales is None or fc2_scales is None:
        raise Unknown(f"its weights are of the type '{quant_type}'")
    require(weights_prepacked != 1, "its weights are prepacked for a specific kind of processor")
    chosen = _chosen(op, router, k)
    share = chosen * (op.Softmax(router, axis=-1) if router_weights is None else router_weights)
    if router_weights is None or normalize_routing_weights:
        share = share / op.sum(share, [1])
    w1 = _experts(op, fc1, fc1_scales, fc1_zeros, fc1_expert_weight_bits or expert_weight_bits, block_size, x)
    w2 = _experts(op, fc2, fc2_scales, fc2_zeros, fc2_expert_weight_bits or expert_weight_bits, block_size, x)
    swiglu = activation_alpha, activation_beta, swiglu_limit
    return _mixed(op, x, share, (w1, fc1_bias), (w2, fc2_bias), activation_type, swiglu)


@definition("MoEGroupRouter", domain=MICROSOFT)
def moe_group_router(
    op, logits, expert_bias, projection=None, *,
    group_topk=2, n_group=1, router_sentinel=-10000.0, top_k, topk_group=1,
):  # fmt: skip
    """log(sigmoid(logits)) for the chosen experts, and `router_sentinel` for the others.

    Experts are chosen by sigmoid plus bias: first the groups whose best experts have the largest sum, then the best
    experts in these groups. The choice has no derivative. With a projection, only the sigmoids are computed, and
    another node chooses the experts.
    """
    if projection is not None:
        wide = op.wide(op.reshape(logits, [-1, op.size(logits, -1)]))
        scores = op.Sigmoid(wide @ op.swap_last(op.cast(projection, wide)))
        return None, scores + op.cast(expert_bias, scores), scores
    last = logits.shape[-1]
    count = last if isinstance(last, int) else expert_bias.known_size(0, "the number of its experts")
    scores = op.Sigmoid(op.reshape(op.wide(logits), [-1, count]))
    biased = scores + op.cast(expert_bias, scores)
    size = count // n_group
    require(top_k <= topk_group * size, f"it chooses {top_k} experts from {topk_group} groups of {size} experts each")
    candidates = biased
    if topk_group < n_group:
        groups = op.reshape(biased, [-1, n_group, size])
        best, _ = op.TopK(groups, op.ints([min(group_topk, size)]), axis=2, outputs=2)
        chosen = _chosen(op, op.sum(best, [2], keepdims=False), topk_group)
        open_ = op.reshape(op.Expand(op.unsqueeze(chosen, [2]), op.ints([1, 1, size])), [-1, count])
        candidates = op.Where(open_ > 0, biased, op.const(-np.inf, biased))
    taken = _chosen(op, candidates, top_k)
    logarithm = op.Log(op.Max(scores, op.const(1e-20, scores)))
    routed = op.Where(taken > 0, logarithm, op.const(router_sentinel, scores))
    return op.cast(routed, logits), biased, scores


def _is_known(third: Val | None, sparse: int, activation: str, fusion: int, after: int) -> None:
    """Check that onnxruntime's CPU kernels support these settings of the operator.

    Raises:
        Unknown: they do not support them.
    """
    require(activation in (*ACTIVATIONS, "swiglu"), f"its activation '{activation}' is not supported")
    require(not sparse, "its router is a sparse mixer")
    if third is not None or (activation == "swiglu" and fusion != 1) or after:
        raise Unknown("onnxruntime's CPU kernel does not compute its form of gate")


def _chosen(op: Op, router: Val, k: int) -> Val:
    """Return [tokens, experts]: 1 for the k most probable experts of each token, and 0 for the others."""
    count = router.known_size(1, "the number of its experts")
    _, places = op.TopK(router, op.ints([k]), axis=1, outputs=2)
    at = op.Equal(op.unsqueeze(places, [2]), op.steps(count, axis=2, rank=3))
    return op.sum(op.cast(at, router), [1], keepdims=False)


def _mixed(
    op: Op, x: Val, share: Val, first: Layer, second: Layer, activation: str, swiglu: tuple[float, float, float | None]
) -> Val:
    """Return the sum of the experts' results for each token, weighted by `share`, which is [tokens, experts]."""
    tokens = op.reshape(x, [-1, first[0].known_size(2, "the size of its tokens")])
    hidden = _each_expert(op, tokens, first)
    hidden = _swiglu(op, hidden, *swiglu) if activation == "swiglu" else ACTIVATIONS[activation](op, hidden)
    answers = _each_expert(op, hidden, second)
    parts = op.unsqueeze(op.transpose(share, [1, 0]), [2])
    return op.reshape_like(op.sum(answers * parts, [0], keepdims=False), x)


def _each_expert(op: Op, x: Val, layer: Layer) -> Val:
    """Apply each expert's layer to [tokens, inputs] or [experts, tokens, inputs]. Return [experts, tokens, outputs]."""
    weight, bias = layer
    y = x @ op.swap_last(weight)
    return y if bias is None else y + op.unsqueeze(bias, [1])


def _swiglu(op: Op, x: Val, alpha: float, beta: float, limit: float | None) -> Val:
    """Return G sigmoid(alpha G) (L + beta). G and L alternate along the last axis of `x`; `limit` clips both."""
    half = x.known_size(2, "the size of its experts") // 2
    turns = op.Reshape(x, op.ints([0, 0, half, 2]), shape=(*x.shape[:2], half, 2))
    gate, value = (op.squeeze(part, [3]) for part in op.split(turns, [1, 1], axis=3))
    if limit is not None:
        high = op.const(limit, x)
        gate, value = op.Min(gate, high), op.Clip(value, op.const(-limit, x), high)
    return gate * op.Sigmoid(gate if alpha == 1 else gate * alpha) * (value + beta if beta else value)


def _experts(op: Op, packed: Val, scales: Val, zeros: Val | None, bits: int, block: int, x: Val) -> Val:
    """Dequantize packed weights. Return [experts, outputs, inputs] in the type of `x`.

    There is a scale for each block of `block` inputs, or for each output if `block` is 0.
    """
    count, rows, width = (packed.known_size(axis, "the size of its experts") for axis in range(3))
    columns = width * 8 // bits
    size = block if block > 0 else columns
    blocks = columns // size
    if block > 0:
        zeros = None if zeros is None else unpacked(op, zeros, bits, [count, rows, -1], blocks)
    else:
        scales = op.unsqueeze(scales, [2])
        zeros = None if zeros is None else op.unsqueeze(unpacked(op, zeros, bits, [count, -1], rows), [2])
    return op.cast(dequantized(op, packed, scales, zeros, bits, [count, rows], blocks, size), x)
