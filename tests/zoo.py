"""Build a training model of every model in a folder and compare its gradients with stored gradients of PyTorch.

    python -m tests.zoo FOLDER [NAME ...] [--target T] [--recompute W | --keep SHARE]

Each subfolder has these files: model.onnx, feed.npz (`in/<input>` and `target`), reference.npz (`loss` and
`grad/<weight>`: float64 autograd of the mean squared error) and about.json.

The error of a gradient is its largest difference, relative to its largest element. If that element is smaller than 1e-4
of the largest element of all gradients, the error is relative to the latter. The largest accepted error is 1e-4, or the
float32 rounding error of the reference if that is larger. The exit code is 1 if any model is wrong or none is found.

`--keep 0.5` sets a recompute budget of half the bytes that the model keeps without recomputation. The column `other`
counts the nodes that are added by options.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.cost.training_cost import cost
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.passes.rematerialization.recompute import BUDGET
from tests.harness import asked, changes

BOUND = 1e-4


def compare(folder: Path, options: Options, keep: float | None = None) -> dict[str, object]:
    """Build, run and compare one model. Return its row of the table.

    Args:
        folder: the folder of the model.
        options: the options of the build, except the loss.
        keep: the recompute budget, as a share of the bytes that are kept without recomputation.

    Raises:
        OnnxgradError: the model was refused.
    """
    about = json.loads((folder / "about.json").read_text())
    feeds, reference = np.load(folder / "feed.npz"), np.load(folder / "reference.npz")

    def made(options: Options) -> TrainingModel:
        loss = LossSpec("mse", output=about["output"])
        return build(onnx.load(folder / "model.onnx"), replace(options, losses=(loss,), label="target"))

    start = time.perf_counter()
    plain = built = made(Options())
    if keep is not None:
        size = int(keep * cost(plain.graph, plain.training).kept_bytes)
        options = replace(options, recompute=RecomputeSpec(BUDGET, size=size))
    if options != Options():
        start = time.perf_counter()
        built = made(options)
    model = built.model
    seconds = time.perf_counter() - start
    onnx.checker.check_model(model, full_check=True)
    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = 1
    how.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), how, providers=["CPUExecutionProvider"])
    arrays = {key.removeprefix("in/"): feeds[key] for key in feeds.files}
    fed = {i.name: arrays[i.name] for i in session.get_inputs() if i.name in arrays}
    names = [output.name for output in session.get_outputs()]
    result = dict(zip(names, session.run(None, fed), strict=True))
    wanted = {key.removeprefix("grad/"): reference[key] for key in reference.files if key.startswith("grad/")}
    largest = max(np.abs(g).max() for g in wanted.values())
    errors, missing = {}, [name for name in wanted if name not in built.training.gradients]
    for name, expected in wanted.items():
        if name not in missing:
            got = result[built.training.gradients[name]]
            assert got.shape == expected.shape, f"{name}: {got.shape} for {expected.shape}"
            errors[name] = np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-4 * largest)
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(float(result["loss"]) - float(reference["loss"])) / abs(float(reference["loss"]))
    return {
        "weights": len(errors),
        "missing": missing,
        "extra": len(built.training.trained) - len(errors),
        "loss_error": loss_error,
        "worst": float(errors[worst]),
        "worst_name": worst,
        "bound": max(BOUND, about["float32_noise"]),
        "noise": about["float32_noise"],
        "forward": built.training.forward_nodes,
        "nodes": len(model.graph.node),
        "other": changes(model, plain.model),
        "seconds": seconds,
    }


def judged(folder: Path, options: Options, keep: float | None) -> dict[str, object] | str:
    """Return the row of a model, or the error message if it fails."""
    try:
        return compare(folder, options, keep)
    except (OnnxgradError, AssertionError, RuntimeError) as error:
        return f"{error}"


def told(name: str, row: dict[str, object] | str) -> tuple[str, bool, bool]:
    """Return a line of the table, True if the gradients agree, and True if options have changed the model."""
    if isinstance(row, str):
        return f"{name:20} FAILED: {row}", False, False
    good = not row["missing"] and max(row["worst"], row["loss_error"]) <= row["bound"]  # type: ignore[operator]
    verdict = "ok" if good else f"OFF at {row['worst_name']} {row['missing'] or ''}"
    line = (
        f"{name:20} {row['weights']:5} {row['loss_error']:9.1e} {row['worst']:9.1e} {row['bound']:8.0e}"
        f" {row['forward']:5} -> {row['nodes']:4} {row['other']:5} {row['seconds']:7.2f}  {verdict}"
    )
    return line, good, bool(row["other"])


def main() -> int:
    """Print the table. Return 0 if the gradients of every model agree, and 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=float, help="recompute until this share of what is kept without is kept")
    arguments, options = asked(parser)
    folders = [f.parent for f in sorted(arguments.zoo.glob("*/model.onnx"))]
    folders = [f for f in folders if not arguments.names or f.name in arguments.names]
    if not folders:
        print(f"no model in '{arguments.zoo}': fetch the zoo, or name its folder with ZOO=", file=sys.stderr)
        return 1
    heads = f"{'model':20} {'grads':>5} {'loss err':>9} {'worst err':>9} {'bound':>8} {'nodes':>12} {'other':>5}"
    print(f"{heads} {'build s':>7}  verdict")
    failed = other = 0
    with ProcessPoolExecutor() as workers:
        rows = workers.map(partial(judged, options=options, keep=arguments.keep), folders)
        for folder, row in zip(folders, rows, strict=True):
            line, good, changed = told(folder.name, row)
            print(line, flush=True)
            failed += not good
            other += changed
    print(f"{len(folders) - failed} passed, {failed} failed; {other} are other models than without options")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
