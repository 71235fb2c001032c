"""What products, convolutions and recurrent layers take of a step, beside PyTorch: the floor of a graph on a runtime.

    python -m benchmarks.kernels [--only NAME ...] [--kind gradients|adamw] [--threads N]

A graph chooses what is multiplied and in which order; how fast a product or a convolution is, its runtime decides. Of
each step the table tells what these kernels take, by the profile of onnxruntime and by that of PyTorch, and what is
left for everything else. Where ours alone take as long as PyTorch's whole step, no graph is as fast on this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.profile import STEPS, profile
from benchmarks.workloads import KINDS, Kind, Row, chosen

OURS = frozenset("Conv ConvTranspose Einsum FusedConv FusedGemm FusedMatMul Gemm GRU LSTM MatMul RNN".split())
"""onnxruntime's operators that multiply matrices or convolve."""

THEIRS = frozenset(
    f"aten::{name}"
    for name in (
        "addmm baddbmm bmm mm convolution_backward mkldnn_convolution mkldnn_rnn_layer mkldnn_rnn_layer_backward "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
    ).split()
)
"""PyTorch's; those of attention have its softmax inside."""


def ours(row: Row, kind: Kind, threads: int, folder: Path) -> tuple[float, float]:
    """The milliseconds of a step of ours, and of its kernels."""
    whole, nodes = profile(row.training_model(row.export(folder), kind), row.batch(), threads, folder)
    return whole, sum(node.milliseconds for node in nodes if node.op in OURS)


def theirs(row: Row, kind: Kind, threads: int) -> tuple[float, float]:
    """The milliseconds of a step of PyTorch's, and of its kernels."""
    import torch

    from benchmarks.systems.pytorch import Step
    from onnxgrad_cli.execution.interleaved_timing import block

    torch.set_num_threads(threads)
    step = Step(row.net, row.batch(), kind).step
    whole = min(block(step) for _ in range(3)) * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
    spent = sum(event.self_cpu_time_total for event in seen.key_averages() if event.key in THEIRS)
    return whole, spent / STEPS / 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="networks, or parts of rows' names")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="without or with the optimizer")
    parser.add_argument("--threads", type=int, default=2, help="of each")
    arguments = parser.parse_args()
    print(
        "| milliseconds | onnxgrad | its kernels | the rest | PyTorch | its kernels | the rest | kernels to PyTorch |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in chosen(arguments.only):
        with tempfile.TemporaryDirectory() as folder:
            own, kernels = ours(row, arguments.kind, arguments.threads, Path(folder))
            other, others = theirs(row, arguments.kind, arguments.threads)
        figures = (own, kernels, own - kernels, other, others, other - others, kernels / other)
        print(f"| {row.name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
