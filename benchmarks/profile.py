"""Where the time of a step goes: by part, by operator, and by the nodes that take most of it.

onnxruntime's own profile of some steps, summed up. Nodes are those that it runs, after its optimizations; what a
`Trainer` updates with numpy is none of them, but part of a step's time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime

from benchmarks.systems.ours import open_step
from benchmarks.workloads import Kind, Row
from onnxgrad_cli.execution.interleaved_timing import block

KERNEL = "_kernel_time"

LEAST = 0.001
"""The share of the time that a line is worth."""

EARLY, STEPS, TOP = 2, 10, 15
"""Steps that are left out, steps of which the profile is the mean, and lines of nodes that are alike."""


@dataclass(frozen=True)
class Node:
    """What one node took: milliseconds a step, and its shapes; `inner`: it is in the body of another one."""

    name: str
    op: str
    milliseconds: float
    inputs: str
    outputs: str
    inner: bool

    @property
    def part(self) -> str:
        """Of the step."""
        first = self.name.split("/")[0]
        part = {"grad": "backward", "optimizer": "optimizer"}.get(first, "forward")
        return f"{part}, inside bodies" if self.inner else part


def profile(path: Path, batch: dict[str, np.ndarray], threads: int, folder: Path) -> tuple[float, list[Node]]:
    """The milliseconds of a step without the profiler, and what its nodes take.

    Args:
        path: the training model.
        batch: what it is fed.
        threads: of the session.
        folder: where the profile is written.
    """
    bare = open_step(path, batch, threads)
    usual = min(block(bare.step) for _ in range(3)) * 1e3
    del bare
    with patch.object(onnxruntime, "SessionOptions", _profiled(folder)):
        system = open_step(path, batch, threads)
    for _ in range(EARLY + STEPS):
        system.step()
    files = [Path(session.end_profiling()) for session in system.sessions]
    nodes = [node for file in files for node in _nodes(json.loads(file.read_text()))]
    return usual, sorted(nodes, key=lambda node: -node.milliseconds)


def _profiled(folder: Path) -> Callable[[], Any]:
    make = onnxruntime.SessionOptions

    def options() -> Any:
        made = make()
        made.enable_profiling = True
        made.profile_file_prefix = str(folder / "profile")
        return made

    return options


def _nodes(events: Sequence[dict[str, Any]]) -> list[Node]:
    """The nodes of a session; the early steps are left out."""
    runs: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    end = 0
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(KERNEL)]
    for event in sorted(kernels, key=lambda event: (event["ts"], -event["dur"])):
        inner = event["ts"] + event["dur"] <= end
        end = max(end, event["ts"] + event["dur"])
        runs[event["name"].removesuffix(KERNEL), inner].append(event)
    found = []
    for (name, inner), each in runs.items():
        steps = each[EARLY * len(each) // (EARLY + STEPS) :]
        shapes = [_shapes(each[-1]["args"].get(f"{side}_type_shape", [])) for side in ("input", "output")]
        spent = sum(event["dur"] for event in steps) / STEPS / 1e3
        found.append(Node(name, each[0]["args"]["op_name"], spent, shapes[0], shapes[1], inner))
    return found


def _shapes(types: Sequence[dict[str, list[int]]]) -> str:
    return " ".join("x".join(map(str, dims)) or "scalar" for value in types for dims in value.values())


def show(usual: float, nodes: Sequence[Node]) -> Iterator[str]:
    """The lines of the tables."""
    total = sum(node.milliseconds for node in nodes if not node.inner)
    yield f"a step takes {usual:.2f} ms; its {len(nodes)} nodes {total:.2f} ms with the profiler on, bodies' own aside"
    for title, key in (("part", "part"), ("operator", "op")):
        yield f"\n{title:28} {'ms':>9} {'share':>6} {'nodes':>6}"
        groups: dict[str, list[float]] = defaultdict(list)
        for node in nodes:
            groups[getattr(node, key)].append(node.milliseconds)
        for name, times in sorted(groups.items(), key=lambda item: -sum(item[1])):
            if sum(times) < LEAST * total:
                break
            yield f"{name:28} {sum(times):9.3f} {sum(times) / total:6.1%} {len(times):6}"
    yield f"\n{'ms':>9} {'share':>6} {'nodes':>5} {'operator':20} inputs -> outputs; the longest of these nodes"
    for alike in _alike(nodes)[:TOP]:
        spent, node = sum(node.milliseconds for node in alike), alike[0]
        shapes = f"{node.inputs} -> {node.outputs}; {node.name}"
        yield f"{spent:9.3f} {spent / total:6.1%} {len(alike):5} {node.op:20} {shapes}"


def _alike(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes of one operator, part and shape together, those first that take longest."""
    groups: dict[tuple[str, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        groups[node.part, node.op, node.inputs, node.outputs].append(node)
    return sorted(groups.values(), key=lambda group: -sum(node.milliseconds for node in group))


def main(row: Row, kind: Kind, threads: int, folder: Path) -> None:
    """Print the profile of a row's step."""
    model = row.training_model(row.export(folder), kind)
    print(f"{row.name}, {kind}, {threads} threads:", *show(*profile(model, row.batch(), threads, folder)), sep="\n")
