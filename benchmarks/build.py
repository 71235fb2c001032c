"""What a build costs, beside onnx-ad in the same run: seconds, peak memory, nodes of the training model.

    python -m benchmarks.build [--repeat N] [--only NAME ...]

Both are measured as whole processes (start-up, imports, reading and writing included), interleaved; medians and
ratios of medians. onnx-ad has no loss and no trainable weights: it is given the weights as inputs and asked for
their adjoints, which is the nearest it has. How long onnxruntime takes to open what was built is measured too, where
the weights are in the file, beside how long it takes to open the inference model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import onnx

from benchmarks import models
from benchmarks.models.llama import llama

Result = TypeVar("Result")
MODELS = [
    "chain of 2,000 nodes",
    "chain of 20,000 nodes",
    "chain of 100,000 nodes",
    "1 GB of external weights",
    "LLaMA 7B",
    "BERT-base",
    "ResNet-50",
]
OPENED = frozenset({"chain of 2,000 nodes", "BERT-base", "ResNet-50"})
"""Models that onnxruntime opens in moments; the time grows faster than the nodes, and weights outside are read."""

ALONE = frozenset({"LLaMA 7B"})
"""Models that onnx-ad is not run on: it reads the weights (21 GB, and then a machine of 24 GB ended it)."""

OURS = "from onnxgrad_cli.__main__ import main; main()"
THEIRS = """
import sys, onnx, onnx_ad
model = onnx.load(sys.argv[1], load_external_data=False)
declared = {value.name for value in model.graph.input}
weights = [t for t in model.graph.initializer if t.data_type == 1 and t.dims and t.name not in declared
           and "running" not in t.name]
for t in weights:
    model.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
result = onnx_ad.reverse(model, inputs=[t.name for t in weights], layout="onnx")
with open(sys.argv[2], "wb") as file:
    file.write(result.SerializeToString())
"""


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Of what is measured: installed packages are compiled, which would otherwise be done in each process anew."""


def measure(command: list[str], timeout: float, cwd: Path | None = None) -> tuple[float, float, str]:
    """Wall seconds and peak megabytes of one process, and its last line of error ("" when it succeeded)."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=cwd, env=ENVIRONMENT)
        deadline = start + timeout
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() > deadline:
                process.kill()
                os.wait4(process.pid, 0)
                return timeout, 0.0, f"stopped after {timeout:.0f} s"
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    message = "" if process.returncode == 0 else (lines or ["?"])[-1][:160]
    return seconds, usage.ru_maxrss / 1024, message


def nodes(path: Path) -> int:
    """How many nodes a model has; 0 where there is no file."""
    return len(onnx.load(path, load_external_data=False).graph.node) if path.exists() else 0


def opening(path: Path, repeat: int) -> float:
    """Median seconds in which onnxruntime opens a model."""
    import onnxruntime

    options, found = onnxruntime.SessionOptions(), []
    options.log_severity_level = 3
    for _ in range(repeat):
        start = time.perf_counter()
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def elsewhere(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a call in a process of its own: a measured process starts with its parent's memory as its peak."""
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        return other.submit(function, *arguments).result()


def compare(name: str, path: Path, repeat: int, timeout: float) -> dict[str, object]:
    """Measure both tools on one model, in turn."""
    ours, theirs = path.with_suffix(".train.onnx"), path.with_suffix(".adjoint.onnx")
    commands = {
        "onnxgrad": [
            sys.executable,
            "-c",
            OURS,
            "build",
            str(path),
            "-o",
            str(ours),
            "--loss",
            "mse",
            "--no-verify",
            "--force",
            "-q",
        ],
        "onnx-ad": [sys.executable, "-c", THEIRS, str(path), str(theirs)],
    }
    runs: dict[str, list[tuple[float, float, str]]] = {tool: [] for tool in commands}
    for _ in range(repeat):
        for tool, command in commands.items():
            if tool == "onnx-ad" and name in ALONE:
                runs[tool].append((0.0, 0.0, "left out, for it reads the weights"))
            elif not (runs[tool] and runs[tool][-1][2]):
                runs[tool].append(measure(command, timeout, path.parent))
    row: dict[str, object] = {"model": name, "forward": elsewhere(nodes, path)}
    for tool, out in (("onnxgrad", ours), ("onnx-ad", theirs)):
        row[tool] = {
            "seconds": statistics.median(run[0] for run in runs[tool]),
            "megabytes": statistics.median(run[1] for run in runs[tool]),
            "error": runs[tool][-1][2],
            "nodes": elsewhere(nodes, out),
        }
        if tool == "onnxgrad" and name in OPENED and out.exists():
            row["opening"] = [elsewhere(opening, model, repeat) for model in (path, out)]
        out.unlink(missing_ok=True)
    return row


def make(name: str, folder: Path) -> Path:
    """Write one of the models."""
    if name.startswith("chain"):
        count = int(name.split()[2].replace(",", ""))
        return models.chain(count, folder / f"chain{count}.onnx")
    if name == "1 GB of external weights":
        return models.external(folder)
    if name == "LLaMA 7B":
        return llama(folder / "llama.onnx")
    import torch

    if name == "BERT-base":
        return models.export(models.bert_base(), torch.randint(0, 30522, (2, 128)), folder / "bert.onnx", "ids")
    return models.export(models.resnet50(), torch.randn(2, 3, 224, 224), folder / "resnet50.onnx")


def show(row: dict[str, object]) -> str:
    """One line of the table for each tool."""
    lines = []
    for tool in ("onnxgrad", "onnx-ad"):
        cell: dict[str, object] = row[tool]  # type: ignore[assignment]
        text = f"{row['model']:26} {tool:9} {cell['seconds']:8.2f} s {cell['megabytes']:8.0f} MB"
        if cell["error"]:
            text += f"   failed: {cell['error']}"
        else:
            text += f" {row['forward']:6} -> {cell['nodes']:7} nodes, x {cell['nodes'] / row['forward']:.2f}"  # type: ignore[operator]
        lines.append(text)
    ours, theirs = row["onnxgrad"], row["onnx-ad"]
    if not ours["error"] and not theirs["error"]:  # type: ignore[index]
        ratios = [f"{key} {ours[key] / theirs[key]:.2f}" for key in ("seconds", "megabytes", "nodes")]  # type: ignore[index]
        lines.append(f"{'':26} onnxgrad / onnx-ad: {', '.join(ratios)}")
    if "opening" in row:
        opened: list[float] = row["opening"]  # type: ignore[assignment]
        lines.append(
            f"{'':26} opened by onnxruntime in {opened[1]:.2f} s, x {opened[1] / opened[0]:.1f} of the inference model"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; the rows as JSON too, with --json FILE."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="part of a model's name")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")
        compare("warming up", elsewhere(make, "chain of 8 nodes", Path(folder)), 1, arguments.timeout)
        for name in MODELS:
            if not arguments.only or any(part in name for part in arguments.only):
                path = elsewhere(make, name, Path(folder))
                rows.append(compare(name, path, arguments.repeat, arguments.timeout))
                print(show(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    starts = [measure([sys.executable, "-c", OURS, "--help"], 10.0)[0] for _ in range(10)]
    print(f"onnxgrad --help: median {statistics.median(starts):.3f} s of {len(starts)} runs")


if __name__ == "__main__":
    main()
