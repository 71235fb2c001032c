"""What the training loop adds to a step, in microseconds: what a user pays for checks, shuffling, batching and the log.

    python -m benchmarks.loop [--repeat N]

On a small network and batches of 32 it counts most. Measured are a bare run of the session, `Trainer.step`, and the
whole loop with its saving left out; they take turns, on one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.data import Batches, open_data
from onnxgrad_cli.execution.interleaved_timing import interleaved
from onnxgrad_cli.training.loop import TrainingLoop
from onnxgrad_cli.training.run.folder import run_folder
from onnxgrad_cli.training.schedules import parse_schedule
from onnxgrad_cli.training.trainer import Trainer, WholeStep

SAMPLES = Path(__file__).parents[1] / "sample_models"
EPOCHS = 10
"""That the loop runs at a time."""


def overhead(repeat: int, folder: Path) -> dict[str, float]:
    """Microseconds of a step on digits: a bare run of the session, `Trainer.step`, and the loop, saving aside."""
    model = onnx.load(SAMPLES / "digits_mlp.onnx")
    losses = (LossSpec("cross-entropy"),)
    trainer = Trainer(build(model, Options(losses=losses, label="y", optimizer="adamw")), threads=1)
    data = open_data(SAMPLES / "digits.npz", trainer.inputs, prefix="train_")
    batches = [data.batch(part.indices) for part in Batches(data, 32)]
    whole = trainer._step
    assert isinstance(whole, WholeStep)
    for side in (0, 1):
        whole.begin(batches[side], side)  # and stays bound

    def bare() -> None:
        for i in range(len(batches)):
            whole.runs[i % 2]({})

    def steps() -> None:
        for batch in batches:
            trainer.step(batch, 1e-9)

    def loop() -> None:
        order, rates = Batches(data, 32), parse_schedule("constant", 1e-9, 1)
        with tempfile.TemporaryDirectory(dir=folder) as empty, run_folder(Path(empty)) as held:
            run = TrainingLoop(
                trainer, data, order, rates, None, "loss", False, EPOCHS, None, 0, held, bool, lambda *_: None
            )
            run._save = lambda log, best=False: None  # type: ignore[method-assign]
            run.run()

    found = interleaved({"bare": bare, "step": steps, "loop": loop}, repeat)
    each = 1000 / len(batches)
    return {"bare": found["bare"] * each, "step": found["step"] * each, "loop": found["loop"] * each / EPOCHS}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        found = overhead(parser.parse_args().repeat, Path(folder))
    added = {name: found[name] - found["bare"] for name in ("step", "loop")}
    bound = 50 + 0.02 * found["bare"]
    print(f"a bare run takes {found['bare']:.1f} µs; Trainer.step adds {added['step']:.1f} µs, ", end="")
    print(f"the loop {added['loop']:.1f} µs (the bound is {bound:.1f} µs)")


if __name__ == "__main__":
    main()
