"""MoE and QMoE beside onnxruntime's CPU kernels, and in float64 beside central differences and PyTorch."""

from itertools import product

import numpy as np
import pytest
import torch

from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from tests.autodiff.definitions.test_contrib import (
    FLOATS,
    SINCE_1_32,
    case,
    check,
    normal,
    packed,
    values_are_the_kernels,
)
from tests.nodes import compare, one_node

DOMAIN = "com.microsoft"
EXPERTS, SIZE, INNER = 4, 32, 16
GPT_OSS = {
    "k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0,
    "swiglu_limit": 2.0, "normalize_routing_weights": 1,
}  # fmt: skip
PARTS = ("x", "router", "fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias")
PARTS_QUANTIZED = (
    "x", "router", "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "fc3", "fc3_scales", "fc3_bias",
    "fc1_zeros", "fc2_zeros", "fc3_zeros", "weights",
)  # fmt: skip


def routes(tokens):
    """Scores that tell the experts of each token apart by far more than a step of a difference."""
    rng = np.random.default_rng(tokens)
    return np.stack([rng.permutation(EXPERTS) for _ in range(tokens)]) * 0.5 + 0.1 * normal(tokens, EXPERTS) / 9


def floats(shape=(5, SIZE), fused=1, bias=True):
    tokens = int(np.prod(shape[:-1]))
    given = {
        "x": normal(*shape), "router": routes(tokens), "fc1": normal(EXPERTS, fused * INNER, SIZE) / 3,
        "fc1_bias": normal(EXPERTS, fused * INNER) if bias else None, "fc2": normal(EXPERTS, SIZE, INNER) / 3,
        "fc2_bias": normal(EXPERTS, SIZE) if bias else None,
    }  # fmt: skip
    return {name: given.get(name) for name in PARTS}


FORMS = [
    (floats(), {}),
    (floats((2, 3, SIZE), bias=False), {"k": 2, "activation_type": "silu"}),
    (floats(), {"k": 3, "activation_type": "gelu", "normalize_routing_weights": 1}),
    (floats(), {"k": 4, "activation_type": "identity"}),
    (floats(fused=2), GPT_OSS),
    (floats(fused=2), {"k": 1, "activation_type": "swiglu", "swiglu_fusion": 1}),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("given", "attributes"), FORMS)
@pytest.mark.thinned(3)
def test_mixture(given, attributes, symbolic):
    fixed = ("router", "fc1", "fc1_bias", "fc2", "fc2_bias")
    check("MoE", given, ("y",), attributes, floats=FLOATS[:1], symbolic=symbolic, fixed=fixed)


def quantized(bits, block, zeros, fused=1, weights=False):
    """The operator's inputs, of weights in blocks of so many inputs; 0: of all inputs."""
    rng = np.random.default_rng(bits)
    given = {"x": normal(5, SIZE), "router": routes(5), "weights": np.abs(normal(5, EXPERTS)) if weights else None}
    for name, rows, columns in (("fc1", fused * INNER, SIZE), ("fc2", SIZE, INNER)):
        count = columns // block if block else 1
        offsets = rng.integers(0, 2**bits, (EXPERTS, rows, count))
        scales = rng.uniform(0.5, 1, offsets.shape) / 2**bits
        given |= {
            name: packed(rng.integers(0, 2**bits, (EXPERTS, rows, columns)), bits),
            f"{name}_scales": scales if block else scales[..., 0],
            f"{name}_bias": normal(EXPERTS, rows),
            f"{name}_zeros": packed(offsets if block else offsets[..., 0], bits) if zeros else None,
        }
    return {name: given.get(name) for name in PARTS_QUANTIZED}


QUANTITIES = [name for name in PARTS_QUANTIZED if name[:2] == "fc" and not name.endswith("bias")]
SINGLE = ("fc1_scales", "fc2_scales")
GATED = [GPT_OSS, {"k": 2, "activation_type": "silu"}, {"k": 1, "activation_type": "relu"}]
QUANTIZED = list(product(GATED, (2, 4, 8), (0, 16), (False, True)))
"""Attributes, bits, inputs in a block, and whether there are zero points."""


def asked(attributes, bits, block, zeros):
    """The inputs and the attributes of a form of QMoE."""
    attributes = attributes | {"expert_weight_bits": bits} | ({"block_size": block} if block else {})
    if bits == 4 and zeros:
        attributes |= {"fc1_expert_weight_bits": 4, "expert_weight_bits": 4, "weights_prepacked": 0}
    return quantized(bits, block, zeros, 2 if "swiglu_fusion" in attributes else 1), attributes


def models():
    """The forms of both operators, each in float64 but for the scales."""
    yield from (case("MoE", given, ("y",), attributes, {}, opset=20)[0] for given, attributes in FORMS)
    for form in QUANTIZED:
        given, attributes = asked(*form)
        given |= {name: given[name].astype(np.float32) for name in SINGLE}
        yield case("QMoE", given, ("y",), attributes, {}, constants=QUANTITIES)[0]


@pytest.mark.parametrize(("attributes", "bits", "block", "zeros"), QUANTIZED)
@pytest.mark.thinned(4, 3)
def test_quantized_mixture(attributes, bits, block, zeros):
    given, attributes = asked(attributes, bits, block, zeros)
    rounds = bits == 8 and block  # the kernel does, whatever its `accuracy_level`
    check("QMoE", given, ("y",), attributes, floats=() if rounds else FLOATS[:1], constants=QUANTITIES,
          single=SINGLE)  # fmt: skip


@pytest.mark.parametrize("normalize", [0, 1])
def test_factors_beside_the_router(normalize):
    given = quantized(4, 16, False, weights=True)
    attributes = {"k": 2, "activation_type": "silu", "block_size": 16, "normalize_routing_weights": normalize}
    quantities = ("fc1", "fc1_scales", "fc2", "fc2_scales")
    check("QMoE", given, ("y",), attributes, floats=FLOATS[:1], constants=quantities,
          single=SINGLE)  # fmt: skip


def test_gradients_are_pytorch_s():
    """Of every input, token by token and expert by expert."""

    def reference(x, router, fc1, fc1_bias, fc2, fc2_bias, **_):
        rows = []
        for token, scores in zip(x, router, strict=True):
            best = torch.topk(scores, 2).indices
            share = torch.softmax(scores[best], 0)
            answer = 0
            for expert, factor in zip(best, share, strict=True):
                hidden = fc1[expert] @ token + fc1_bias[expert]
                gate, value = hidden[::2].clamp(max=2.0), hidden[1::2].clamp(-2.0, 2.0)
                hidden = gate * torch.sigmoid(1.75 * gate) * (value + 1)
                answer = answer + factor * (fc2[expert] @ hidden + fc2_bias[expert])
            rows.append(answer)
        return (torch.stack(rows),)

    attributes = GPT_OSS | {"activation_alpha": 1.75}
    compare(reference, "MoE", floats(fused=2), ("y",), attributes, domain=DOMAIN, opset=20, symbolic=(False,))


@pytest.mark.parametrize(
    ("op", "given", "attributes", "why"),
    [
        ("MoE", floats(), {"use_sparse_mixer": 1}, "sparse mixer"),
        ("MoE", floats(), {"activation_type": "relu2"}, "'relu2' is not supported"),
        ("MoE", floats() | {"fc3": normal(EXPERTS, INNER, SIZE)}, {}, "does not compute its form of gate"),
        ("MoE", floats(fused=2), GPT_OSS | {"swiglu_fusion": 2}, "does not compute its form of gate"),
        ("MoE", floats(fused=2), GPT_OSS | {"swiglu_limit_after_activation": 1}, "does not compute its form of gate"),
        ("QMoE", quantized(4, 16, False), {"quant_type": "fp4"}, "'fp4'"),
        ("QMoE", quantized(4, 16, False), {"weights_prepacked": 1}, "prepacked"),
        ("QMoE", quantized(4, 16, False), {"expert_weight_bits": 3}, "3 bits"),
    ],
)
def test_refusals(op, given, attributes, why):
    model, _ = one_node(op, given, ("y",), attributes, domain=DOMAIN, opset=21)
    graph = Graph(model)
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    assert [node.op_type for node in graph.nodes] == [op] and why in graph.unexpanded["node"]


ROUTERS = [
    ((3, 8), {"top_k": 2}), ((2, 3, 8), {"top_k": 3, "n_group": 4, "topk_group": 2}),
    ((5, 8), {"top_k": 2, "n_group": 2, "topk_group": 1, "group_topk": 3, "router_sentinel": -50.0}),
    ((5, 8), {"top_k": 1, "n_group": 8, "topk_group": 4}),
]  # fmt: skip


@SINCE_1_32
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("shape", "attributes"), ROUTERS)
def test_group_router(shape, attributes, symbolic):
    feeds = {"logits": 2 * normal(*shape), "bias": 0.1 * normal(8)}
    given = {"floats": FLOATS[:1], "symbolic": symbolic, "fixed": ("bias",)}
    values_are_the_kernels("MoEGroupRouter", feeds, ("y",), attributes, **given)
    check("MoEGroupRouter", feeds, ("y",), attributes | {"router_sentinel": -3.0}, **given)  # 10,000 hides differences


@SINCE_1_32
@pytest.mark.parametrize("projected", [False, True])
def test_group_router_that_leaves_the_choice(projected):
    feeds = {
        "logits": 0.3 * normal(3, 256 if projected else 8), "bias": normal(8),
        "projection": 0.1 * normal(8, 256) if projected else None,
    }  # fmt: skip
    check("MoEGroupRouter", feeds, ("", "biased", "scores"), {"top_k": 2}, floats=FLOATS[:1])
