"""Runs that nobody asked for have limits of time and memory, also if several processes run."""

from __future__ import annotations

import math
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxgrad_cli import build
from onnxgrad_cli.execution import limits
from onnxgrad_cli.jobs.build import run_build
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification import feeds
from onnxgrad_cli.verification.feeds import DescribedModel, random_feeds
from tests.cli.test_hostile_files import mlp, nested
from tests.cli_harness import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def endless() -> ModelProto:
    """A model with a loop of 2^62 iterations."""
    model = nested(1)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(2**62), "three"))
    return model


def unforeseen() -> ModelProto:
    """A model with such a loop, whose iterations are known only when it runs."""
    model = endless()
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    made = onnx.parser.parse_graph("""g (float[n, 4] x) => (int64[1, 1] rounds)
        <float zero = {0}> { least = ReduceMin(x) none = Mul(least, zero) whole = Cast<to = 7>(none)
        rounds = Add(three, whole) }""")
    model.graph.initializer.extend(made.initializer)
    loop.input[0] = "rounds"
    nodes = [*made.node, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def expanding() -> ModelProto:
    """A model of which a run takes 8 GB."""
    model = mlp()
    model.graph.output[0].name = "z"
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**30, 1, 1]), "large"))
    model.graph.node.append(helper.make_node("Expand", ["y", "large"], ["e"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["e"], ["z"], axes=[0], keepdims=0))
    return model


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a process how much it has")
@pytest.mark.parametrize(
    ("model", "what"), [(endless, "billion operations"), (unforeseen, "0.2 s"), (expanding, "4 GB of memory")]
)
def test_what_no_machine_can_run_is_not_proved(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, model: Callable[[], ModelProto], what: str
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    onnx.save(model(), shell.folder / "m.onnx")
    result = shell("build", "m.onnx", "--json")
    assert result.code == 0, result.err
    proof = result.json["proof"]
    assert proof["verdict"] == "not_proved" and what in proof["why"]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert soft == resource.RLIM_INFINITY


def test_the_runs_of_a_job_have_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are tried before the passes begin, and it is proved after them: a run of each would take all its time."""
    spent = []
    before = limits.Stopping.__call__
    monkeypatch.setattr(limits.Stopping, "__call__", lambda self: (spent.append(self), before(self)))
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    model = endless()
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 4]))  # n is on two axes
    model.graph.node.append(helper.make_node("Add", ["v2", "z"], ["sum"]))
    model.graph.output[0].name = "sum"
    onnx.save(model, tmp_path / "m.onnx")
    report = run_build(tmp_path / "m.onnx", no_report=True)
    assert len(spent) == 1 and "0.3 s" in report.verdict


def test_runs_take_their_time_from_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(names: None, feeds: dict[str, float]) -> list[float]:
        end = time.process_time() + feeds["seconds"]
        while time.process_time() < end:
            pass
        return []

    monkeypatch.setattr(limits, "SECONDS", 0.4)
    with limits.shared_budget():
        with limits.within_budget():
            limits.run_limited(run, {"seconds": 0.2})
        limits.run_limited(run, {"seconds": 0.3})  # asked for: it takes nothing from the others
        with limits.within_budget(), pytest.raises(limits.OverLimit, match=r"0\.4 s"):
            limits.run_limited(run, {"seconds": 0.9})
        with limits.within_budget(), pytest.raises(limits.OverLimit):
            limits.run_limited(run, {"seconds": 0.0})
    with limits.within_budget():
        limits.run_limited(run, {"seconds": 0.0})


def test_runs_at_the_same_time_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)

    def run(seconds: float) -> float:
        def work(names: None, feeds: dict[str, float]) -> list[float]:
            both.wait()  # for the other
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass
            return [seconds]

        return limits.run_limited(work, {})[0]

    monkeypatch.setattr(limits, "SECONDS", 0.4)
    with limits.within_budget():
        assert limits.at_once(run, [0.0, 0.1]) == [0.0, 0.1]
        with pytest.raises(limits.OverLimit, match=r"0\.4 s"):
            limits.at_once(run, [0.0, 5.0])
        with pytest.raises(limits.OverLimit):
            limits.at_once(run, [0.0, 0.0])
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert soft == resource.RLIM_INFINITY


def test_runs_of_larger_models_may_take_longer() -> None:
    patience = limits.RunBudget()
    larger = ((0, 0, 6), (4 * 10**6, 0, 8), (10**6, 0, 8), (10**6, 200, 11.5), (0, 90, 11.5), (10**12, 0, 60))
    for size, nodes, seconds in larger:
        patience.allow(size, nodes)
        assert patience.left == seconds and patience.each == 6
    patience.allow(10**12, 0, 10**9)
    assert patience.left == 90 and patience.each == 36
    patience.allow(0, 0, 10**15)
    assert patience.left == patience.each == 126


@pytest.mark.parametrize(("size", "verdict"), [(256, "proved"), (10**6, "not_proved")])
def test_what_is_proved_unasked_is_decided_by_the_work_in_it(shell: Shell, size: int, verdict: str) -> None:
    """The file is small, and each of its products takes 10^13 operations at the larger size."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 4] y)
        <float[4, 4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}>
        { h = MatMul(x, w) t = Transpose(h) square = MatMul(h, t) y = MatMul(square, h) }""")
    onnx.save(model, shell.folder / "m.onnx")
    result = shell("build", "m.onnx", "--dim", f"n={size}", "--json")
    assert result.code == 0, result.err
    proof = result.json["proof"]
    assert proof["verdict"] == verdict
    assert ("billion operations" in proof["why"]) == (verdict != "proved")


def test_a_draw_of_data_is_of_the_time_of_runs() -> None:
    with limits.shared_budget(), limits.within_budget() as patience:
        assert patience is not None
        left = patience.left
        with limits.counted():
            sum(i * i for i in range(10**6))
        assert patience.left < left - 0.01
        patience.spent = "6 s"
        with pytest.raises(limits.OverLimit), limits.counted():
            pass
    with limits.counted():
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process what it has")
def test_a_draw_of_data_is_of_the_memory_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a label that is expanded to gigabytes: 8 here, of a limit of 4."""
    model = build(mlp()).model
    described, rng = DescribedModel(model, describe(model)), np.random.default_rng(0)
    monkeypatch.setattr(feeds, "free_memory", lambda: math.inf)
    with limits.shared_budget(), limits.within_budget(), pytest.raises(limits.OverLimit, match="4 GB of memory"):
        random_feeds(described, rng, {"batch": 2**28})
    monkeypatch.setattr(feeds, "free_memory", lambda: 100.0)  # where it was asked for there is no other limit
    with pytest.raises(MemoryError):
        random_feeds(described, rng, {"batch": 2**6})
