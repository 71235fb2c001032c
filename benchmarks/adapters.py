"""What a step with low-rank adapters costs, beside one of all weights: BERT-small with AdamW.

python -m benchmarks.adapters [--repeat N] [--threads N] [--rank N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.build import elsewhere
from benchmarks.interleaved import Worker
from benchmarks.workloads import chosen, save
from onnxgrad_cli.execution.interleaved_timing import rounds
from onnxgrad_cli.options import LoraSpec


def prepare(rank: int, folder: Path) -> dict[str, Path]:
    """Write the batch and both training models."""
    (row,) = chosen(["bert_small"])
    source = row.export(folder)
    save(row.batch(), folder / "batch.npz")
    return {
        "all": row.training_model(source, "adamw"),
        "adapters": row.training_model(source, "adamw", lora=LoraSpec(rank, 2 * rank)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of each")
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_ones:
        workers: dict[str, Worker] = {}
        for name, path in elsewhere(prepare, arguments.rank, Path(folder)).items():
            given = [str(path), str(Path(folder, "batch.npz")), str(arguments.threads)]
            workers[name] = Worker([sys.executable, "-m", "benchmarks.systems.ours", *given], path.parent)
            open_ones.callback(workers[name].close)
        times = rounds({name: worker.block for name, worker in workers.items()}, arguments.repeat)
        cells = {
            name: f"{statistics.median(times[name]) * 1e3:.1f} ms and {worker.memory()['all']:.0f} MB"
            for name, worker in workers.items()
        }
    print(f"a step with adapters of rank {arguments.rank}: {cells['adapters']}, instead of {cells['all']}")


if __name__ == "__main__":
    main()
