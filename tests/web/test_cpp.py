"""The C++ program of docs/how-to/cpp-and-csharp.md is compiled where there are headers; it trains as Python does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad_cli import run_build
from onnxgrad_cli.jobs.export import run_export
from tests.older_runtime import ROOT
from tests.web.cases import SAMPLES, options_of

PAGE = (ROOT / "docs" / "how-to" / "cpp-and-csharp.md").read_text()
DIGITS = np.load(SAMPLES / "digits.npz")
STEPS, SIZE, TOLD = 400, 32, 100


def compiled(folder: Path) -> Path:
    """The program of the page, with the library that the Python package has."""
    headers = os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime")
    compiler = shutil.which("g++")
    libraries = list(Path(ort.__file__).with_name("capi").glob("libonnxruntime.so.*"))
    if compiler is None or not Path(headers, "onnxruntime_cxx_api.h").is_file() or not libraries:
        pytest.skip("there is no g++, or none of onnxruntime's headers: ONNXRUNTIME_INCLUDE may name their folder")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(libraries[0])
    (program,) = re.findall(r"```cpp[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    (folder / "train.cpp").write_text(program)
    command = [compiler, "-std=c++17", "-Wall", "-Wno-unused", "-Werror", "train.cpp", "-isystem", headers, "-L.",
               "-lonnxruntime", f"-Wl,-rpath,{folder}", "-o", "train"]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "train"


def losses(model: Path) -> list[float]:
    """What Python finds at every hundredth step on the same batches."""
    session = ort.InferenceSession(model)
    names = [value.name for value in session.get_outputs()]
    held: dict[str, np.ndarray] = {}
    told = []
    x, y = DIGITS["train_x"], DIGITS["train_y"]
    for step in range(STEPS):
        first = step * SIZE % (len(y) - SIZE)
        batch = {
            "x": x[first : first + SIZE],
            "y": y[first : first + SIZE],
            "learning_rate": np.array(0.005, np.float32),
        }
        found = dict(zip(names, session.run(names, {**held, **batch}), strict=True))
        held = {name.removesuffix("_next"): array for name, array in found.items() if name.endswith("_next")}
        if step % TOLD == 0:
            told.append(float(found["loss"]))
    return told


@pytest.mark.slow
def test_the_program_trains(tmp_path: Path) -> None:
    program, source = compiled(tmp_path), SAMPLES / "digits_mlp.onnx"
    options = options_of("digits_mlp", optimizer="adamw")
    run_build(source, tmp_path / "train.onnx", options, verify=False, no_report=True)
    for name in ("x", "y"):
        DIGITS[f"train_{name}"].tofile(tmp_path / f"{name}.bin")
    done = subprocess.run([program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        [float(line.split()[1]) for line in done.stdout.splitlines()], losses(tmp_path / "train.onnx"), rtol=1e-4
    )
    run_export(tmp_path / "trained.safetensors", source, tmp_path / "back.onnx")
    (logits,) = ort.InferenceSession(tmp_path / "back.onnx").run(None, {"x": DIGITS["test_x"]})
    assert (logits.argmax(1) == DIGITS["test_y"]).mean() > 0.95
