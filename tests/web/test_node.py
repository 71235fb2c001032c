"""Training in Node: what onnxruntime-node computes, through the trainer that pages copy, is Python's to the bit."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrad_cli import LoraSpec, run_build
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.optimizers import OPTIMIZERS
from tests.older_runtime import Absent
from tests.web import javascript
from tests.web.cases import SAMPLES, Made, batch_of, made, options_of, read_arrays

BATCHES = {"linear_regression": "linear_regression", "digits_mlp": "digits", "digits_cnn": "digits",
           "tiny_transformer": "tiny_transformer"}  # fmt: skip
"""Sample model -> its data."""

pytestmark = pytest.mark.slow


def node() -> str:
    try:
        return javascript.node()
    except Absent as why:
        pytest.skip(str(why))


def in_node(*models: Made) -> None:
    """Run training models in Node, and compare all that they make with Python's."""
    ort = javascript.FOLDER / "node_modules" / "onnxruntime-node" / "dist" / "index.js"
    program = Path(__file__).with_name("run.mjs")
    command = [node(), program, ort, javascript.TRAINER, *(each.folder for each in models)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for each in models:
        got = read_arrays(each.folder / "found")
        assert got.keys() == each.expected.keys()
        for name, array in each.expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=f"{each.folder.name}: {name}")


def sample(folder: Path, name: str, **more: Any) -> Made:
    batch = batch_of(BATCHES[name])
    if name == "tiny_transformer":
        batch["input_ids"] = batch.pop("x")
    return made(folder, SAMPLES / f"{name}.onnx", batch, options_of(name, **more))


@pytest.mark.parametrize("target", ["standard", "portable"])
@pytest.mark.parametrize("optimizer", ["", "adamw"])
def test_sample_models(optimizer: str, target: str, tmp_path: Path) -> None:
    in_node(*(sample(tmp_path / name, name, optimizer=optimizer, target=target) for name in BATCHES))


def test_every_optimizer(tmp_path: Path) -> None:
    names = [each.name for each in OPTIMIZERS]
    assert len(names) >= 11
    in_node(*(sample(tmp_path / name, "digits_mlp", optimizer=name) for name in names))


def test_other_steps(tmp_path: Path) -> None:
    """Averages, accumulation, a dynamic scale of the loss, adapters, frozen weights."""
    steps: dict[str, dict[str, Any]] = {
        "averages": {"ema": 0.9, "clip_norm": 1.0},
        "accumulation": {"accumulate": 2},
        "scale": {"loss_scale": "dynamic"},
        "adapters": {"lora": LoraSpec(2)},
        "frozen": {"train_last": 1},
    }
    in_node(*(sample(tmp_path / name, "digits_mlp", optimizer="adamw", **more) for name, more in steps.items()))


def run_program(text: str, folder: Path) -> list[float]:
    """Run a program that users copy; returns the last number of each line that it prints."""
    (folder / "program.mjs").write_text(text)
    (folder / "node_modules").symlink_to(javascript.FOLDER / "node_modules")
    done = subprocess.run([node(), "program.mjs"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[-1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("optimizer", ["", "momentum"])
def test_the_program_of_the_report(optimizer: str, tmp_path: Path) -> None:
    node()
    options = options_of("digits_cnn", optimizer=optimizer)
    reports = [tmp_path / "report.json"]
    run_build(
        SAMPLES / "digits_cnn.onnx", tmp_path / "m.onnx", options, weights="inputs", verify=False, reports=reports
    )
    report = json.loads(reports[0].read_text())
    (program,) = (step["text"] for step in report["next"] if step["language"] == "js")
    losses = run_program(program, tmp_path)
    assert len(losses) == 5 and losses[-1] < losses[0] / 2


def test_the_page_of_the_docs(tmp_path: Path) -> None:
    node()
    page = (javascript.ROOT / "docs" / "how-to" / "javascript.md").read_text()
    run_build(
        SAMPLES / "digits_cnn.onnx", tmp_path / "digits.onnx", options_of("digits_cnn", optimizer="adamw"),
        weights="inputs", verify=False, no_report=True,
    )  # fmt: skip
    (program,) = re.findall(r"```js\n(.*?)```", page, re.DOTALL)
    losses = run_program(program, tmp_path)
    assert len(losses) == 2 and losses[1] < losses[0]
    found = run_export(
        tmp_path / "trained.bin", SAMPLES / "digits_cnn.onnx", tmp_path / "t.onnx", roles=tmp_path / "digits.json"
    )
    assert found == [tmp_path / "t.onnx"]


@pytest.mark.parametrize(("axis", "shape", "ignored"), [(1, (8, 3, 4, 5), None), (1, (8, 3), 2), (-1, (2, 6, 4), -100)])
def test_labels_are_compared_along_the_axis_of_the_classes(
    axis: int, shape: tuple[int, ...], ignored: int | None
) -> None:
    """The page's count of what is right is numpy's, and labels that are ignored count in neither."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal(shape)
    labels = rng.integers(0, shape[axis], np.delete(shape, axis))
    labels.flat[:3] = labels.flat[:3] if ignored is None else ignored
    term = {"class_axis": axis, "ignore_index": ignored}
    given = {"scores": scores.ravel().tolist(), "dims": shape, "labels": labels.ravel().tolist(), "term": term}
    program = f"""import {{ matches }} from '{javascript.TRAINER.with_name("matches.mjs").as_uri()}';
        const {{ scores, dims, labels, term }} = {json.dumps(given)};
        console.log(JSON.stringify(matches({{ data: scores, dims }}, {{ data: labels.map(BigInt) }}, term)));"""
    done = subprocess.run([node(), "--input-type=module", "-e", program], capture_output=True, text=True, check=True)
    counts = labels != ignored
    assert json.loads(done.stdout) == (scores.argmax(axis) == labels)[counts].tolist()
