"""Time and memory of the diagonal of a Hessian and of a Laplacian, beside torch.func and JAX.

    python -m benchmarks.curvature [--inputs N ...] [--batch N] [--repeat N]

The network is a perceptron N-256-256-1 with tanh. The derivatives are per sample, in float32, on one thread. Each tool
computes Hessian-vector products with all unit vectors, in blocks, and runs in a process of its own. The time is the
least CPU time of a run after the first; the memory is the growth of the peak resident memory during the runs. JAX is
left out if it is not installed. Results that differ by more than a thousandth of the largest entry end the run.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import resource
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

KINDS = ("hessian-diagonal", "laplacian")
HIDDEN = 256
BLOCK = 64
"""Unit vectors that torch.func and JAX process at once, about as many as onnxgrad for 1,024 inputs and 32 samples."""

Arrays = list[np.ndarray]
Step = Callable[[], np.ndarray]


def layers(inputs: int) -> tuple[Arrays, Arrays]:
    """The weights, [in, out], and the biases."""
    rng = np.random.default_rng(0)
    sizes = (inputs, HIDDEN, HIDDEN, 1)
    pairs = list(itertools.pairwise(sizes))
    weights = [(rng.standard_normal(pair) / np.sqrt(pair[0])).astype(np.float32) for pair in pairs]
    return weights, [rng.standard_normal(out).astype(np.float32) for _, out in pairs]


def by_onnxgrad(kind: str, weights: Arrays, biases: Arrays, x: np.ndarray) -> Step:
    """Export with PyTorch, derive, and run with onnxruntime. Prints the nodes and the seconds of the derivation."""
    import onnx
    import onnxruntime

    from benchmarks.models import export
    from onnxgrad_cli.derivatives.kinds import derive
    from onnxgrad_cli.ir.node_values import with_bodies
    from onnxgrad_cli.options import Options

    torch, net = _module(weights, biases)
    with TemporaryDirectory() as folder:
        model = onnx.load(export(net, torch.from_numpy(x), Path(folder) / "net.onnx"))
    start = time.process_time()
    derived = derive(model, kind, wrt=["x"], per_sample=True, options=Options(dims={"batch": len(x)}))  # type: ignore[arg-type]
    nodes = sum(1 for _ in with_bodies(derived.graph.node))
    print(f"    onnxgrad: {nodes} nodes, derived in {time.process_time() - start:.2f} s", flush=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(derived.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})[0]


def _module(weights: Arrays, biases: Arrays) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    linear = [nn.Linear(*w.shape) for w in weights]
    with torch.no_grad():
        for layer, w, b in zip(linear, weights, biases, strict=True):
            layer.weight.copy_(torch.from_numpy(w.T.copy()))
            layer.bias.copy_(torch.from_numpy(b))
    net = nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])
    return torch, net.eval().requires_grad_(False)


def by_torch(kind: str, weights: Arrays, biases: Arrays, x: np.ndarray) -> Step:
    """Forward over reverse, vectorized over blocks of unit vectors that all samples share."""
    torch, net = _module(weights, biases)
    given, units = torch.from_numpy(x), torch.eye(x.shape[1])

    def entries(unit: Any) -> Any:
        gradient = torch.func.grad(lambda x: net(x).sum())
        return (torch.func.jvp(gradient, (given,), (unit.expand_as(given),))[1] * unit).sum(1)

    def step() -> np.ndarray:
        found = torch.func.vmap(entries, chunk_size=BLOCK)(units).T
        return (found if kind == "hessian-diagonal" else found.sum(1)).numpy()

    return step


def by_jax(kind: str, weights: Arrays, biases: Arrays, x: np.ndarray) -> Step:
    """Forward over reverse, compiled, over blocks of unit vectors that all samples share."""
    import jax
    import jax.numpy as jnp

    def net(x: Any) -> Any:
        for w, b in zip(weights[:-1], biases[:-1], strict=True):
            x = jnp.tanh(x @ w + b)
        return x @ weights[-1] + biases[-1]

    @jax.jit
    def derivatives(x: Any) -> Any:
        def entries(unit: Any) -> Any:
            gradient = jax.grad(lambda x: net(x).sum())
            return (jax.jvp(gradient, (x,), (jnp.broadcast_to(unit, x.shape),))[1] * unit).sum(1)

        found = jax.lax.map(entries, jnp.eye(x.shape[1], dtype=x.dtype), batch_size=BLOCK).T
        return found if kind == "hessian-diagonal" else found.sum(1)

    return lambda: np.asarray(derivatives(x))


TOOLS = {"onnxgrad": by_onnxgrad, "torch.func": by_torch, "JAX": by_jax}


def _measure(tool: str, kind: str, inputs: int, batch: int, repeat: int, answer: Connection) -> None:
    """Send the seconds, the growth of the peak memory in MB, and the result."""
    x = np.random.default_rng(1).standard_normal((batch, inputs)).astype(np.float32)
    step = TOOLS[tool](kind, *layers(inputs), x)
    before, times, found = _peak(), [], step()
    for _ in range(repeat):
        start = time.process_time()
        found = step()
        times.append(time.process_time() - start)
    answer.send((min(times), _peak() - before, found))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    tools = [tool for tool in TOOLS if tool != "JAX" or find_spec("jax")]
    processes = multiprocessing.get_context("spawn")
    for kind in KINDS:
        for inputs in arguments.inputs:
            print(f"{kind}, {inputs} inputs, {arguments.batch} samples", flush=True)
            expected = None
            for tool in tools:
                ours, theirs = processes.Pipe()
                given = (tool, kind, inputs, arguments.batch, arguments.repeat, theirs)
                process = processes.Process(target=_measure, args=given)
                process.start()
                theirs.close()
                seconds, memory, found = ours.recv()
                process.join()
                expected = found if expected is None else expected
                error = np.abs(found - expected).max() / np.abs(expected).max()
                assert error < 1e-3, f"{tool} differs by {error:.1e} of the largest entry"
                print(f"{tool:>12} {seconds * 1e3:9.1f} ms {memory:7.0f} MB", flush=True)


if __name__ == "__main__":
    main()
