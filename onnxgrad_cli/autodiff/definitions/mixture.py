"""Mixtures of experts (domain com.microsoft), of float weights or of quantized ones, in operators of the standard.

Every expert computes every token, and a token that was not sent to it has the factor 0: one product for all experts,
where products of an expert's tokens alone would be as many nodes as there are experts.
Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; forms that onnxruntime has no CPU
kernel for are refused: nothing would prove them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrad_cli.autodiff.definitions.contrib import MICROSOFT, dequantized, unpacked
from onnxgrad_cli.autodiff.registry import definition
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.emission.values import Val
from onnxgrad_cli.errors import Unknown

Layer = tuple[Val, Val | None]
"""The weights of all experts, [experts, outputs, inputs], and their biases, [experts, outputs]."""

ACTIVATIONS: dict[str, Callable[[Op, Val], Val]] = {
    "relu": lambda op, x: op.Relu(x),
    "gelu": lambda op, x: op.Gelu(x, approximate="tanh"),
    "silu": lambda op, x: x * op.Sigmoid(x),
    "identity": lambda op, x: x,
}
"""The activations that do not join two products."""


@definition("MoE", domain=MICROSOFT, needs_opset=20)
def mixture(
    op, x, router, fc1, fc1_bias=None, fc2=None, fc2_bias=None, fc3=None, fc3_bias=None, *,
    k=1, normalize_routing_weights=0, use_sparse_mixer=0, activation_type="relu", activation_alpha=1.0,
    activation_beta=0.0, swiglu_fusion=0, swiglu_limit=None, swiglu_limit_after_activation=0,
):  # fmt: skip
    """The sum of the k likeliest experts' answers, times their probabilities; an expert is fc2(activation(fc1(x)))."""
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
    """As `mixture`, of weights that are dequantized; but the probabilities are always those among the chosen experts.

    With `router_weights`, the router chooses, and these are the factors. Whatever `accuracy_level` allows a kernel,
    nothing else is quantized.
    """
    _is_known(fc3, use_sparse_mixer, activation_type, swiglu_fusion, swiglu_limit_after_activation)
    if quant_type != "int" or fc1_scales is None or fc2_scales is None:
        raise Unknown(f"its weights are of the type '{quant_type}'")
    if weights_prepacked == 1:
        raise Unknown("its weights are prepacked for one kind of processor")
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
    """The logarithms of the chosen experts' sigmoids, and the sentinel elsewhere; or all sigmoids, for a later choice.

    Experts are chosen by the sigmoid plus a bias: first groups, by the sum of their best experts, then experts of these
    groups. A choice has no derivative.
    """
    if projection is not None:
        wide = op.wide(op.reshape(logits, [-1, op.size(logits, -1)]))
        scores = op.Sigmoid(wide @ op.swap_last(op.cast(projection, wide)))
        return None, scores + op.cast(expert_bias, scores), scores
    count = logits.shape[-1] if isinstance(logits.shape[-1], int) else expert_bias.shape[0]
    if not isinstance(count, int):
        raise Unknown("the number of its experts is unknown")
    scores = op.Sigmoid(op.reshape(op.wide(logits), [-1, count]))
    biased = scores + op.cast(expert_bias, scores)
    size = count // n_group
    if top_k > topk_group * size:
        raise Unknown(f"it chooses {top_k} experts of {topk_group} groups that have {size} each")
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
    """Refuse what onnxruntime's CPU kernels do not compute.

    Raises:
        Unknown: a form of the operator that is made for another processor.
    """
    if activation not in (*ACTIVATIONS, "swiglu"):
        raise Unknown(f"its activation '{activation}' is not known")
    if sparse:
        raise Unknown("its router is a sparse mixer")
    if third is not None or (activation == "swiglu" and fusion != 1) or after:
        raise Unknown("it gates in a form that onnxruntime's CPU kernel does not compute")


def _chosen(op: Op, router: Val, k: int) -> Val:
    """1 for the k likeliest experts of a token, 0 for the others, [tokens, experts]."""
    count = router.shape[1]
    if not isinstance(count, int):
        raise Unknown("the number of its experts is unknown")
    _, places = op.TopK(router, op.ints([k]), axis=1, outputs=2)
    at = op.Equal(op.unsqueeze(places, [2]), op.steps(count, axis=2, rank=3))
    return op.sum(op.cast(at, router), [1], keepdims=False)


def _mixed(
    op: Op, x: Val, share: Val, first: Layer, second: Layer, activation: str, swiglu: tuple[float, float, float | None]
) -> Val:
    """The experts' answers, of which each token takes its `share`, [tokens, experts]."""
    size = first[0].shape[2]
    if not isinstance(size, int):
        raise Unknown("the size of its tokens is unknown")
    tokens = op.reshape(x, [-1, size])
    hidden = _each_expert(op, tokens, first)
    hidden = _swiglu(op, hidden, *swiglu) if activation == "swiglu" else ACTIVATIONS[activation](op, hidden)
    answers = _each_expert(op, hidden, second)
    parts = op.unsqueeze(op.transpose(share, [1, 0]), [2])
    return op.reshape_like(op.sum(answers * parts, [0], keepdims=False), x)


def _each_expert(op: Op, x: Val, layer: Layer) -> Val:
    """[experts, tokens, outputs] of [tokens, inputs], or of [experts, tokens, inputs]."""
    weight, bias = layer
    y = x @ op.swap_last(weight)
    return y if bias is None else y + op.unsqueeze(bias, [1])


def _swiglu(op: Op, x: Val, alpha: float, beta: float, limit: float | None) -> Val:
    """G sigmoid(alpha G) (L + beta): gates G and values L take turns; |L| and G, not |G|, are at most `limit`."""
    experts, tokens, width = x.shape
    if not isinstance(width, int):
        raise Unknown("the size of its experts is unknown")
    turns = op.Reshape(x, op.ints([0, 0, width // 2, 2]), shape=(experts, tokens, width // 2, 2))
    gate, value = (op.squeeze(part, [3]) for part in op.split(turns, [1, 1], axis=3))
    if limit is not None:
        high = op.const(limit, x)
        gate, value = op.Min(gate, high), op.Clip(value, op.const(-limit, x), high)
    return gate * op.Sigmoid(gate if alpha == 1 else gate * alpha) * (value + beta if beta else value)


def _experts(op: Op, packed: Val, scales: Val, zeros: Val | None, bits: int, block: int, x: Val) -> Val:
    """[experts, outputs, inputs] of bytes, in the type of `x`; a scale is of a block of inputs, or else of all."""
    count, rows, width = packed.shape
    if not (isinstance(count, int) and isinstance(rows, int) and isinstance(width, int)):
        raise Unknown("the size of its experts is unknown")
    columns = width * 8 // bits
    size = block if block > 0 else columns
    blocks = columns // size
    if block > 0:
        zeros = None if zeros is None else unpacked(op, zeros, bits, [count, rows, -1], blocks)
    else:
        scales = op.unsqueeze(scales, [2])
        zeros = None if zeros is None else op.unsqueeze(unpacked(op, zeros, bits, [count, -1], rows), [2])
    return op.cast(dequantized(op, packed, scales, zeros, bits, [count, rows], blocks, size), x)
