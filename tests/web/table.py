"""Training models on every runtime: `python -m tests.web.table` writes the tables of docs/runtimes.md.

The models are built with `--target portable`, sizes of batches left open. What was found is kept in
build/web/results.json, so that runtimes and models can be measured one by one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import GNN, Draw, Row, images, tokens
from onnxgrad_cli.options import Options
from tests import other_runtimes
from tests.web import javascript, networks
from tests.web.cases import SAMPLES, Made, batch_of, errors, made, options_of, read_arrays

HERE, FOLDER = Path(__file__).parent, javascript.ROOT / "build" / "web"
MODULES = javascript.FOLDER / "node_modules"
RUNTIMES = {"onnxruntime": "Python", "node": "Node", "wasm": "wasm", "webgpu": "WebGPU", "openvino": "OpenVINO"}
RESULTS, PAGE = FOLDER / "results.json", javascript.ROOT / "docs" / "runtimes.md"
BEGIN, END = "<!-- python -m tests.web.table -->\n", "<!-- end of the tables -->\n"

SAMPLE_NAMES = {"linear_regression": "linear regression", "digits_mlp": "digits MLP, 64-64-32-10",
                "digits_cnn": "digits CNN, two MaxPool", "tiny_transformer": "tiny transformer"}  # fmt: skip
SAMPLE_DATA = {"linear_regression": "linear_regression", "digits_mlp": "digits", "digits_cnn": "digits",
               "tiny_transformer": "tiny_transformer"}  # fmt: skip


class Small(Row):
    """One of `networks`."""

    def module(self) -> Any:
        return getattr(networks, self.net)()


def small(name: str, net: str, classes: int = 10) -> Row:
    """One for images of 32 x 32."""
    return Small(name, net, {"x": Draw((4, 3, 32, 32))}, Draw((4,), classes))


WORDS = {"x": {0: "batch"}, "output": {0: "predictions"}}
GRAPH = Row("graph network, 64 nodes", "gnn",
            {"x": Draw((64, 64)), "sources": Draw((256,), 64), "targets": Draw((256,), 64)}, Draw((64,), 8),
            GNN.axes)  # fmt: skip
ROWS = {
    row.net: row
    for row in (
        images("LeNet", "lenet", 4, 28, 10, channels=1),
        small("ResNet-8, 32x32", "resnet"),
        small("MobileNetV2, 6 blocks, 32x32", "mobilenet"),
        small("ConvNeXt, 2 blocks, 32x32", "convnext"),
        small("GroupNorm, SiLU, squeeze-excite", "squeezed"),
        Row("U-Net, 32x32", "unet", {"x": Draw((2, 3, 32, 32))}, Draw((2, 32, 32), 4)),
        Small("autoencoder, ConvTranspose", "autoencoder", {"x": Draw((4, 1, 16, 16))}, Draw((4, 1, 16, 16))),
        Small("dilated convolutions in time", "tcn", {"x": Draw((4, 8, 64))}, Draw((4,), 4)),
        Row("LSTM 128, 12 steps", "lstm", {"x": Draw((4, 12, 128))}, Draw((4,), 4)),
        Row("GRU 128, 12 steps", "gru", {"x": Draw((4, 12, 128))}, Draw((4,), 4)),
        Small("LSTM both ways, tagger", "tagger", {"x": Draw((4, 8), 100)}, Draw((4, 8), 5)),
        small("MLP-Mixer, 2 layers", "mixer"),
        small("ViT, 2 layers", "vit"),
        Small("BERT, 2 layers", "bert", {"x": Draw((2, 16), 1000)}, Draw((2,), 4)),
        Small("GPT-2, 2 layers", "gpt", {"x": Draw((2, 16), 1000)}, Draw((32,), 1000), WORDS),
        GRAPH,
        images("ResNet-18, 64x64", "resnet18", 2, 64, 1000),
        images("MobileNetV2, 64x64", "mobilenet_v2", 2, 64, 1000),
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
    mode = "keep" if name.startswith("mobilenet") else "train"  # statistics of few pixels amplify all rounding
    batch = ROWS[name].batch()
    if name == "unet":  # of another seed: with that of the row, an activation lies within rounding of its kink
        batch["x"] = np.random.default_rng(5).standard_normal(batch["x"].shape).astype(np.float32)
    path = path if path.exists() else ROWS[name].export(exports)
    return path, batch, options_of(name, target="portable", mode=mode)


def run(runtime: str, models: Sequence[Made]) -> None:
    """Run models on a runtime; what each makes of them is left in their folders."""
    folders = [each.folder for each in models]
    for folder in folders:
        for name in ("found.json", "found.bin", "refused.txt", f"{runtime}.json"):
            (folder / name).unlink(missing_ok=True)
    if runtime in ("openvino", "onnxruntime"):
        python = other_runtimes.OPENVINO.python() if runtime == "openvino" else sys.executable
        command = [python, HERE / "python_run.py", runtime, *folders]
    elif runtime == "node":
        ort = MODULES / "onnxruntime-node" / "dist" / "index.js"
        command = [javascript.node(), HERE / "run.mjs", ort, javascript.TRAINER, *folders]
    else:
        chromium = shutil.which("chromium") or "chromium"
        command = [javascript.node(), HERE / "chromium.mjs", MODULES, chromium, javascript.TRAINER.parent, runtime,
                   *folders]  # fmt: skip
    subprocess.run(command, check=True)


def found(runtime: str, model: Made) -> dict[str, Any]:
    """Milliseconds of a step and of loading, with the errors of the loss and of the worst gradient; or why not."""
    folder = model.folder
    if runtime in ("openvino", "onnxruntime"):
        said = json.loads((folder / f"{runtime}.json").read_text())
        got = {} if "refused" in said else dict(np.load(folder / f"{runtime}.npz"))
    elif (folder / "refused.txt").exists():
        said, got = {"refused": (folder / "refused.txt").read_text()}, {}
    else:
        said, got = json.loads((folder / "times.json").read_text()), read_arrays(folder / "found")
    if not got:
        return {"refused": said["refused"].strip().splitlines()[0]}
    worst = errors(got, model.expected)
    loss = json.loads((folder / "model.json").read_text())["loss"]
    return {**said, "loss": worst.pop(loss), "gradient": max(worst.values()),
            "kB": (folder / "model.onnx").stat().st_size / 1e3}  # fmt: skip


def measure(runtimes: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Runtime -> model -> what was found, with what was measured before."""
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    models = {name: made(FOLDER / name, *source(name)) for name in names} if runtimes else {}
    for runtime in runtimes:
        run(runtime, list(models.values()))
        results.setdefault(runtime, {}).update({name: found(runtime, model) for name, model in models.items()})
        RESULTS.write_text(json.dumps(results, indent=1))
    return results


def tables(results: dict[str, dict[str, Any]]) -> str:
    """The table of errors, and that of times."""
    others = list(RUNTIMES)[1:]

    def number(error: float) -> str:
        return f"{error:.0e}".replace("e-0", "e-") if error else "0"

    def error(name: str, runtime: str) -> str:
        each = results.get(runtime, {}).get(name, {"refused": "not run"})
        return each.get("refused") or f"{number(each['loss'])}, {number(each['gradient'])}"

    def short(number: float) -> str:
        return f"{number:.0f}" if number >= 10 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"

    def times(name: str, runtime: str) -> str:
        each, base = results.get(runtime, {}).get(name, {}), results["onnxruntime"][name]
        return f"{short(each['step'] / base['step'])}, {each['load']:.0f}" if "step" in each else ""

    heads = [RUNTIMES[runtime] for runtime in others]
    lines = [f"| largest error of the loss, and of a gradient | kB | {' | '.join(heads)} |",
             "| --- | ---: |" + " ---: |" * len(others)]  # fmt: skip
    names = {**SAMPLE_NAMES, **{name: row.name for name, row in ROWS.items()}}
    for name, title in names.items():
        cells = [error(name, runtime) for runtime in others]
        lines.append(f"| {title} | {results['onnxruntime'][name]['kB']:.0f} | {' | '.join(cells)} |")
    lines += ["", f"| time of a step / Python's time, then ms to open a session | ms in Python | {' | '.join(heads)} |",
              "| --- | ---: |" + " ---: |" * len(others)]  # fmt: skip
    for name, title in names.items():
        base = results["onnxruntime"][name]
        cells = [times(name, runtime) for runtime in others]
        lines.append(f"| {title} | {short(base['step'])}, {base['load']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runtimes", nargs="*", metavar="RUNTIME", help=f"{', '.join(RUNTIMES)}, or 'none'; all by default"
    )
    parser.add_argument("--only", nargs="+", choices=[*SAMPLE_DATA, *ROWS], metavar="MODEL")
    asked = parser.parse_args()
    runtimes = [name for name in asked.runtimes or RUNTIMES if name != "none"]
    results = measure(runtimes, asked.only or [*SAMPLE_DATA, *ROWS])
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + tables(results) + END + after)


if __name__ == "__main__":
    main()
