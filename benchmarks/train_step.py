"""What a step of training costs, beside PyTorch's eager mode in the same run; and what the loop adds to a step.

    python -m benchmarks.train_step [--repeat N] [--threads N ...] [--only NAME ...]

A step is forward, backward and AdamW on one batch, in float32: `Trainer.step`, and PyTorch with its default optimizer
and with the fused one. They take turns in blocks; figures are medians, and ratios to the faster of PyTorch's two.
Memory is the peak of a process that takes five steps, less that of one which only imports what it takes. The losses of
the first steps must agree. Then comes a step with low-rank adapters, and at last the microseconds that `Trainer.step`
and the whole loop add to a bare run of the session, on a small network and batches of 32: what a user pays for checks,
shuffling, batching and the log.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import models
from benchmarks.build import elsewhere, measure
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.pipeline import LoraSpec
from onnxgrad_cli.runtime.data import Batches, open_data
from onnxgrad_cli.runtime.folder import run_folder
from onnxgrad_cli.runtime.loop import Loop
from onnxgrad_cli.runtime.schedules import parse_schedule
from onnxgrad_cli.runtime.session import feed
from onnxgrad_cli.runtime.trainer import Trainer

RATE = 1e-3
SAMPLES = Path(__file__).parents[1] / "sample_models"

OURS = """
import sys, numpy, onnx
from onnxgrad_cli.runtime.trainer import Trainer
if len(sys.argv) > 1:
    trainer = Trainer(onnx.load(sys.argv[1]), threads=int(sys.argv[3]))
    batch = dict(numpy.load(sys.argv[2]))
    for _ in range(5):
        trainer.step(batch, 1e-3)
"""
THEIRS = """
import sys, numpy, torch
from benchmarks import models
if len(sys.argv) > 1:
    torch.set_num_threads(int(sys.argv[3]))
    net = getattr(models, sys.argv[1])().train()
    adamw = torch.optim.AdamW(net.parameters(), 1e-3)
    batch = numpy.load(sys.argv[2])
    x, y = (torch.tensor(batch[name]) for name in ("x", "y"))
    for _ in range(5):
        adamw.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        adamw.step()
"""


@dataclass(frozen=True)
class Row:
    """A network, the name of a function of `models`, and the shape of its batch; `below` is the bound of token ids."""

    name: str
    net: str
    shape: tuple[int, ...]
    classes: int
    below: int = 0

    def batch(self) -> dict[str, np.ndarray]:
        """Random inputs and labels."""
        rng = np.random.default_rng(0)
        x = rng.integers(0, self.below, self.shape) if self.below else rng.standard_normal(self.shape, np.float32)
        return {"x": x, "y": rng.integers(0, self.classes, self.shape[0])}


ROWS = (
    Row("MLP 784-1024-1024-10, batch 256", "mlp", (256, 784), 10),
    Row("digits CNN, batch 64", "digits_cnn", (64, 1, 8, 8), 10),
    Row("ResNet-18, batch 4", "resnet18", (4, 3, 224, 224), 1000),
    Row("BERT-small, 8 x 128 tokens", "bert_small", (8, 128), 4, below=30522),
    Row("LSTM 128, 16 x 50 steps", "lstm", (16, 50, 128), 4),
)


def theirs(net: Any, batch: dict[str, np.ndarray], fused: bool) -> Callable[[], float]:
    """A step in PyTorch; returns the loss before it."""
    import torch

    adamw = torch.optim.AdamW(net.parameters(), RATE, fused=fused)
    x, y = torch.tensor(batch["x"]), torch.tensor(batch["y"])

    def step() -> float:
        adamw.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        adamw.step()
        return loss.item()

    return step


def training_model(row: Row, net: Any, folder: Path, **more: Any) -> Path:
    """Export a network and build its training model; `more` are options of the build."""
    import torch

    source = models.export(net.eval(), torch.tensor(row.batch()["x"][:2]), folder / f"{row.net}.onnx")
    losses = (LossSpec("cross-entropy"),)
    built = build(onnx.load(source), Options(losses=losses, label="y", optimizer="adamw", mode="train", **more))
    target = folder / "-".join([row.net, *more, "train.onnx"])
    onnx.save(built.model, target)
    return target


def compare(row: Row, repeat: int, threads: int, folder: Path) -> dict[str, Any]:
    """Milliseconds and megabytes of both.

    Raises:
        AssertionError: the two don't compute the same.
    """
    import copy

    import torch

    from benchmarks.ops import in_turn

    torch.set_num_threads(threads)
    batch, net = row.batch(), getattr(models, row.net)()
    path = training_model(row, net, folder)
    trainer = Trainer(onnx.load(path), threads=threads)
    steps: dict[str, Callable[[], float]] = {"onnxgrad": lambda: trainer.step(batch, RATE)}
    for name in ("torch", "torch fused"):
        steps[name] = theirs(copy.deepcopy(net).train(), batch, name != "torch")
    for i in range(2):
        losses = {name: step() for name, step in steps.items()}
        assert np.ptp(list(losses.values())) < 1e-3 * (1 + 9 * i) * abs(losses["torch"]), f"{row.name}: {losses}"
    medians = in_turn(steps, repeat)
    ratio = medians["onnxgrad"] / min(medians["torch"], medians["torch fused"])
    return {"name": row.name, "threads": threads, **medians, "ratio": ratio, **memory(row, path, folder, threads)}


def memory(row: Row, model: Path, folder: Path, threads: int) -> dict[str, float]:
    """The peaks of both in megabytes."""
    np.savez(folder / "batch.npz", **row.batch())
    arguments = [str(folder / "batch.npz"), str(threads)]
    return {"onnxgrad MB": peak(OURS, str(model), *arguments), "torch MB": peak(THEIRS, row.net, *arguments)}


def peak(program: str, *arguments: str) -> float:
    """The peak of a program in megabytes, beyond what its imports take."""
    command = [sys.executable, "-c", program]
    (_, empty, _), (_, most, error) = (elsewhere(measure, [*command, *more], 300.0) for more in ((), arguments))
    assert not error, error
    return most - empty


def adapters(repeat: int, threads: int, folder: Path) -> dict[str, Any]:
    """A step of BERT-small with low-rank adapters, beside one of all weights: milliseconds and megabytes."""
    from benchmarks.ops import in_turn

    row = next(row for row in ROWS if row.net == "bert_small")
    batch, steps, found = row.batch(), {}, {}
    np.savez(folder / "batch.npz", **batch)
    for name, more in (("all", {}), ("adapters", {"lora": LoraSpec(8, 16)})):
        path = training_model(row, models.bert_small(), folder, **more)
        steps[name] = partial(Trainer(onnx.load(path), threads=threads).step, batch, RATE)
        found[f"{name} MB"] = peak(OURS, str(path), str(folder / "batch.npz"), str(threads))
    return {"name": f"{row.name}: adapters", "threads": threads, **in_turn(steps, repeat), **found}


def overhead(repeat: int, folder: Path) -> dict[str, float]:
    """Microseconds of a step on digits: a bare run of the session, `Trainer.step`, and the loop, saving aside."""
    from benchmarks.ops import in_turn

    model = onnx.load(SAMPLES / "digits_mlp.onnx")
    losses = (LossSpec("cross-entropy"),)
    trainer = Trainer(build(model, Options(losses=losses, label="y", optimizer="adamw")), threads=1)
    data = open_data(SAMPLES / "digits.npz", trainer.inputs, prefix="train_")
    batches = [data.batch(part.indices) for part in Batches(data, 32)]
    (rate,) = (name for name, role in trainer.roles.inputs.items() if role == "learning rate")
    bindings = []
    for i, batch in enumerate(batches):
        bindings.append(trainer._bind(rate, *trainer._sides[:: 1 - 2 * (i % 2)]))
        for name, array in batch.items():
            feed(bindings[-1], name, array)

    def bare() -> None:
        for binding in bindings:
            trainer._session.run_with_iobinding(binding)

    def steps() -> None:
        for batch in batches:
            trainer.step(batch, 1e-9)

    epochs = 10

    def loop() -> None:
        order, rates = Batches(data, 32), parse_schedule("constant", 1e-9, 1)
        with tempfile.TemporaryDirectory(dir=folder) as empty, run_folder(Path(empty)) as held:
            run = Loop(trainer, data, order, rates, None, "loss", False, epochs, None, 0, held, bool, lambda *_: None)
            run._save = lambda log, best=False: None  # type: ignore[method-assign]
            run.run()

    found = in_turn({"bare": bare, "step": steps, "loop": loop}, repeat)
    each = 1000 / len(batches)
    return {"bare": found["bare"] * each, "step": found["step"] * each, "loop": found["loop"] * each / epochs}


def show(found: dict[str, Any]) -> Iterator[str]:
    """A line of the table."""
    yield f"{found['name']:32} {found['threads']:2}"
    yield from (f"{found[name]:8.2f} ms" for name in ("onnxgrad", "torch", "torch fused"))
    yield f"{found['ratio']:6.2f} {found['onnxgrad MB']:9.0f} {found['torch MB']:9.0f}"


def main() -> None:
    """Measure and print; the rows as JSON too, with --json FILE."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of each")
    parser.add_argument("--only", nargs="*", help="part of a row's name; 'adapters' and 'loop' are the last two lines")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    def wanted(name: str) -> bool:
        return not arguments.only or any(part in name for part in arguments.only)

    head = f"{'a step with AdamW':29} threads {'onnxgrad':>11} {'PyTorch':>11} {'fused':>11}  ratio   MB ours    theirs"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        print(head)
        for row in filter(lambda row: wanted(row.name), ROWS):
            for threads in arguments.threads:
                rows.append(compare(row, arguments.repeat, threads, Path(folder)))
                print(" ".join(show(rows[-1])), flush=True)
        if wanted("adapters"):
            found = adapters(arguments.repeat, arguments.threads[0], Path(folder))
            rows.append(found)
            print(f"{found['name']}, rank 8: {found['adapters']:.1f} ms and {found['adapters MB']:.0f} MB ", end="")
            print(f"instead of {found['all']:.1f} ms and {found['all MB']:.0f} MB")
        if wanted("loop"):
            found = overhead(arguments.repeat, Path(folder))
            rows.append({"name": "loop", **found})
            added = {name: found[name] - found["bare"] for name in ("step", "loop")}
            bound = 50 + 0.02 * found["bare"]
            print(f"a bare run takes {found['bare']:.1f} µs; Trainer.step adds {added['step']:.1f} µs, ", end="")
            print(f"the loop {added['loop']:.1f} µs (the bound is {bound:.1f} µs)")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
