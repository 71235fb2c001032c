"""python python_run.py openvino|onnxruntime FOLDER...: runs the training model in each folder; see folder.mjs.

It runs in an environment that has the runtime and numpy alone. RUNTIME.json and RUNTIME.npz in the folder are what was
found; a model that doesn't run leaves the reason.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

RUNS, SHORT, LONG = 6, 0.5, 15.0
"""So many times a model runs, and more in the first half second, but no longer than so many seconds."""

Arrays = dict[str, np.ndarray]


def arrays(path: Path, said: dict) -> Arrays:
    data = path.read_bytes() + bytes(max(0, said.get("bytes", 0) - path.stat().st_size))
    ports = {name: port for name, port in said.get("inputs", said).items() if "offset" in port}
    return {
        name: np.frombuffer(data, port["type"], port["size"], port["offset"]).reshape(port["dims"]).copy()
        for name, port in ports.items()
    }


def opened(runtime: str, path: Path) -> Callable[[Arrays], Arrays]:
    """What computes all outputs of a model from its inputs, on one thread, in float32."""
    if runtime == "openvino":
        import openvino

        how = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        model = openvino.compile_model(path, "CPU", how)
        taken = [name for port in model.inputs for name in port.names]  # a port has those of what it equals, too

        def run(feeds: Arrays) -> Arrays:
            found = model({name: feeds[name] for name in taken if name in feeds})
            return {name: found[port] for port in model.outputs for name in port.names}

        return run
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options)
    names = [value.name for value in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def run(runtime: str, folder: Path) -> dict[str, object]:
    roles = json.loads((folder / "model.json").read_text())
    feeds = arrays(folder / "model.bin", roles)
    feeds |= arrays(folder / "batch.bin", json.loads((folder / "batch.json").read_text()))
    began = time.perf_counter()
    model = opened(runtime, folder / "model.onnx")
    loaded = time.perf_counter()
    times: list[float] = []
    found: Arrays = {}
    while not times or time.perf_counter() < loaded + (LONG if len(times) < RUNS else SHORT):
        start = time.perf_counter()
        found = model(feeds)
        times.append((time.perf_counter() - start) * 1e3)
    np.savez(folder / f"{runtime}.npz", **found)
    return {"load": (loaded - began) * 1e3, "step": statistics.median(times[1:] or times)}


runtime, *names = sys.argv[1:]
for name in names:
    try:
        result = run(runtime, Path(name))
    except Exception as error:  # whatever the runtime raises is what is to be told
        result = {"refused": str(error)}
    (Path(name) / f"{runtime}.json").write_text(json.dumps(result))
