"""docs/runtimes.md is run, where OpenVINO is installed, and other runtimes are held against onnxruntime."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks import results
from benchmarks.workloads import KINDS, Kind, chosen
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.metadata import describe
from tests import other_runtimes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runtimes.md").read_text()


def python() -> str:
    """One that has OpenVINO: the tests install none, as it is large."""
    there = sys.executable if importlib.util.find_spec("openvino") else other_runtimes.OPENVINO.ready()
    if there is None:
        pytest.skip(
            "OpenVINO is not installed; `python -m benchmarks.train_step --against openvino` makes its environment"
        )
    return there


def run(*command: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_trains(tmp_path: Path) -> None:
    there = python()
    for name in ("digits_cnn.onnx", "digits.npz"):
        shutil.copy(ROOT / "sample_models" / name, tmp_path)
    (command,) = re.findall(r"^onnxgrad (build .*)$", PAGE, re.MULTILINE)
    run(sys.executable, "-m", "onnxgrad_cli", *shlex.split(command), folder=tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    told = run(there, "-c", program, folder=tmp_path)
    assert float(told.split()[-1]) < 0.3


def test_the_page_measures(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the benchmarks' networks are PyTorch modules")
    (command,) = re.findall(r"^python (-m benchmarks.train_step .*)$", PAGE, re.MULTILINE)
    told = run(sys.executable, *shlex.split(command), "--only", "no such row", folder=tmp_path)
    assert told.splitlines() == [results.HEAD]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_onnxruntimes(kind: Kind, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the benchmarks' networks are PyTorch modules")
    there = {"openvino": other_runtimes.OPENVINO, "openvino-provider": other_runtimes.PROVIDER}
    ready = [word for word, runtime in there.items() if runtime.ready()]
    if not ready:
        pytest.skip("neither OpenVINO nor onnxruntime's provider for it is installed")
    from benchmarks import train_step

    row = train_step.compare(chosen(["batch 1"])[0], kind, 1, 1, ready, tmp_path)
    others = {name: found for name, found in row["systems"].items() if name != results.OURS}
    assert len(others) == len(ready)
    assert all("seconds" in found for found in others.values())
    assert all(name in results.line(row) for name in others)


KINKS = """
import sys, numpy as np, openvino
given = dict(np.load("given.npz"))
model = openvino.compile_model("train.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
found = model({port.any_name: given[port.any_name] for port in model.inputs})
np.savez("found.npz", **{port.any_name: found[port] for port in model.outputs})
"""


@pytest.mark.parametrize(
    "kind", ["Relu", "LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSigmoid", "Softplus"]
)
def test_the_gradient_of_a_kink_is_onnxruntimes_on_openvino(kind: str, tmp_path: Path) -> None:
    there = python()
    text = f"""<ir_version: 10, opset_import: ["" : 22]> net (float[5] x) => (float[5] y) {{ y = {kind}(x) }}"""
    options = Options(losses=(LossSpec("mse"),), label="t", grad_of_input=("x",))
    model = build(onnx.parser.parse_model(text), options).model
    onnx.save(model, tmp_path / "train.onnx")
    given = {"x": np.array([-2, -1e-3, 0, 1e-3, 2], np.float32), "t": np.full(5, -3, np.float32)}
    np.savez(tmp_path / "given.npz", **given)
    run(there, "-c", KINKS, folder=tmp_path)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    name = describe(model).gradients["x"]
    np.testing.assert_allclose(np.load(tmp_path / "found.npz")[name], session.run([name], given)[0], 1e-5, 1e-7)
