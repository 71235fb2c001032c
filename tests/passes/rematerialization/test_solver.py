"""The solver's plans beside all plans that there are, and beside the heuristic's."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from onnxgrad_cli.cost.facts import Facts
from onnxgrad_cli.cost.training_cost import cost
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.passes.rematerialization import solver
from onnxgrad_cli.passes.rematerialization.dataflow import Dataflow
from onnxgrad_cli.passes.rematerialization.plan import Plan, flops_of, plan_budget, size_of
from onnxgrad_cli.passes.rematerialization.solver import plan_optimal
from tests.passes.rematerialization.test_plan import CHAIN, DIAMOND, PRICES, differentiated
from tests.passes.rematerialization.test_rewrite import BATCH, blocks, data, exported, made, ran

pytest.importorskip("scipy", reason="the solver is scipy's")

PROGRAMS = [DIAMOND, CHAIN, PRICES]


def fewest_by_hand(flow: Dataflow, facts: Facts, allowed: int) -> float:
    """Of all sets of values the one that may be stored and from which the rest takes the fewest kernels."""
    plan, best = Plan(flow), float("inf")
    roots = list(dict.fromkeys(flow.storage(n) for n in flow.producers if not flow.is_resident(flow.storage(n))))
    for kept in itertools.product([False, True], repeat=len(roots)):
        plan.stored = {root for root, stays in zip(roots, kept, strict=True) if stays}
        if not plan.must_store <= plan.stored or sum(size_of(root, facts) for root in plan.stored) > allowed:
            continue
        found = plan.recomputation(plan.recomputed)
        if found is not None:
            best = min(best, flops_of(found, facts) + len(found.nodes))
    return best


@pytest.mark.parametrize("nodes", PROGRAMS)
@pytest.mark.parametrize("saved", [1, 32, 64, 97])
def test_no_plan_takes_fewer_operations(nodes: str, saved: int) -> None:
    built, flow = differentiated(nodes)
    facts, total = Facts(built.graph, {}), cost(built.graph, built.training).kept_bytes
    everything = sum(size_of(root, facts) for root in Plan(flow).groups)
    fewest = fewest_by_hand(flow, facts, everything - saved)
    heuristic = plan_budget(flow, total - saved, facts, total)
    plan = plan_optimal(heuristic, total - saved, facts, total)
    found = plan.recomputation(plan.recomputed)
    assert found is not None
    if fewest < float("inf"):
        assert sum(size_of(root, facts) for root in plan.stored) <= everything - saved
        assert flops_of(found, facts) <= fewest


def test_as_little_is_kept_as_can_be_where_the_budget_is_too_small() -> None:
    built, flow = differentiated(PRICES)
    facts, total = Facts(built.graph, {}), cost(built.graph, built.training).kept_bytes
    heuristic = plan_budget(flow, 0, facts, total)
    plan = plan_optimal(heuristic, 0, facts, total)
    assert sum(size_of(root, facts) for root in plan.stored) <= sum(size_of(r, facts) for r in heuristic.stored)


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.thinned(2)
def test_gradients_are_the_same(share: float) -> None:
    model, feeds = exported(blocks(3)), data()
    plain = made(model, dims={"batch": BATCH})
    kept = int(share * cost(plain.graph, plain.training, {"batch": BATCH}).kept_bytes)
    again, greedy = (made(model, f"{kind}:{kept}", dims={"batch": BATCH}) for kind in ("optimal", "budget"))
    done, other = again.training.recomputed, greedy.training.recomputed
    assert done is not None and other is not None
    assert done.nodes > 0
    assert done.kept <= kept or done.kept <= other.kept
    assert done.flops <= other.flops or other.kept > kept
    for one, same in zip(ran(plain, feeds), ran(again, feeds), strict=True):
        np.testing.assert_allclose(same, one, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(one).max()))


def test_where_the_solver_finds_nothing_the_heuristic_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    built, flow = differentiated(PRICES)
    facts, total = Facts(built.graph, {}), cost(built.graph, built.training).kept_bytes
    heuristic = plan_budget(flow, total - 64, facts, total)
    monkeypatch.setattr(solver.IntegerProgram, "solved", lambda *_: None)
    assert plan_optimal(heuristic, total - 64, facts, total) is heuristic


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UsageError, match="requires the package scipy") as error:
        made(exported(blocks(1)), "optimal:1kB")
    assert "pip install 'scipy>=1.13'" in (error.value.hint or "")


@pytest.mark.filterwarnings("error")
def test_the_solver_knows_its_options() -> None:
    program = solver.IntegerProgram()
    first, second = program.unknown(1.0), program.unknown(2.0)
    found = program.solved([({first: 1.0, second: 1.0}, 1.0)], np.array(program.cost))
    assert found is not None and found.tolist() == [True, False]
