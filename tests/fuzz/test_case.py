"""What the judge of a case must notice: each test plants one fault in the command, in the fork that runs it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import onnx
import pytest

from onnxgrad_cli import cli
from tests.fuzz import case, hostile, models, raw
from tests.fuzz.corpus import SAMPLES, sample

Planted = Callable[[Sequence[str]], int]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "around" / "case"
    for name in ("in", "out", "tmp"):
        (folder / name).mkdir(parents=True)
    shutil.copyfile("sample_models/add.onnx", folder / "in" / "model.onnx")
    return folder


def faults(place: Path, monkeypatch: pytest.MonkeyPatch, planted: Planted, written: Sequence[str] = ()) -> str:
    """What the judge says of a command that does what is planted."""
    monkeypatch.setattr(cli, "run", planted)
    outcome = case.run(["build", "../in/model.onnx"], place, written)
    return "\n".join(outcome.faults)


def saying(text: str, code: int) -> Planted:
    def run(arguments: Sequence[str]) -> int:
        print(text)
        return code

    return run


def writing(path: str, text: str, code: int = 0) -> Planted:
    def run(arguments: Sequence[str]) -> int:
        Path(path).write_text(text, "utf-8")
        print("said")
        return code

    return run


def raising(arguments: Sequence[str]) -> int:
    raise KeyError("nobody caught it")


def dying(arguments: Sequence[str]) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def spinning(arguments: Sequence[str]) -> int:
    while True:
        pass


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (raising, "internal: exit 70: KeyError in "),
        (dying, "death: SIGSEGV"),
        (spinning, "hang: "),
        (saying("error: internal: KeyError", 1), "internal: exit 1"),
        (saying("fine", 70), "internal: exit 70"),
        (saying("", 1), "silent: exit 1"),
        (saying("a name: \x1b]0;title\x07", 1), "raw control character on the terminal: build: a name"),
        (saying("a name: \u202etxt", 1), "raw control character on the terminal: build: a name"),
        (writing("r.svg", "<svg>\x85</svg>"), "raw control character in *.svg"),
        (writing(".out.onnx.tmp", ""), "left behind: .out.onnx.tmp"),
        (writing("../tmp/left", ""), "changed outside: build: case/tmp/left"),
        (writing("../in/model.onnx", ""), "changed outside: build: case/in/model.onnx"),
        (writing("out.onnx", "half", 1), "exit 1, and out.onnx is there"),
        (writing("other.md", ""), "exit 0, and out.onnx is not there"),
        (writing("out.onnx", "half"), "does not open: build: out.onnx"),
        (saying("done", 2), ""),
    ],
)
@pytest.mark.thinned(2)
def test_a_fault_is_noticed(planted: Planted, said: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "SECONDS", 1)
    found = faults(place, monkeypatch, planted, ["out.onnx"])
    assert said in found if said else not found


def test_equal_seeds_make_equal_cases() -> None:
    def made() -> tuple[bytes, list[str], bytes]:
        rng = Random(5)
        seed = sample(SAMPLES[0])
        story = models.mutate(seed, rng)
        data = seed.model.SerializeToString(deterministic=True)
        return data, story, raw.mutate(data, rng)[0]

    assert made() == made()


def test_most_mutations_of_models_change_them() -> None:
    unchanged = 0
    for number in range(60):
        rng = Random(number)
        seed = sample(rng.choice(SAMPLES))
        before = seed.model.SerializeToString(deterministic=True)
        models.mutate(seed, rng)
        unchanged += seed.model.SerializeToString(deterministic=True) == before
    assert unchanged < 10


def test_text_that_is_no_utf8_gets_into_a_model() -> None:
    model = onnx.load("sample_models/add.onnx")
    model.graph.name = hostile.NOT_UTF8
    data = hostile.with_broken_text(model.SerializeToString())
    assert len(data) == model.ByteSize()
    assert isinstance(onnx.load_model_from_string(data).graph.name, bytes)  # so protobuf returns what is no text
