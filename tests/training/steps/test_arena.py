"""The memory of runs, played through, beside what onnxruntime says of its own."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.cost.facts import known_sizes
from onnxgrad_cli.cost.steps import steps_of
from onnxgrad_cli.training.steps.arena import FIRST_REGION, PAGE, Arena, after_runs
from tests.training.steps.test_step_memory import perceptron


def test_what_lies_free_is_taken_anew_and_joined() -> None:
    arena = Arena()
    first, second = arena.take(300), arena.take(5000)
    assert second - first == 512  # multiples of 256
    assert arena.touched == 2 * PAGE
    arena.give_back(first)
    assert arena.take(512) == first
    arena.give_back(first)
    arena.give_back(second)
    assert arena.take(FIRST_REGION) == first  # all of it is one again
    assert arena.touched == FIRST_REGION


def test_the_least_that_is_large_enough_is_taken_and_cut_only_where_half_would_be_lost() -> None:
    arena = Arena()
    large, _, small, _ = arena.take(4096), arena.take(256), arena.take(1024), arena.take(256)
    arena.give_back(large)
    arena.give_back(small)
    assert arena.take(768) == small
    assert arena.take(256) == large
    assert arena.take(256) == large + 256
    arena.give_back(small)
    assert arena.take(1024) == small  # it was never cut


@pytest.mark.parametrize("batch", [80, 150, 400, 1024, 1500, 3000])
def test_runs_take_the_regions_that_onnxruntime_takes(batch: int, tmp_path: Path) -> None:
    """Its profile tells the bytes of its regions after each node, and the loss and constants beside them."""
    built = build(perceptron(128, 6), Options(losses=(LossSpec("mse"),)))
    label = next(iter(built.training.labels))
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    options.enable_mem_pattern, options.log_severity_level = False, 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(built.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {name: np.zeros((batch, 128), np.float32) for name in ("x", label)})
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event for event in events if event["name"].endswith("_kernel_time")]
    held = max(int(node["args"]["mem_arena_held"]) for node in nodes)
    order = {event["name"].removesuffix("_kernel_time"): at for at, event in enumerate(nodes)}
    steps = sorted(steps_of(built.graph.nodes, repeat("")), key=lambda step: order.get(step.node.name, -1))
    arena = after_runs(steps, built.graph.output_names, known_sizes(built.graph, {"batch": batch})[2])
    assert 0 <= held - arena.size < 1000
