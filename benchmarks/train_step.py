"""What a step of training costs, beside PyTorch's eager mode and onnxruntime-training 1.19.2 in the same run.

    python -m benchmarks.train_step [--repeat N] [--minutes M [--least N]] [--threads N ...] [--kind gradients adamw]
                                    [--only NAME ...] [--against torch older openvino openvino-provider] [--json FILE]
    python -m benchmarks.train_step --profile NAME [--kind gradients|adamw] [--threads N]

A step is forward and backward on one batch in float32, without an optimizer or with AdamW. Each system has a process of
its own, and they take turns in blocks, each from rest, in an order that is drawn: ours, PyTorch with its default
optimizer and with the fused one, and onnxruntime-training, in an environment of its own where it can be installed.
OpenVINO and onnxruntime's provider for it run the same training model, which is then built for the batch's shapes
(docs/runtimes.md). Figures are medians, and ratios to the faster of PyTorch's two; memory is a process's peak beyond
its imports. The losses of the first two steps must agree, and so must the norm of all gradients. With --minutes, each
row has an equal share of what is left of them: it ends with the round in which that is spent, but has --least rounds.
--profile tells where a step's time goes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import onnx

from benchmarks import results
from benchmarks.build import elsewhere
from benchmarks.interleaved import Refused, Worker
from benchmarks.results import FUSED, OLDER, OPENVINO, OTHERS, OURS, PROVIDER, TORCH
from benchmarks.workloads import KINDS, Kind, Row, chosen, save
from onnxgrad_cli.execution.interleaved_timing import rounds
from onnxgrad_cli.metadata import describe
from tests import older_runtime, other_runtimes

LOSS, NORM = 1e-3, 1e-3
"""How far the first loss may differ, and tenfold the one after a step; and the norms of gradients. After two steps of
AdamW, where signs of tiny gradients count, PyTorch with one thread and with two differ by a tenth (ResNet-50)."""


def prepare(row: Row, kind: Kind, folder: Path, static: bool = False) -> tuple[Path, Path]:
    """Write the export, its training model, perhaps for this batch alone, the trained weights' names, and the batch.

    An export that the folder has already is taken as it is.
    """
    save(row.batch(), folder / "batch.npz")
    source = row.exported(folder)
    source = source if source.exists() else row.export(folder)
    shapes = {name: draw.shape for name, draw in row.inputs.items()}
    target = row.training_model(source, kind, **({"shapes": shapes} if static else {}))
    weights = [name for name, role in describe(onnx.load(target)).inputs.items() if role == "weight"]
    (folder / "weights.json").write_text(json.dumps(weights))
    return source, target


def older_step(source: Path, folder: Path) -> list[str]:
    """What runs a step of an export on onnxruntime-training; its artifacts are made where there are none.

    Raises:
        Refused: it can't be installed, or can't make them.
    """
    try:
        command = [older_runtime.python(), "-m", "benchmarks.systems.older"]
    except older_runtime.Absent as reason:
        raise Refused(str(reason)) from None
    artifacts = folder / "artifacts"
    if not artifacts.exists():
        words = [*command, "prepare", str(source), str(folder / "weights.json"), str(artifacts)]
        made = subprocess.run(words, capture_output=True, text=True, cwd=older_runtime.ROOT)
        if made.returncode:
            shutil.rmtree(artifacts, ignore_errors=True)
            raise Refused(made.stderr.strip().splitlines()[-1][:300])
    return [*command, str(artifacts)]


def other_step(name: str, target: Path) -> list[str]:
    """What runs a step of a training model on another runtime.

    Raises:
        Refused: it can't be installed.
    """
    runtime, system = (other_runtimes.OPENVINO, "openvino") if name == OPENVINO else (other_runtimes.PROVIDER, "ours")
    try:
        return [runtime.python(), "-m", f"benchmarks.systems.{system}", str(target)]
    except older_runtime.Absent as reason:
        raise Refused(str(reason)) from None


def start(name: str, row: Row, kind: Kind, threads: int, files: tuple[Path, Path], folder: Path) -> Worker:
    """A system at its first steps.

    Raises:
        Refused: it can't take them.
    """
    given = [str(folder / "batch.npz"), str(threads)]
    if name == OURS:
        command = [sys.executable, "-m", "benchmarks.systems.ours", str(files[1]), *given]
    elif name in OTHERS:
        command = [*other_step(name, files[1]), *given, *(["openvino"] if name == PROVIDER else [])]
    elif name == OLDER:
        command = [*older_step(files[0], folder), *given, kind]
    else:
        variant = f"{kind}-fused" if name == FUSED else kind
        command = [sys.executable, "-m", "benchmarks.systems.pytorch", row.net, *given, variant]
    return Worker(command, Path(tempfile.mkdtemp(dir=folder)))


def compare(
    row: Row,
    kind: Kind,
    threads: int,
    repeat: int,
    against: Sequence[str],
    folder: Path,
    until: float = math.inf,
    least: int = 3,
) -> dict[str, Any]:
    """What a step takes each system: seconds in each round, megabytes; or why it can't take it.

    Args:
        row: the network and its batch.
        kind: of step.
        threads: of each system.
        repeat: rounds, at most.
        against: the peers.
        folder: for files; what it has already of the row, whatever the kind, is taken.
        until: the reading of `time.monotonic` at which no further round begins.
        least: rounds that there are all the same.

    Raises:
        AssertionError: two don't compute the same.
        Refused: ours or PyTorch can't take the step.
    """
    others = [name for word, name in zip(("openvino", "openvino-provider"), OTHERS, strict=True) if word in against]
    files = elsewhere(prepare, row, kind, folder, bool(others))
    names = [OURS, *([TORCH] if "torch" in against else []), *([OLDER] if "older" in against else []), *others]
    names += [FUSED] if "torch" in against and kind == "adamw" else []
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as open_ones:
        workers: dict[str, Worker] = {}
        for name in names:
            try:
                workers[name] = start(name, row, kind, threads, files, folder)
                open_ones.callback(workers[name].close)
            except Refused as reason:
                if name not in (OLDER, *OTHERS):
                    raise
                found[name] = {"refused": str(reason)}
        agree(row.name, workers)
        times = rounds({name: worker.block for name, worker in workers.items()}, repeat, until=until, least=least)
        for name, worker in workers.items():
            found[name] = {"seconds": times[name], "megabytes": worker.memory()}
    return {"name": row.name, "net": row.net, "kind": kind, "threads": threads, "systems": found}


def agree(what: str, workers: Mapping[str, Worker]) -> None:
    """Compare the losses of the first steps, and the norms of gradients.

    Raises:
        AssertionError: they differ.
    """
    first, *others = workers.values()
    for name, other in zip(list(workers)[1:], others, strict=True):
        for i, (a, b) in enumerate(zip(first.losses[:2], other.losses[:2], strict=True)):
            assert abs(a - b) <= LOSS * (1 + 9 * i) * abs(b), f"{what}: loss {i} is {a}, that of {name} {b}"
        if first.norm is not None and other.norm is not None:
            a, b = first.norm, other.norm
            assert abs(a - b) <= NORM * b, f"{what}: the gradients' norm is {a}, that of {name} {b}"


def measure(arguments: argparse.Namespace) -> None:
    """Print the table, and write the rows."""
    rows: list[dict[str, Any]] = []
    end, chosen_rows = time.monotonic() + 60 * arguments.minutes, chosen(arguments.only)
    cases = [(kind, threads) for kind in arguments.kind for threads in arguments.threads]
    left = len(chosen_rows) * len(cases)
    print(results.HEAD)
    for row in chosen_rows:
        with tempfile.TemporaryDirectory() as folder:
            for kind, threads in cases:
                until = time.monotonic() + (end - time.monotonic()) / left
                left -= 1
                given = (arguments.repeat, arguments.against, Path(folder), until, arguments.least)
                rows.append(found := compare(row, kind, threads, *given))
                print(results.line(found), flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps({"machine": results.machine(), "rows": rows}, indent=1))


def main() -> None:
    """Measure, or profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7, help="rounds in which each system has its turn")
    parser.add_argument("--minutes", type=float, default=math.inf, help="that all takes, about")
    parser.add_argument("--least", type=int, default=3, help="rounds of each row, be there time or not")
    parser.add_argument("--threads", type=int, nargs="*", default=[2], help="of each")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=KINDS, help="without or with the optimizer")
    parser.add_argument("--only", nargs="*", help="networks, or parts of rows' names")
    peers = ("torch", "older", "openvino", "openvino-provider")
    parser.add_argument("--against", nargs="*", choices=peers, default=peers[:2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", metavar="NAME", help="print where the time of such a row's step goes instead")
    arguments = parser.parse_args()
    if not arguments.profile:
        return measure(arguments)
    from benchmarks import profile

    with tempfile.TemporaryDirectory() as folder:
        for row in chosen([arguments.profile]):
            for kind in arguments.kind:
                profile.main(row, kind, arguments.threads[0], Path(folder))


if __name__ == "__main__":
    main()
