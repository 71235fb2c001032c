"""What the backward pass has written does not stay in memory beside the model."""

from __future__ import annotations

import gc
from pathlib import Path

from benchmarks.models.files import chain
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.emission.values import Val


def test_values_of_the_backward_part_are_gone_after_it_without_a_search_for_cycles(tmp_path: Path) -> None:
    def values() -> int:
        return sum(type(thing) is Val for thing in gc.get_objects())

    path = chain(100, tmp_path / "chain.onnx")
    gc.collect()
    gc.disable()
    try:
        before = values()
        made = build(path, Options(losses=(LossSpec("mse"),)))
        left = values() - before
    finally:
        gc.enable()
    assert len(made.graph.nodes) > 300
    assert left < 60
