"""The README is run: its commands and the training program that it names; its outputs are the real ones."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import RUN_BY_THE_README

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("onnxgrad ")]
assert len(COMMANDS) == 1, "one example; the other commands stand in docs/, where test_pages.py runs them"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples, in which the README's first command was run."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "sample_models", folder / "sample_models")
    run(COMMANDS[0], folder)
    return folder


def run(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    prefix = [sys.executable, "-m", "onnxgrad_cli"] if program == "onnxgrad" else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*prefix, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_targets_exist() -> None:
    targets = re.findall(r"^(?:make) ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["run", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_example_output_is_real(folder: Path) -> None:
    shown = blocks("text")[0].splitlines()
    real = run(f"{COMMANDS[0]} --force", folder).splitlines()
    timed = re.compile(r"in [\d.]+ m?s(?=$|, )")
    assert [timed.sub("in time", line) for line in shown] == [timed.sub("in time", line) for line in real]


@pytest.mark.slow
def test_the_training_program_learns(folder: Path) -> None:
    assert f"`{RUN_BY_THE_README}`" in README
    output = run(RUN_BY_THE_README, folder)
    accuracy = re.search(r"held-out accuracy (\d+\.\d)%", output)
    assert accuracy
    assert float(accuracy[1]) > 95
    assert re.match(r"epoch 20  loss 0\.\d{4}\nheld-out accuracy \d\d\.\d%\n", blocks("text")[1])


def test_the_home_page_shows_the_same_example() -> None:
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert f"```text\n{blocks('text')[0]}```" in home
    assert COMMANDS[0] in home


def test_it_keeps_to_one_screen() -> None:
    assert len(README.splitlines()) <= 75
