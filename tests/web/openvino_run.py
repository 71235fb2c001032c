"""python openvino_run.py FOLDER...: runs the training model in each folder on OpenVINO; see folder.mjs.

It runs in an environment that has OpenVINO and numpy alone.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino


def arrays(path: Path, said: dict) -> dict[str, np.ndarray]:
    data = path.read_bytes() + bytes(max(0, said.get("bytes", 0) - path.stat().st_size))
    ports = {name: port for name, port in said.get("inputs", said).items() if "offset" in port}
    return {
        name: np.frombuffer(data, port["type"], port["size"], port["offset"]).reshape(port["dims"]).copy()
        for name, port in ports.items()
    }


def run(folder: Path) -> dict[str, object]:
    roles = json.loads((folder / "model.json").read_text())
    feeds = arrays(folder / "model.bin", roles)
    feeds |= arrays(folder / "batch.bin", json.loads((folder / "batch.json").read_text()))
    start = time.perf_counter()
    how = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    model = openvino.compile_model(folder / "model.onnx", "CPU", how)
    times = {"load": (time.perf_counter() - start) * 1e3}
    given = {port.any_name: feeds[port.any_name] for port in model.inputs}
    steps = []
    for _ in range(4):
        start = time.perf_counter()
        found = model(given)
        steps.append((time.perf_counter() - start) * 1e3)
    np.savez(folder / "openvino.npz", **{port.any_name: found[port] for port in model.outputs})
    return {**times, "step": min(steps)}


for name in sys.argv[1:]:
    try:
        result = run(Path(name))
    except Exception as error:  # whatever OpenVINO raises is what is to be told
        result = {"refused": str(error)}
    (Path(name) / "openvino.json").write_text(json.dumps(result))
