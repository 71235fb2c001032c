"""The README is run: every command in it, and the training program, which it shows whole."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("onnxgrad ")]


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


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_command(command: str, folder: Path) -> None:
    words = shlex.split(command)
    for before in COMMANDS[1 : COMMANDS.index(command)]:
        made = shlex.split(before)[-1]
        if made in (word.split(".run/")[0] for word in words[:-1]) and not (folder / made).exists():
            run(before, folder)  # it writes what this one reads, and its test may be another process's
    assert run(command, folder)


def test_make_targets_exist() -> None:
    targets = re.findall(r"^(?:make) ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["run", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_example_output_is_real(folder: Path) -> None:
    shown = blocks("text")[0].splitlines()
    real = run(f"{COMMANDS[0]} --force", folder).splitlines()
    stable = [line for line in shown if not line.startswith("proof")]
    assert stable == [line for line in real if not line.startswith("proof")]


def test_the_training_program_learns(folder: Path) -> None:
    assert blocks("python")[0] == (ROOT / "sample_models" / "train.py").read_text()
    output = run("python sample_models/train.py train.onnx", folder)
    accuracy = re.search(r"held-out accuracy (\d+\.\d)%", output)
    assert accuracy
    assert float(accuracy[1]) > 95


def test_the_steps_in_python_learn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    exec(blocks("python")[1], {})
    data = np.load("sample_models/digits.npz")
    logits = onnxruntime.InferenceSession("trained.onnx").run(None, {"x": data["test_x"]})[0]
    assert np.mean(logits.argmax(1) == data["test_y"]) > 0.9


def test_the_example_operators_register() -> None:
    from onnxgrad_cli.autodiff import registry

    with registry.scoped():
        exec(blocks("python")[2], {})
        exec(blocks("python")[3], {})
        assert registry.lookup("Softsign", "my.domain", 1) is not None
        assert registry.lookup_definition("BiasGelu", "my.domain", 1) is not None


def test_every_optimizer_is_named() -> None:
    from onnxgrad_cli.optimizers import OPTIMIZERS

    for optimizer in OPTIMIZERS:
        assert re.search(rf"\b{optimizer.name}\b", README), optimizer.name


def test_every_loss_is_named() -> None:
    from onnxgrad_cli.losses import LOSSES

    for loss in LOSSES:
        assert re.search(rf"\b{loss.name}\b", README), loss.name
