"""Many cases one after the other: counts of how they ended, and of each kind of failure a reproducer."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import nlargest
from pathlib import Path
from random import Random

from tests.fuzz.case import Outcome

KEPT = Path("build/fuzz")


@dataclass
class Played:
    """A case that has been played.

    Attributes:
        outcome: how it ended.
        story: what was done, as text for the one who reproduces it.
    """

    outcome: Outcome
    story: str = ""


@dataclass
class Campaign:
    """What came of the cases.

    Attributes:
        name: the program's.
        kinds: how many cases ended how.
        faults: how often each fault was seen.
        sizes: of the smallest case with each fault, in bytes.
        slowest: the time of the processor that cases took, and their numbers; those few that took most.
    """

    name: str
    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    slowest: list[tuple[float, int]] = field(default_factory=list)

    def play(self, play: Callable[[Random, Path], Played], numbers: list[int], seed: int) -> None:
        """Play cases, each from its own random numbers, in a folder of its own."""
        for number in numbers:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as top:
                place = Path(top) / "a" / "b" / "case"
                for folder in ("in", "out", "tmp"):
                    (place / folder).mkdir(parents=True)
                played = play(Random(f"{self.name} {seed} {number}"), place)
                self.kinds[played.outcome.kind] += 1
                self.slowest = nlargest(5, [*self.slowest, (played.outcome.seconds, number)])
                for fault in played.outcome.faults:
                    self.faults[fault] += 1
                    self._keep(
                        fault,
                        place,
                        f"case {number} of seed {seed}\n{played.story}\n\n{fault}\n\n{played.outcome.told}",
                    )

    def _keep(self, fault: str, place: Path, story: str) -> None:
        """Keep what a case was given, if it is the smallest with this fault."""
        size = sum(path.stat().st_size for path in (place / "in").glob("*onnx*"))
        if size >= self.sizes.get(fault, sys.maxsize):
            return
        self.sizes[fault] = size
        folder = self.folder(fault)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place / "in", folder / "in", symlinks=True, ignore=_no_pipes)
        (folder / "story.txt").write_text(story, "utf-8", "backslashreplace")

    def folder(self, fault: str) -> Path:
        """Where the reproducer of a fault is kept."""
        return KEPT / self.name / sha256(fault.encode("utf-8", "replace")).hexdigest()[:10]

    def tell(self) -> int:
        """Print what came of it; 0 if nothing failed."""
        print(
            f"{sum(self.kinds.values())} cases: "
            + ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        )
        print("slowest: " + ", ".join(f"case {number} {seconds:.1f} s" for seconds, number in self.slowest))
        for fault, count in self.faults.most_common():
            print(f"{count:6}  {self.sizes[fault]:7} B  {self.folder(fault)}  {fault}")
        print(
            f"{len(self.faults)} causes of failure in {sum(self.faults.values())} cases"
            if self.faults
            else "nothing failed"
        )
        return 1 if self.faults or not self.kinds else 0


def _no_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_fifo()]


def arguments(what: str, cases: int) -> argparse.ArgumentParser:
    """The options that all have."""
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("--cases", type=int, default=cases, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    parser.add_argument("--case", type=int, help="play this one alone")
    return parser


def main(name: str, play: Callable[[Random, Path], Played], asked: argparse.Namespace) -> int:
    """Play the cases that are asked for, and tell what came of them."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    campaign, start = Campaign(name), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was found is told all the same
    numbers = [asked.case] if asked.case is not None else list(range(asked.cases))
    try:
        campaign.play(play, numbers, asked.seed)
    except KeyboardInterrupt:
        print("interrupted")
    code = campaign.tell()
    print(f"seed {asked.seed}, {time.monotonic() - start:.0f} s")
    return code
