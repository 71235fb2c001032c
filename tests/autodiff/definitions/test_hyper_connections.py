"""Layers with several residual streams beside onnxruntime's kernels and central differences."""

import numpy as np
import pytest

from tests.autodiff.definitions.test_contrib import FLOATS, check, normal, values_are_the_kernels

FORMS = {"grouped": (2, 3, 4, 5), "flattened": (2, 3, 20)}
BRANCHES = {"grouped": {}, "flattened": {"num_branches": 4}}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("gates", [(4,), (4, 1), (4, 5), (20,)])
@pytest.mark.parametrize("form", FORMS)
def test_pre_mix(form, gates, symbolic):
    if gates == (20,) and form == "grouped":
        pytest.skip("flattened gates are for flattened streams")
    attributes = BRANCHES[form] | ({"reduction_scale": 0.3} if gates == (4,) else {})
    feeds = {"x": normal(*FORMS[form]), "gates": normal(2, 3, *gates)}
    check("HyperConnectionPreMix", feeds, ("y",), attributes, symbolic=symbolic, fixed=("gates",))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("mix", [False, True])
@pytest.mark.parametrize("gates", [(4,), (4, 1), (4, 5)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.thinned(3)
def test_post_mix(form, gates, mix, symbolic):
    feeds = {
        "x": normal(*FORMS[form]), "block": normal(2, 3, 5), "gates": normal(2, 3, *gates),
        "mix": normal(2, 3, 4, 4) if mix else None,
    }  # fmt: skip
    check("HyperConnectionPostMix", feeds, ("y",), BRANCHES[form], symbolic=symbolic, fixed=("gates",))


@pytest.mark.parametrize("scale", [None, (20,), (4, 5), (5,)])
@pytest.mark.parametrize("form", FORMS)
def test_branchwise_rms_norm(form, scale):
    feeds = {"x": normal(*FORMS[form]), "scale": None if scale is None else normal(*scale)}
    attributes = BRANCHES[form] | ({"epsilon": 0.1} if scale == (5,) else {})
    check("BranchwiseRMSNorm", feeds, ("y",), attributes)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_engram_gate(normed, symbolic):
    feeds = {
        "key": normal(2, 3, 4, 6), "query": 0.5 + normal(2, 3, 4, 6), "value": normal(2, 3, 6),
        "key_scale": normal(4, 6), "query_scale": normal(4, 6), "conv_scale": normal(4, 6) if normed else None,
    }  # fmt: skip
    check("EngramGate", feeds, ("y", "normed") if normed else ("y",), {"epsilon": 0.01} if normed else {},
          symbolic=symbolic)  # fmt: skip


@pytest.mark.parametrize("form", [{}, {"alpha": 1.7}, "scale"])
def test_scaled_silu(form):
    feeds = {"x": 2 * normal(3, 4), "scale": np.array(1.3) if form == "scale" else None}
    check("ScaledSiLU", feeds, ("y",), {} if form == "scale" else form, floats=FLOATS)


@pytest.mark.parametrize(("first", "second"), [(np.float16, np.float32), (np.float32, np.float16)])
def test_gates_and_scales_of_another_type(first, second):
    """Computed in float32, and rounded where the kernel rounds."""
    x, block = normal(2, 3, 4, 5).astype(first), normal(2, 3, 5).astype(first)
    gates, mix = normal(2, 3, 4).astype(second), normal(2, 3, 4, 4).astype(second)
    for op, feeds in {
        "HyperConnectionPreMix": {"x": x, "gates": gates},
        "HyperConnectionPostMix": {"x": x, "block": block, "gates": gates, "mix": mix},
        "BranchwiseRMSNorm": {"x": x, "scale": normal(4, 5).astype(second)},
        "ScaledSiLU": {"x": x, "scale": np.array(1.3, second)},
    }.items():
        values_are_the_kernels(op, feeds, ("y",), {}, floats=[first])
