"""Training models on every runtime: `python -m tests.web.table RUNTIME...` prints a table for docs/runtimes.md.

A runtime is node, openvino, wasm or webgpu; without one, all are asked. The models are built with `--target portable`,
sizes of batches left open; each cell is the largest error of loss and gradients against onnxruntime in Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.workloads import Draw, Row, images, tokens
from onnxgrad_cli.options import Options
from tests import other_runtimes
from tests.web import javascript
from tests.web.cases import SAMPLES, Made, batch_of, errors, made, options_of, read_arrays

HERE, FOLDER = Path(__file__).parent, javascript.ROOT / "build" / "web"
MODULES = javascript.FOLDER / "node_modules"
RUNTIMES = ("node", "wasm", "webgpu", "openvino")

SAMPLE_DATA = {"digits_mlp": "digits", "digits_cnn": "digits", "tiny_transformer": "tiny_transformer"}
ROWS = {
    row.net: row
    for row in (
        images("LeNet", "lenet", 4, 28, 10, channels=1),
        Row("LSTM", "lstm", {"x": Draw((4, 12, 128))}, Draw((4,), 4)),
        Row("GRU", "gru", {"x": Draw((4, 12, 128))}, Draw((4,), 4)),
        Row("U-Net", "unet", {"x": Draw((2, 3, 32, 32))}, Draw((2, 32, 32), 4)),
        images("ResNet-18", "resnet18", 2, 64, 1000),
        images("MobileNetV2", "mobilenet_v2", 2, 64, 1000),
        tokens("BERT-small", "bert_small", 2, 16, 30522, 4),
    )
}


def source(name: str) -> tuple[Path, Mapping[str, np.ndarray], Options]:
    """An inference model, its batch and how it is trained."""
    if name in SAMPLE_DATA:
        batch = batch_of(SAMPLE_DATA[name])
        if name == "tiny_transformer":
            batch["input_ids"] = batch.pop("x")
        return SAMPLES / f"{name}.onnx", batch, options_of(name, target="portable")
    exports = FOLDER / "exports"
    exports.mkdir(parents=True, exist_ok=True)
    path = exports / f"{ROWS[name].net}.opset18.onnx"
    mode = "keep" if name == "mobilenet_v2" else "train"  # statistics of two images of 2x2 pixels amplify all rounding
    batch = ROWS[name].batch()
    if name == "unet":  # of another seed: with that of the row, an activation lies within rounding of its kink
        batch["x"] = np.random.default_rng(5).standard_normal(batch["x"].shape).astype(np.float32)
    path = path if path.exists() else ROWS[name].export(exports)
    return path, batch, options_of(name, target="portable", mode=mode)


def run(runtime: str, models: Sequence[Made]) -> None:
    """Run models on a runtime; what each makes of them is left in their folders."""
    folders = [each.folder for each in models]
    for folder in folders:
        for name in ("found.json", "found.bin", "refused.txt", "openvino.json"):
            (folder / name).unlink(missing_ok=True)
    if runtime == "openvino":
        command = [other_runtimes.OPENVINO.python(), HERE / "openvino_run.py", *folders]
    elif runtime == "node":
        ort = MODULES / "onnxruntime-node" / "dist" / "index.js"
        command = [javascript.node(), HERE / "run.mjs", ort, javascript.TRAINER, *folders]
    else:
        chromium = shutil.which("chromium") or "chromium"
        command = [javascript.node(), HERE / "chromium.mjs", MODULES, chromium, javascript.TRAINER.parent, runtime,
                   *folders]  # fmt: skip
    subprocess.run(command, check=True)


def cell(runtime: str, model: Made) -> str:
    """The largest error, or why there is none."""
    folder = model.folder
    if runtime == "openvino":
        said = json.loads((folder / "openvino.json").read_text())
        if "refused" in said:
            return f"refused: {said['refused'].splitlines()[-1]}"
        got = dict(np.load(folder / "openvino.npz"))
    elif (folder / "refused.txt").exists():
        return f"refused: {(folder / 'refused.txt').read_text().splitlines()[0]}"
    else:
        got = read_arrays(folder / "found")
    worst = max(errors(got, model.expected).values())
    return f"{worst:.1e}" if worst else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtimes", nargs="*", choices=[[], *RUNTIMES], metavar="RUNTIME")
    asked = parser.parse_args().runtimes or RUNTIMES
    models = {name: made(FOLDER / name, *source(name)) for name in (*SAMPLE_DATA, *ROWS)}
    cells: dict[str, list[str]] = {name: [] for name in models}
    for runtime in asked:
        run(runtime, list(models.values()))
        for name, model in models.items():
            cells[name].append(cell(runtime, model))
    print("| | kB |", " | ".join(asked), "|\n| --- | ---: |", " | ".join("---:" for _ in asked), "|")
    for name, model in models.items():
        size = (model.folder / "model.onnx").stat().st_size / 1e3
        print(f"| {name} | {size:.0f} |", " | ".join(cells[name]), "|")


if __name__ == "__main__":
    main()
