"""The figures of training steps, for readers: lines for a terminal, and a page with a chart.

    python -m benchmarks.results FILE.json

FILE.json is what `benchmarks.train_step --json` has written. The page is benchmarks/RESULTS.md, the chart results.svg
beside it. Ratios are ours to theirs, of medians; beside them stand the quartiles of the rounds' ratios, and the ratio
of the fastest rounds, which other work on the machine disturbs least.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import chart
from benchmarks.interleaved import quartiles

OURS, TORCH, FUSED, OLDER = "onnxgrad", "PyTorch", "PyTorch, fused", "onnxruntime-training 1.19.2"
OPENVINO, PROVIDER = "OpenVINO", "onnxruntime's OpenVINO provider"
OTHERS = (OPENVINO, PROVIDER)
"""Stock runtimes that run the same training model."""

TITLES = {"gradients": "Forward and backward", "adamw": "Forward, backward and AdamW"}

ABOUT = """# Training steps, measured

Written by `python -m benchmarks.results` from what `python -m benchmarks.train_step --json FILE` measured: a step on
one batch in float32. Each system has a process of its own. They take turns, in {rounds} rounds, each from rest: a turn
ends when the threads of its process no longer spin. The order of a round is drawn from a seed, and the next round goes
through it backwards, so no system always follows the same one. Times are medians in milliseconds. A ratio is ours to
theirs, below 1 where ours is faster: to PyTorch's eager mode, with the faster of its two AdamWs, and to
{older}; in brackets the quartiles of the rounds' ratios, and behind them the ratio of the
fastest rounds. Memory is a process's peak in megabytes, beyond its imports.

Measured on: {machine}.

![Ratios of the time of a step](results.svg)
"""

HEAD = (
    f"{'':30} {'':9} {'':2} {'ms: ours':>10} {'PyTorch':>10} {'ratio':>22} {'1.19.2':>10} {'ratio':>22}"
    f"  {'MB: ours':>8} {'PyTorch':>8} {'1.19.2':>8}"
)

Found = Mapping[str, Any]
"""A row as `train_step.compare` gives it."""


@dataclass(frozen=True)
class Ratio:
    """Ours to theirs: of medians, the quartiles of the rounds' ratios, and of the fastest rounds."""

    middle: float
    low: float
    high: float
    least: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}-{self.high:.2f}] {self.least:.2f}"


def faster(row: Found) -> str | None:
    """The faster of PyTorch's two optimizers; None where PyTorch was not measured."""
    there = [name for name in (TORCH, FUSED) if "seconds" in row["systems"].get(name, {})]
    return min(there, key=lambda name: middle(row, name) or 0.0, default=None)


def middle(row: Found, name: str | None) -> float | None:
    """The median seconds of a system's step; None where it has none."""
    seconds = row["systems"].get(name, {}).get("seconds")
    return statistics.median(seconds) if seconds else None


def ratio(row: Found, name: str | None) -> Ratio | None:
    """Of our time to another system's; None where it has none."""
    theirs, ours = row["systems"].get(name, {}).get("seconds"), row["systems"][OURS]["seconds"]
    if not theirs:
        return None
    low, _, high = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return Ratio(statistics.median(ours) / statistics.median(theirs), low, high, min(ours) / min(theirs))


def megabytes(row: Found, name: str | None) -> float | None:
    """The peak of a system; None where it has none."""
    found = row["systems"].get(name, {}).get("megabytes")
    return found["all"] if found else None


def line(row: Found) -> str:
    """A row for a terminal, below HEAD."""
    torch = faster(row)
    times = [middle(row, name) for name in (OURS, torch, OLDER)]
    sizes = [megabytes(row, name) for name in (OURS, torch, OLDER)]
    ms = ["-" if time is None else f"{time * 1e3:.2f}" for time in times]
    mb = ["-" if size is None else f"{size:.0f}" for size in sizes]
    return (
        f"{row['name']:30} {row['kind']:9} {row['threads']:2} {ms[0]:>10} {ms[1]:>10} {ratio(row, torch) or '-'!s:>22}"
        f" {ms[2]:>10} {ratio(row, OLDER) or '-'!s:>22}  {mb[0]:>8} {mb[1]:>8} {mb[2]:>8}"
    ) + "".join(f"\n    {name}: {told}" for name in (OLDER, *OTHERS) if (told := _beside(row, name)))


def _beside(row: Found, name: str) -> str:
    """What the columns don't show of a system: why it refuses the step; of another runtime its time, ours, memory."""
    found = row["systems"].get(name, {})
    if "refused" in found:
        return str(found["refused"])
    time, size = middle(row, name), megabytes(row, name)
    return f"{_ms(time)} ms, ratio {ratio(row, name)}, {size:.0f} MB" if name in OTHERS and size else ""


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = (line.split(":", 1) for line in described.read_text().splitlines() if line.startswith("model name"))
        model = next((words[1].strip() for words in lines), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30) if hasattr(os, "sysconf") else 0.0
    found = {"processor": model, "cores": str(os.cpu_count()), "memory": f"{memory:.0f} GB"}
    found |= {"system": platform.system(), "Python": platform.python_version()}
    for package in ("onnxgrad", "onnxruntime", "onnx", "llvmlite", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "date": date.today().isoformat()}


# -- the page -------------------------------------------------------------------------------------------------------


def page(told: Mapping[str, str], rows: Sequence[Found]) -> Iterator[str]:
    """The lines of RESULTS.md."""
    yield ABOUT.format(
        older=OLDER, rounds=_rounds(rows), machine=", ".join(f"{what} {value}" for what, value in told.items())
    )
    for kind, title in TITLES.items():
        if found := [row for row in rows if row["kind"] == kind]:
            yield f"## {title}\n"
            yield from _times(found)
            yield ""
            yield from _sizes(found)
            yield ""
    yield from _refused(rows)
    yield from others(rows)


def _rounds(rows: Sequence[Found]) -> str:
    counts = {len(row["systems"][OURS]["seconds"]) for row in rows}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(*counts)


def others(rows: Sequence[Found]) -> Iterator[str]:
    """A table of what runs the same training model besides onnxruntime, and of PyTorch; docs/runtimes.md shows it."""
    found = [row for row in rows if row["systems"].keys() & {*OTHERS}]
    if not found:
        return
    yield f"| onnxruntime's CPU provider to | | {OPENVINO} | its provider in onnxruntime | PyTorch |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for row in found:
        cells = [row["name"], "with AdamW" if row["kind"] == "adamw" else ""]
        for name in (*OTHERS, faster(row)):
            refused = "refused" in row["systems"].get(name, {})
            cells.append("refused" if refused else str(ratio(row, name) or ""))
        yield f"| {' | '.join(cells)} |"


def _times(rows: Sequence[Found]) -> Iterator[str]:
    yield "| milliseconds | threads | onnxgrad | PyTorch | ratio | 1.19.2 | ratio |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        cells = [row["name"], str(row["threads"]), _ms(middle(row, OURS))]
        for peer in (faster(row), OLDER):
            cells += [_ms(middle(row, peer)), str(ratio(row, peer) or "")]
        yield f"| {' | '.join(cells)} |"


def _sizes(rows: Sequence[Found]) -> Iterator[str]:
    yield "| peak megabytes | onnxgrad | PyTorch | ratio | 1.19.2 | ratio |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        ours = megabytes(row, OURS) or 0.0
        cells = [row["name"], f"{ours:.0f}"]
        for peer in (faster(row), OLDER):
            theirs = megabytes(row, peer)
            cells += [f"{theirs:.0f}", f"{ours / theirs:.2f}"] if theirs else ["", ""]
        yield f"| {' | '.join(cells)} |"


def _refused(rows: Sequence[Found]) -> Iterator[str]:
    found = {row["name"]: row["systems"].get(OLDER, {}).get("refused") for row in rows}
    if any(found.values()):
        yield f"What {OLDER} refuses:\n"
        yield from (f"- {name}: `{reason}`" for name, reason in found.items() if reason)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def marks(rows: Sequence[Found]) -> Iterator[chart.Mark]:
    """What the chart shows."""
    for row in rows:
        for peer, series in ((faster(row), "PyTorch"), (OLDER, "1.19.2")):
            if found := ratio(row, peer):
                label = f"{series}, with AdamW" if row["kind"] == "adamw" else series
                yield chart.Mark(row["name"], label, found.middle, found.low, found.high)


def main() -> None:
    """Write the page and the chart."""
    found = json.loads(Path(sys.argv[1]).read_text())
    folder, few = Path(__file__).parent, max(row["threads"] for row in found["rows"])
    rows = [row for row in found["rows"] if row["threads"] == few]
    (folder / "RESULTS.md").write_text("\n".join(page(found["machine"], found["rows"])) + "\n")
    (folder / "results.svg").write_text(chart.svg(list(marks(rows)), "Time of a training step, ours / theirs") + "\n")


if __name__ == "__main__":
    main()
