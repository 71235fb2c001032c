"""What memory a training step takes with recomputation and without, beside PyTorch's eager mode.

    python -m benchmarks.memory [--repeat N] [--threads N] [--only NAME ...] [--json FILE]

A step is forward and backward on one batch, in float32, its gradients left where the runtime puts them. Memory is the
peak of a process that takes five steps, less that of one which only imports what it takes; the arena of onnxruntime is
on. Beside it stand what the build says is kept for the backward part and the operations that it adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.build import elsewhere, measure
from benchmarks.models import export
from benchmarks.workloads import ROWS, Draw, Row
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.passes.rematerialization.recompute import parse_recompute

OURS = """
import sys, numpy, onnxruntime
if len(sys.argv) > 1:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = int(sys.argv[3]), 3
    options.enable_mem_pattern = False
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in numpy.load(sys.argv[2]).items():
        binding.bind_cpu_input(name, array)
    for _ in range(5):
        binding.clear_binding_outputs()
        for output in session.get_outputs():
            binding.bind_output(output.name)
        session.run_with_iobinding(binding)
"""
THEIRS = """
import sys, numpy, torch
from benchmarks.memory import CASES
if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[3]))
    net = next(row for row, _ in CASES if row.net == sys.argv[1]).module().train()
    batch = {name: torch.tensor(array) for name, array in numpy.load(sys.argv[2]).items()}
    label = batch.pop("y")
    for _ in range(5):
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(*batch.values()), label).backward()
"""


class Deep(Row):
    """A deep perceptron, most of whose memory is what it keeps: 24 layers of width 512 with GELU."""

    def module(self) -> Any:
        """The network in PyTorch."""
        import torch
        from torch import nn

        torch.manual_seed(0)
        layers = [part for _ in range(24) for part in (nn.Linear(512, 512), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(512, 10))

    def export(self, folder: Path, opset: int = 18) -> Path:
        """Write the network as ONNX."""
        import torch

        return export(self.module(), (torch.randn(2, 512),), folder / "deep.onnx", ("x",), None, opset)


DEEP = Deep("deep MLP 24 x 512, batch 4,096", "deep", {"x": Draw((4096, 512))}, Draw((4096,), 10))
PLAIN, CHEAP, LAYERS = "", "elementwise", "block:auto"
BLOCKS = {
    "deep": "block:/*[159]/Mul_1_output_0",
    "bert_classifier": "block:*layers.*norm2*",
    "resnet50": "block:/*[0-9]/Add_output_0",
}
LAYERED = ("deep", "bert_classifier")
CASES = [
    (row, [PLAIN, CHEAP, *([LAYERS] if row.net in LAYERED else []), *filter(None, [BLOCKS.get(row.net)])])
    for row in (DEEP, *ROWS)
    if row.net in ("deep", "resnet50", "bert_classifier") or row.name.endswith("batch 256")
]


def peak(program: str, repeat: int, *arguments: str) -> float:
    """The peak of a program in megabytes, beyond what its imports take; the median of some runs."""
    found = []
    for _ in range(repeat):
        command = [sys.executable, "-c", program]
        (_, empty, _), (_, most, error) = (elsewhere(measure, [*command, *more], 600.0) for more in ((), arguments))
        assert not error, error
        found.append(most - empty)
    return statistics.median(found)


def compare(row: Row, variants: list[str], repeat: int, threads: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A row of figures for each variant, and one for PyTorch."""
    source, data = row.export(folder), folder / "batch.npz"
    np.savez(data, **row.batch())
    sizes = {"batch": next(iter(row.inputs.values())).shape[0]}
    for variant in variants:
        asked = parse_recompute(variant) if variant else None
        options = Options(losses=(LossSpec("cross-entropy"),), label="y", mode="train", dims=sizes, recompute=asked)
        built = build(source, options)
        target = folder / "train.onnx"
        onnx.save(built.model, target)
        done = built.training.recomputed
        figures = {}
        if done:
            figures = {"kept MB": done.kept / 1e6, "of MB": done.kept_before / 1e6, "GFLOP": done.flops / 1e9}
        megabytes = peak(OURS, repeat, str(target), str(data), str(threads))
        yield {"name": row.name, "variant": variant or "onnxgrad", "MB": megabytes, **figures}
    yield {"name": row.name, "variant": "PyTorch", "MB": peak(THEIRS, repeat, row.net, str(data), str(threads))}


def main() -> None:
    """Measure and print; the rows as JSON too, with --json FILE."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="part of a row's name")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row, variants in CASES:
        if arguments.only and not any(part in row.name for part in arguments.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for found in compare(row, variants, arguments.repeat, arguments.threads, Path(folder)):
                rows.append(found)
                kept = ""
                if "of MB" in found:
                    kept = f", {found['kept MB']:.0f} kept of {found['of MB']:.0f}, {found['GFLOP']:+.1f} GFLOP"
                print(f"{found['name']:34} {found['variant']:32} {found['MB']:8.0f} MB{kept}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
