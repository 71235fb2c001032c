"""What a step of low-rank adapters of a model of 4 bits costs: beside its inference, and beside float32 in PyTorch.

    python -m benchmarks.qlora [--repeat N] [--threads N] [--rank N] [--only NAME ...]

A step is forward and backward on one batch; the adapters are of every matrix of 4 bits. PyTorch's network has the same
shapes in float32, and adapters written as PEFT writes them, y = x W + (x A) B, W frozen; another row has those of PEFT
itself, where it is installed. Times are of interleaved blocks; memory is the peak of a process of its own, less that of
one which only imports what it takes.

What the stack takes at least, in processor time of one thread, of its inference: 1 for the forward part, 1.14 to unpack
its matrices, which are 33.6 million numbers, and 0.67 for the products with floats, which read 134 MB; 2.8 without the
adapters. Below that is another form of dX = G W, where a column block of W has the scales s: (G s) Q by the kernel of
few bits, on bytes that are packed along the other axis. It takes 1.27 in place of 1.81, which would be 2.3 in all, and
a second copy of all bytes, 0.35 of the memory of inference. It is not written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.build import elsewhere
from benchmarks.interleaved import Refused, Worker, serve
from onnxgrad_cli.execution.interleaved_timing import rounds

INFERENCE, OURS, TORCH = "inference, 4 bits", "training, 4 bits", "PyTorch, float32"
PEFT = "PEFT, float32"
RECOMPUTED, WHOLE = "--recompute block:auto", "--loss-chunks 1"
FILES = {INFERENCE: "model", OURS: "train", RECOMPUTED: "recomputed", WHOLE: "whole"}
"""The models that onnxruntime runs; the last two are of the decoder alone."""

WORDS = 151_936
"""Of the decoder."""

CASES = {
    "stack": "8 layers of 2048 x 2048, batch 8",
    "wide-batch": "8 layers of 2048 x 2048, batch 256",
    "decoder": "Qwen2.5-0.5B's shape, sequence 256, batch 1",
}


def prepare(case: str, rank: int, folder: Path) -> None:
    """Write the model, its training model and a batch."""
    from benchmarks.models.few_bits import decoder, stack
    from onnxgrad_cli import LossSpec, Options, build
    from onnxgrad_cli.options import LoraSpec, RecomputeSpec

    rng = np.random.default_rng(0)
    model = decoder() if case == "decoder" else stack()
    if case == "decoder":
        ids = rng.integers(0, WORDS, (1, 256))
        batch, loss = {"ids": ids, "label": ids}, "causal-lm"
    else:
        rows = 8 if case == "stack" else 256
        batch = {name: rng.standard_normal((rows, 2048)).astype(np.float32) for name in ("x", "label")}
        loss = "mse"
    np.savez(folder / "batch.npz", **batch)  # type: ignore[arg-type]
    onnx.save(model, folder / "model.onnx")
    variants: dict[str, dict[str, Any]] = {OURS: {}}
    if case == "decoder":
        variants |= {RECOMPUTED: {"recompute": RecomputeSpec("block", "auto")}, WHOLE: {"loss_chunks": 1}}
    for system, own in variants.items():
        trained = build(model, Options(lora=LoraSpec(rank), losses=(LossSpec(loss),), **own)).model
        _off_zero(trained)
        onnx.save(trained, folder / f"{FILES[system]}.onnx")


def _off_zero(trained: onnx.ModelProto) -> None:
    """Let factors that begin at zero be others: they would leave A without a gradient."""
    rng = np.random.default_rng(1)
    for tensor in trained.graph.initializer:
        if tensor.name.endswith("lora_B"):
            values = rng.standard_normal(list(tensor.dims)).astype(np.float32) / 100
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


class Session:
    """A run of a model from its file, all outputs of which are fetched; weights have the values in the file."""

    def __init__(self, file: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level, options.enable_mem_pattern = threads, 3, False
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        own = {value.name for value in self._session.get_inputs()}
        self._batch = {name: x for name, x in np.load(file.parent / "batch.npz").items() if name in own}

    def step(self) -> float:
        """The loss, which is the first output; of inference, an output's mean."""
        return float(self._session.run(None, self._batch)[0].mean())


class Torch:
    """Forward and backward of a network of the same shapes in float32."""

    def __init__(self, folder: Path, threads: int, case: str, rank: int, peft: bool = False) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        with torch.no_grad():
            self._net = _torch_network(case, 0 if peft else rank)
        if peft:
            _adapt(self._net, rank)
        batch = np.load(folder / "batch.npz")
        self._x, self._label = (torch.tensor(batch[name]) for name in ("ids" if case == "decoder" else "x", "label"))

    def step(self) -> float:
        """The loss."""
        import torch

        self._net.zero_grad()
        y = self._net(self._x)
        if y.shape == self._label.shape:
            loss = torch.nn.functional.mse_loss(y, self._label)
        else:
            loss = torch.nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), self._label[:, 1:].flatten())
        loss.backward()
        return float(loss)


def _adapt(net: Any, rank: int) -> None:
    """Let PEFT add its adapters to all linear modules."""
    from peft import LoraConfig, inject_adapter_in_model
    from torch import nn

    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=names), net)


def _torch_network(case: str, rank: int) -> Any:
    """The network in float32; with adapters of `rank`, or plain linear modules where that is 0."""
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention, silu

    class WithAdapter(nn.Module):
        def __init__(self, columns: int, rows: int) -> None:
            super().__init__()
            self.base = nn.Linear(columns, rows, bias=False).requires_grad_(False)
            self.a, self.b = nn.Linear(columns, rank, bias=False), nn.Linear(rank, rows, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    def Adapted(columns: int, rows: int) -> nn.Module:
        return WithAdapter(columns, rows) if rank else nn.Linear(columns, rows, bias=False).requires_grad_(False)

    if case != "decoder":
        return nn.Sequential(*(part for _ in range(8) for part in (Adapted(2048, 2048), nn.Tanh())))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(896).requires_grad_(False) for _ in range(2))
            self.q, self.k, self.v, self.o = (Adapted(896, n) for n in (896, 128, 128, 896))
            self.gate, self.up, self.down = Adapted(896, 4864), Adapted(896, 4864), Adapted(4864, 896)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            x = self.norms[0](h)
            q, k, v = (part(x).unflatten(-1, (-1, 64)).transpose(1, 2) for part in (self.q, self.k, self.v))
            seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            h = h + self.o(seen.transpose(1, 2).flatten(-2))
            x = self.norms[1](h)
            return h + self.down(silu(self.gate(x)) * self.up(x))

    embed = nn.Embedding(WORDS, 896).requires_grad_(False)
    norm = nn.RMSNorm(896).requires_grad_(False)
    return nn.Sequential(embed, *(Layer() for _ in range(24)), norm, Adapted(896, WORDS))


def work(system: str, folder: Path, threads: int, case: str, rank: int) -> None:
    """Be the process of one system."""
    if system == TORCH:
        import torch  # noqa: F401 (counted among the imports)

        return serve(lambda: Torch(folder, threads, case, rank))
    if system == PEFT:
        import peft  # noqa: F401

        return serve(lambda: Torch(folder, threads, case, rank, peft=True))
    import onnxruntime  # noqa: F401

    return serve(lambda: Session(folder / f"{FILES[system]}.onnx", threads))


def measure(case: str, repeat: int, threads: int, rank: int) -> str:
    """What the systems take, as lines of a table."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as open_ones:
        folder = Path(name)
        elsewhere(prepare, case, rank, folder)
        workers: dict[str, Worker] = {}
        lines = [f"{CASES[case]}, {threads} thread{'s' * (threads > 1)}"]
        systems = [INFERENCE, OURS, *((RECOMPUTED, WHOLE) if case == "decoder" else ()), TORCH]
        systems += [PEFT] * (find_spec("peft") is not None)
        for system in systems:
            command = [sys.executable, "-m", "benchmarks.qlora", "--work", system, name, str(threads), case, str(rank)]
            try:
                workers[system] = Worker(command, folder)
            except Refused as error:
                lines.append(f"  {system:22} refused: {error}")
                continue
            open_ones.callback(workers[system].close)
        times = rounds({system: worker.block for system, worker in workers.items()}, repeat)
        memory = {system: worker.memory()["all"] for system, worker in workers.items()}
        lines.append(_stored(folder / "model.onnx"))
    for system, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times[INFERENCE], strict=True))
        milliseconds, megabytes = statistics.median(seconds) * 1e3, memory[system]
        share = megabytes / memory[INFERENCE]
        lines.append(f"  {system:22} {milliseconds:9.1f} ms ({ratio:.2f})  {megabytes:7.0f} MB ({share:.2f})")
    return "\n".join(lines)


def _stored(file: Path) -> str:
    """What the model's file stores, as a line: what has an entry for each word of a vocabulary counts apart."""
    sizes = [(tensor.dims[0], len(tensor.raw_data) / 1e6) for tensor in onnx.load(file).graph.initializer]
    words = sum(size for rows, size in sizes if rows == WORDS)
    return f"  stored: {sum(size for _, size in sizes) - words:.0f} MB of weights, {words:.0f} MB by words"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="these cases")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        system, folder, threads, case, rank = arguments.work
        return work(system, Path(folder), int(threads), case, int(rank))
    for case in arguments.only:
        print(measure(case, arguments.repeat, arguments.threads, arguments.rank))


if __name__ == "__main__":
    main()
