"""What is stored and what is recomputed, in programs that are small enough to be planned by hand.

Every value has 8 elements in float32, 32 bytes, but where a program says otherwise; an operator of one element counts
one operation. The difference of prediction and label, `Sub_out` of the loss, is always stored: it is read at once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from itertools import pairwise

import pytest
from onnx import TensorProto, parser

from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.training_cost import cost
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.rematerialization.dataflow import LONGEST_CHAIN, Dataflow
from onnxgrad_cli.passes.rematerialization.plan import (
    Plan,
    Recomputation,
    flops_of,
    plan_blocks,
    plan_budget,
    plan_elementwise,
    size_of,
    trade,
)

DIFFERENCE = "loss/mse/Sub_out"


def differentiated(nodes: str, boundaries: Collection[str] = ()) -> tuple[TrainingModel, Dataflow]:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        small (float[2, 4] x) => (float[] y)
        <float[4] w = {{1, -2, 3, 0.5}}, float[8] v = {{1, -2, 3, 0.5, 4, 2, 1, -1}},
         float[16] u = {{1, 2, 3, 4, -2, 6, 7, 8, 1, 0.25, 3, 4, 5, 0.5, 7, 8}}, int64[1] flat = {{8}},
         int64[2] halves = {{2, 2}}> {{ {nodes} }}
    """)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    built = TrainingModel(Graph(model), Options(recompute=RecomputeSpec("elementwise")))
    built.run(stop_after="backward")
    return built, Dataflow(built.graph, built.training, boundaries, LONGEST_CHAIN)


def budget(built: TrainingModel, flow: Dataflow, saved: int) -> Plan:
    """The plan that keeps `saved` bytes less than are kept without."""
    total = cost(built.graph, built.training).kept_bytes
    return plan_budget(flow, max(total - saved, 0), Facts(built.graph, {}), total)


def made(recomputation: Recomputation | None) -> list[str]:
    """What the nodes that run again make, each as often as it runs."""
    assert recomputation is not None
    return sorted(name for node in recomputation.nodes for name in node.output)


def calls_of(count: int) -> int:
    """The calls that the planning of a chain of views makes."""
    chain = "".join(f"v{i + 1} = Identity(v{i}) " for i in range(count))
    _, flow = differentiated(f"v0 = Mul(x, w) {chain} y = Exp(v{count})")
    calls = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        plan_elementwise(flow)
    finally:
        sys.setprofile(before)
    return calls


def test_views_of_views_are_planned_in_linear_time() -> None:
    assert calls_of(200) < 2.5 * calls_of(100)


DIAMOND = "h = Mul(x, w) a = Sin(h) b = Add(a, h) c = Add(a, b) d = Sub(c, b) y = Exp(d)"


def test_a_recomputation_runs_each_node_once_from_what_is_stored() -> None:
    plan = Plan(differentiated(DIAMOND)[1])
    assert plan.stored == {"h", "y", DIFFERENCE}
    whole = plan.recomputation(["y"])
    assert whole is not None
    assert made(whole) == list("abcdy")
    assert whole.operands == {"h"}


def test_a_recomputation_goes_on_from_what_is_recomputed_already() -> None:
    plan = Plan(differentiated(DIAMOND)[1])
    assert made(plan.recomputation(["y"], recomputed={"b"})) == list("acdy")
    assert made(plan.recomputation(["y"], recomputed=set("abcd"))) == ["y"]


def test_a_value_that_is_read_twice_at_every_step_is_looked_at_once() -> None:
    """There are 2^28 ways through this program."""
    steps = " ".join(f"a{i + 1} = Add(a{i}, a{i})" for i in range(28))
    plan = Plan(differentiated(f"a0 = Mul(x, w) {steps} y = Exp(a28)")[1])
    assert len(made(plan.recomputation(["y"]))) == 30


def test_where_the_backward_part_needs_a_value_and_what_shows_that_it_has_come_there() -> None:
    """The cosine of h reads no cotangent: h is needed where the gradient of h is made of it."""
    flow = differentiated("h = Mul(x, w) a = Sin(h) r = Reshape(a, flat) c = Mul(r, v) y = Exp(c)")[1]
    at = flow.made_at()
    cosine = next(i for i, node in enumerate(flow.backward) if node.op_type == "Cos")
    first = at["grad/loss/mse/Mul/Mul_out"]
    assert flow.first_use == {"h": at["h_grad"], "r": at["v_grad"], "y": at["c_grad"], DIFFERENCE: first}
    assert flow.must_store == {DIFFERENCE}, "until it is read, all that the seed gives may be computed in advance"
    assert [i for i, use in enumerate(flow.node_use) if use != i] == [cosine]
    assert flow.node_use[cosine] == at["h_grad"]
    assert flow.control_values(at["h_grad"], at["h_grad"]) == ["a_grad"], "what is read"
    assert flow.control_values(at["v_grad"], at["h_grad"]) == ["v_grad", "a_grad"], "and gradients that were made"
    assert flow.control_values(at["v_grad"] + 1, cosine) == ["a_grad"], "where nothing is read, what was made last"
    assert flow.control_values(0, cosine) == ["v_grad"]
    assert flow.control_values(cosine, cosine) == flow.control_values(0, first) == [], "folded: shows nothing"


CHAIN = "h = Mul(x, w) a = Sin(h) b = Tanh(a) c = Add(b, w) e = Exp(c) y = Cos(e)"


@pytest.mark.parametrize(
    ("nodes", "boundaries", "stored"),
    [
        (CHAIN, ["b"], ["b"]),
        (CHAIN, ["Tanh_b"], ["b"]),
        (CHAIN, ["e"], ["e"]),
        ("s = Mul(x, w) b = Sin(s) f = Add(b, s) e = Exp(f) y = Cos(e)", ["b"], ["b", "s"]),
        ("h = Mul(x, w) p, q = Split<axis = 1>(h, halves) t = Sin(q) y = Add(p, t)", ["p"], ["h", "p"]),
    ],
    ids=["by value", "by node", "the last", "what skips a boundary", "the other output of a boundary"],
)
def test_blocks(nodes: str, boundaries: Iterable[str], stored: Iterable[str]) -> None:
    flow = differentiated(nodes, boundaries)[1]
    assert plan_blocks(flow, boundaries).stored == {*stored, DIFFERENCE}


PRICES = """
    h = Mul(x, w) s = Sin(h) r = Reshape(s, flat) m = Mul(r, v) c = Concat<axis = 0>(m, m) y = Mul(c, u)
"""
"""Of h and of s, which is read as its view r, 8 operations free 32 bytes; of c, 8 operations (those of m) free 64."""


@pytest.mark.parametrize(
    ("saved", "recomputed"), [(0, []), (1, ["c"]), (64, ["c"]), (65, ["h", "c"]), (97, ["h", "r", "c"])]
)
def test_a_budget_buys_what_is_cheap_for_a_byte_first_and_no_more_than_it_needs(
    saved: int, recomputed: list[str]
) -> None:
    assert budget(*differentiated(PRICES), saved).recomputed == recomputed


def test_what_a_budget_has_recomputed_from_another_segment_stays_stored() -> None:
    """Of e 16 operations free 32 bytes, of a 32: e comes first, and reads a."""
    nodes = "h = Mul(x, w) i = Add(h, w) j = Add(i, w) a = Exp(j) b = Sin(a) y = Exp(b)"
    assert budget(*differentiated(nodes), 10**6).stored == {DIFFERENCE}
    assert budget(*differentiated(nodes, ["b"]), 10**6).stored == {"a", DIFFERENCE}


def test_a_budget_leaves_alone_what_has_no_known_size_or_price() -> None:
    """What an operator takes, the sizes of its operands tell: n is computed from t, and e from i."""
    nodes = "h = Mul(x, w) t = Transpose(h) n = Neg(t) i = Add(n, n) e = Mul(i, n) y = Mul(t, e)"
    built, flow = differentiated(nodes)
    assert budget(built, flow, 10**6).stored == {DIFFERENCE}
    built.graph.types["t"] = tensor_type(TensorProto.FLOAT, None)
    assert budget(built, flow, 10**6).stored == {"n", "t", DIFFERENCE}
    built, flow = differentiated(nodes)
    built.graph.types["i"] = tensor_type(TensorProto.FLOAT, None)
    assert budget(built, flow, 10**6).stored == {"e", "i", DIFFERENCE}


def test_what_memory_costs() -> None:
    """Each offer is what the plan of that budget stores and adds, in operations of one element each."""
    built, flow = differentiated("a = Mul(x, w) b = Tanh(a) c = Exp(b) d = Mul(c, b) y = Sin(d)")
    total, facts = cost(built.graph, built.training).kept_bytes, Facts(built.graph, {})
    offers = trade(flow, facts, total)
    assert offers[0] == (total, 0.0) and len(offers) > 2
    for (more, less), (kept, flops) in pairwise(offers):
        assert kept < more and flops > less
    for kept, flops in offers:
        plan = plan_budget(flow, kept, facts, total)
        assert total - kept == sum(size_of(root, facts) for root in plan.groups.keys() - plan.stored)
        again = plan.recomputation(plan.recomputed)
        assert again is not None and flops_of(again, facts) == flops
