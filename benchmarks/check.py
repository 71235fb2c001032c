"""Whether onnxgrad has become slower: a quick subset of what is measured, held against a stored baseline.

    python -m benchmarks.check [--repeat N] [--write] [--baseline FILE]

Seconds of another machine tell nothing, so a baseline holds none. What is counted is the same everywhere: the calls
that Python makes in a build, and the nodes that onnxruntime runs. What is timed is the CPU time of one thread, as a
ratio to a reference without any code of ours, which takes turns with it: a step to the inference of its model, an
opening to that of its model, a build to reading, typing and writing the model with onnx alone, a start to the import
of the packages that it needs.

A figure is too high where it exceeds its baseline by more than is allowed and by more than the noise of both, which is
taken from the rounds; then it is measured once more, and told if it is too high again. --write stores what is found.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from benchmarks.interleaved import quartiles
from benchmarks.models.files import chain
from benchmarks.results import machine
from benchmarks.systems.ours import open_step
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.execution.interleaved_timing import block, rounds

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "benchmarks" / "baseline.json"

ALLOWED, COUNTED = 0.1, 0.02
"""By how much a ratio and a count may exceed the baseline; a count from other versions may as much as a ratio."""

NOISE = 3.0
"""Standard errors of a median, within which two medians are taken for the same."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Figure:
    """A figure of some rounds: median, first and third quartile; of a count, these are the same.

    Attributes:
        rounds: how many there were.
    """

    middle: float
    low: float
    high: float
    rounds: int

    @property
    def error(self) -> float:
        """The standard error of the median, by the quartiles of a normal distribution."""
        return 0.93 * (self.high - self.low) / math.sqrt(self.rounds)


@dataclass(frozen=True)
class Timed:
    """What is timed beside its reference, by a clock."""

    ours: Step
    reference: Step
    clock: Callable[[], float] = time.process_time

    def figure(self, repeat: int) -> Figure:
        """The ratio of both."""
        sides = {"ours": self.ours, "reference": self.reference}
        found = rounds({name: partial(block, step, self.clock) for name, step in sides.items()}, repeat)
        low, middle, high = quartiles([a / b for a, b in zip(found["ours"], found["reference"], strict=True)])
        return Figure(middle, low, high, repeat)


@dataclass(frozen=True)
class Count:
    """What is counted."""

    count: Callable[[], int]

    def figure(self, repeat: int) -> Figure:
        """The count, which more rounds don't change."""
        number = self.count()
        return Figure(number, number, number, 1)


# -- what is measured -----------------------------------------------------------------------------------------------

SIMPLE = Options(losses=(LossSpec("mse"),))
CLASSES = Options(losses=(LossSpec("cross-entropy"),), label="y")


def cases(folder: Path) -> Iterator[tuple[str, Timed | Count]]:
    """All that is measured, by name; files are written to a folder."""
    chained = chain(1000, folder / "chain.onnx")
    digits = ROOT / "sample_models" / "digits_cnn.onnx"
    for name, path, options in (("chain of 1,000", chained, SIMPLE), ("digits CNN", digits, CLASSES)):
        made = partial(build, path, options)
        yield f"calls of a build, {name}", Count(partial(calls, made))
        yield f"build, {name}", Timed(made, partial(through_onnx, path))
    for name, source, batch in _steps():
        for kind in ("", "adamw"):
            yield _step(name, source, batch, kind, folder)
    yield from _openings(chain(250, folder / "short.onnx"), folder)
    helped = "import sys; sys.argv[1:] = ['--help']; from onnxgrad_cli.__main__ import main; main()"
    yield "start, --help", Timed(_process(helped), _process("import click"), children)
    needed = _process("import numpy, onnx")
    yield "import of a build", Timed(_process("import onnxgrad_cli.jobs.build"), needed, children)


def calls(step: Step) -> int:
    """The calls that Python makes in a step which has been taken before."""
    step()
    profile = cProfile.Profile()
    profile.runcall(step)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def through_onnx(path: Path) -> int:
    """Read, type and write a model, and look at all names of its nodes; returns how many bytes it has."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    names = {name for node in model.graph.node for name in (node.name, *node.input, *node.output)}
    return len(model.SerializeToString()) + len(names)


def _steps() -> Iterator[tuple[str, Path, dict[str, np.ndarray]]]:
    """Sample models with a batch each."""
    folder = ROOT / "sample_models"
    for name, net in (("digits CNN", "digits_cnn"), ("tiny transformer", "tiny_transformer")):
        source = folder / f"{net}.onnx"
        data = np.load(folder / ("digits.npz" if net == "digits_cnn" else f"{net}.npz"))
        (read,) = (value.name for value in onnx.load(source).graph.input)
        yield name, source, {read: data["train_x"][:256], "y": data["train_y"][:256]}


def _step(name: str, source: Path, batch: dict[str, np.ndarray], kind: str, folder: Path) -> tuple[str, Timed]:
    """A step on one thread, beside the inference of its model."""
    options = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer=kind)
    target = folder / f"{source.stem}.{kind}.train.onnx"
    onnx.save(build(source, options).model, target)
    session = _session(source)
    fed = {value.name: batch[value.name] for value in session.get_inputs()}
    step = open_step(target, batch, 1).step
    return f"step{' with AdamW' if kind else ''}, {name}", Timed(step, partial(session.run, None, fed))


def _openings(source: Path, folder: Path) -> Iterator[tuple[str, Timed | Count]]:
    """The opening of a training model, beside that of its model; and how many nodes onnxruntime runs."""
    target = folder / "opened.onnx"
    onnx.save(build(source, SIMPLE).model, target)
    yield "opening, chain of 250", Timed(partial(_session, target), partial(_session, source))
    yield "nodes that run, chain of 250", Count(partial(_optimized, target, folder / "optimized.onnx"))


def _session(path: Path, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if optimized:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _optimized(path: Path, target: Path) -> int:
    """The nodes of a model that onnxruntime has optimized."""
    _session(path, target)
    return len(onnx.load(target).graph.node)


def _process(program: str) -> Step:
    """A Python process."""
    return partial(subprocess.run, [sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT)


def children() -> float:
    """CPU seconds of the processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


# -- what is said of it ---------------------------------------------------------------------------------------------


def is_higher(now: Figure, before: Figure, allowed: float) -> bool:
    """Whether a figure exceeds its baseline by more than is allowed, and by more than the noise of both."""
    noise = NOISE * math.hypot(now.error, before.error)
    return now.middle - before.middle > max(allowed * before.middle, noise)


def line(name: str, now: Figure, before: Figure | None, allowed: float) -> str:
    """What a figure has become."""
    text = f"{name:42} {now.middle:12,.2f}"
    if before is None:
        return f"{text} {'':12}  new"
    noise = NOISE * math.hypot(now.error, before.error) / before.middle
    lower = is_higher(before, now, allowed)
    word = "HIGHER" if is_higher(now, before, allowed) else "lower: write the baseline anew" if lower else ""
    return f"{text} {before.middle:12,.2f} {now.middle / before.middle - 1:+8.1%} (noise {noise:5.1%})  {word}".rstrip()


def versions() -> str:
    """What a baseline is of: the runtime's version and Python's."""
    runtime, python = (".".join(text.split(".")[:2]) for text in (version("onnxruntime"), platform.python_version()))
    return f"onnxruntime {runtime}, Python {python}"


def stored(file: Path) -> tuple[dict[str, Figure], bool]:
    """The figures of a baseline, and whether they are of the versions that are here: else they are the last in it."""
    sections: dict[str, dict[str, dict[str, list[float]]]] = json.loads(file.read_text()) if file.exists() else {}
    if not sections:
        return {}, False
    name = versions() if versions() in sections else sorted(sections)[-1]
    if name != versions():
        print(f"there is no baseline of {versions()}; that of {name} is taken")
    figures = {what: Figure(*row[:3], int(row[3])) for what, row in sections[name]["figures"].items()}
    return figures, name == versions()


def write(file: Path, figures: Mapping[str, Figure]) -> None:
    """Store figures as the baseline of the versions that are here."""
    sections = json.loads(file.read_text()) if file.exists() else {}
    rows = {name: [round(number, 4) for number in astuple(figure)] for name, figure in figures.items()}
    sections[versions()] = {"machine": machine(), "figures": rows}
    file.write_text(json.dumps(dict(sorted(sections.items())), indent=1) + "\n")


def check(repeat: int, baseline: Path) -> tuple[dict[str, Figure], list[str]]:
    """Measure all, and print what has become of it.

    Returns:
        All figures; and the names of those that are too high.
    """
    before, is_same = stored(baseline)
    found: dict[str, Figure] = {}
    higher: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(Path(folder)):
            allowed = COUNTED if is_same and isinstance(case, Count) else ALLOWED
            old = before.get(name)
            now = case.figure(repeat)
            if old and is_higher(now, old, allowed):
                now = min(now, case.figure(2 * repeat), key=lambda figure: figure.middle)
                higher += [name] if is_higher(now, old, allowed) else []
            found[name] = now
            print(line(name, now, old, allowed), flush=True)
    return found, higher


def main() -> int:
    """Measure, compare or store; exit code 1 where a figure is too high."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15, help="rounds of what is timed")
    parser.add_argument("--write", action="store_true", help="store what is found as the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    arguments = parser.parse_args()
    found, higher = check(arguments.repeat, arguments.baseline)
    if arguments.write:
        write(arguments.baseline, found)
        return 0
    if higher:
        print(f"slower than the baseline: {', '.join(higher)}", file=sys.stderr)
    return 1 if higher else 0


if __name__ == "__main__":
    sys.exit(main())
