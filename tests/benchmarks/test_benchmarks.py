"""What the benchmarks are made of works: networks, systems in processes of their own, profile, page and chart.

None of these tests looks at a time: they keep the names and the protocol from rotting between two measurements.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest

pytest.importorskip("torch", reason="the benchmarks' networks are PyTorch modules")

from benchmarks import chart, loop, models, profile, results, train_step
from benchmarks.interleaved import PATIENCE, Refused, Worker, rest
from benchmarks.workloads import KINDS, ROWS, Kind, Row, chosen
from onnxgrad_cli.execution.interleaved_timing import rounds

LENET = chosen(["lenet"])[0]
ERRATIC = """
from benchmarks.interleaved import serve
class Step:
    def step(self): raise ValueError("no such kernel")
serve(Step)
"""


def test_rows_are_found_by_their_network_and_by_parts_of_their_names() -> None:
    assert [row.net for row in chosen(["lenet"])] == ["lenet"]  # and not MobileNet
    assert [row.net for row in chosen(["resnet", "gru"])] == ["resnet18", "resnet50", "gru"]
    assert [row.name for row in chosen(["mlp"])] == [row.name for row in chosen(["MLP"])]
    assert chosen(None) == list(ROWS)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.net)
def test_every_network_trains(row: Row, tmp_path: Path) -> None:
    path = row.training_model(row.export(tmp_path), "gradients")
    model = onnx.load(path, load_external_data=False)
    taken = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    for name, array in row.batch().items():
        sizes = [axis.dim_value or size for axis, size in zip(taken[name], array.shape, strict=True)]
        assert sizes == list(array.shape)
    weights = sum(1 for value in model.graph.output if value.name.endswith("_grad"))
    assert weights == sum(1 for _ in row.module().parameters())


def test_a_network_has_the_same_weights_in_every_process() -> None:
    first, second = (models.lenet().state_dict() for _ in range(2))
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
@pytest.mark.long
def test_a_comparison_with_pytorch(kind: Kind, tmp_path: Path) -> None:
    row = train_step.compare(LENET, kind, 1, 2, ["torch"], tmp_path)
    names = {results.OURS, results.TORCH, *([results.FUSED] if kind == "adamw" else [])}
    assert row["systems"].keys() == names
    for found in row["systems"].values():
        assert len(found["seconds"]) == 2 and min(found["seconds"]) > 0
        assert found["megabytes"]["all"] >= found["megabytes"]["steps"] > 0
    assert LENET.name in results.line(row)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_with_the_older_runtime(kind: Kind, tmp_path: Path) -> None:
    row = train_step.compare(LENET, kind, 1, 1, ["older"], tmp_path)
    found = row["systems"][results.OLDER]
    if "installed" in found.get("refused", "") or "Python 3.11" in found.get("refused", ""):
        pytest.skip(found["refused"])
    assert found["seconds"]


class Fake:
    """A system that has taken its first steps."""

    def __init__(self, losses: list[float], norm: float | None) -> None:
        self.losses, self.norm = losses, norm


@pytest.mark.parametrize(("losses", "norm"), [([2.3, 2.1], 1.01), ([2.31, 2.1], 1.0), ([2.3, 2.2], None)])
def test_systems_that_compute_something_else_end_the_run(losses: list[float], norm: float | None) -> None:
    workers: dict[str, Any] = {"ours": Fake([2.3, 2.1], 1.0), "theirs": Fake(losses, norm)}
    with pytest.raises(AssertionError, match="theirs"):
        train_step.agree("net", workers)
    workers["theirs"] = Fake([2.3001, 2.1005], 1.0005)
    train_step.agree("net", workers)


def test_a_system_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="ValueError: no such kernel"):
        Worker([sys.executable, "-c", ERRATIC], tmp_path)
    with pytest.raises(Refused, match="SyntaxError"):
        Worker([sys.executable, "-c", "import"], tmp_path)


def taken(repeat: int, **more: Any) -> tuple[list[str], dict[str, Any]]:
    """The rounds of three systems, each as a word; and what `rounds` returns where the n-th turn takes n seconds."""
    turns: list[str] = []

    def block(name: str) -> float:
        turns.append(name)
        return len(turns)

    found = rounds({name: partial(block, name) for name in "abc"}, repeat, **more)
    return ["".join(turns[i : i + 3]) for i in range(0, len(turns), 3)], dict(found)


def test_a_turn_ends_when_the_process_rests() -> None:
    spinning = threading.Event()

    def spin() -> None:
        while not spinning.wait(0.0):
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    threading.Timer(0.2, spinning.set).start()
    start = time.monotonic()
    rest()
    assert spinning.is_set() and not thread.is_alive()
    assert 0.2 < time.monotonic() - start < PATIENCE


def test_a_profile_tells_parts_operators_and_nodes(tmp_path: Path) -> None:
    model = LENET.training_model(LENET.export(tmp_path), "adamw")
    usual, nodes = profile.profile(model, LENET.batch(), 1, tmp_path)
    assert {node.part for node in nodes} == {"forward", "backward", "optimizer"}
    assert {"Gemm", "MaxPool"} <= {node.op for node in nodes}
    shown = "\n".join(profile.show(usual, nodes))
    assert "64x1x28x28 6x1x5x5 6 -> 64x6x28x28" in shown


def test_the_profile_counts_what_is_inside_a_body_apart() -> None:
    def event(name: str, start: int, duration: int) -> dict[str, Any]:
        args = {"op_name": name, "input_type_shape": [{"float": [2, 3]}], "output_type_shape": [{"float": []}]}
        return {"cat": "Node", "name": f"{name}_kernel_time", "ts": start, "dur": duration, "args": args}

    runs = range(profile.EARLY + profile.STEPS)
    events = [e for i in runs for e in (event("Scan", 100 * i, 50), event("Add", 100 * i + 10, 20))]
    scan, add = profile._nodes(events)
    assert (scan.milliseconds, scan.inner, add.milliseconds, add.inner) == (0.05, False, 0.02, True)
    assert (scan.inputs, scan.outputs) == ("2x3", "scalar")
    assert "its 2 nodes 0.05 ms" in next(profile.show(0.05, [scan, add]))


def measured() -> Iterator[dict[str, Any]]:
    """Rows as they are measured, with simple numbers."""

    def took(*seconds: float) -> dict[str, Any]:
        return {"seconds": list(seconds), "megabytes": {"all": 10 * seconds[0], "steps": 1.0}}

    systems = {results.OURS: took(1.0, 2.0, 3.0), results.TORCH: took(2.0, 4.0, 6.0)}
    row = {"name": "net <1>", "net": "net", "threads": 2}
    yield {**row, "kind": "gradients", "systems": {**systems, results.OLDER: took(1.0, 1.0, 1.0)}}
    refused = {results.FUSED: took(4.0, 1.0, 1.0), results.OLDER: {"refused": "no gradient for Foo"}}
    yield {**row, "kind": "adamw", "systems": {**systems, **refused}}


def test_ratios_are_to_the_faster_of_pytorchs_optimizers() -> None:
    plain, adamw = measured()
    assert (results.faster(plain), results.faster(adamw)) == (results.TORCH, results.FUSED)
    assert results.ratio(plain, results.TORCH) == results.Ratio(0.5, 0.5, 0.5, 0.5)
    assert results.ratio(adamw, results.FUSED) == results.Ratio(2.0, 1.125, 2.5, 1.0)
    assert results.ratio(adamw, results.OLDER) is None


def test_the_page_and_the_chart() -> None:
    rows = list(measured())
    text = "\n".join(results.page({"processor": "P", "cores": "2"}, rows))
    assert "Measured on: processor P, cores 2." in text and "They take turns, in 3 rounds" in text
    assert "| net <1> | 2 | 2000.00 | 4000.00 | 0.50 [0.50-0.50] 0.50 | 1000.00 | 2.00 [1.50-2.50] 1.00 |" in text
    assert "- net <1>: `no gradient for Foo`" in text
    marks = list(results.marks(rows))
    assert [(mark.series, mark.value) for mark in marks] == [
        ("PyTorch", 0.5), ("1.19.2", 2.0), ("PyTorch, with AdamW", 2.0)
    ]  # fmt: skip
    drawn = ElementTree.fromstring(chart.svg(marks, "ours / theirs"))
    assert len(drawn.findall(".//{*}circle")) == 2 * len(marks)


def test_other_runtimes_have_a_table_of_their_own() -> None:
    assert not list(results.others(list(measured())))
    plain, _ = measured()
    beside = {results.OPENVINO: {"seconds": [4.0, 8.0, 12.0]}, results.PROVIDER: {"refused": "Foo"}}
    table = list(results.others([{**plain, "systems": {**plain["systems"], **beside}}]))
    assert table[-1] == "| net <1> |  | 0.25 [0.25-0.25] 0.25 | refused | 0.50 [0.50-0.50] 0.50 |"


def test_the_figures_name_the_machine() -> None:
    assert {"processor", "cores", "memory", "onnxruntime"} <= results.machine().keys()


def test_what_the_loop_adds(tmp_path: Path) -> None:
    found = loop.overhead(1, tmp_path)
    assert found.keys() == {"bare", "step", "loop"} and min(found.values()) > 0
