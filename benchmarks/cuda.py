"""What a step costs on a graphics card: onnxruntime's CUDA provider beside PyTorch, eager and compiled, in one run.

    python -m benchmarks.cuda FOLDER [--only NAME ...] [--precision float32 float16] [--rounds N] [--prepare]

It needs onnxruntime-gpu in the place of onnxruntime, and a PyTorch that sees the card. FOLDER keeps exports and
training models; with --prepare they are made and PyTorch compiles, and nothing is measured, so that several rows can be
made ready at the same time. Training models are for their batch's sizes and for the target ort-cuda. They run as they
are, and captured as a CUDA graph, which the card then starts at once. Batch, weights and gradients lie on the card for
all. Products are in TF32 for all, convolutions by cuDNN's heuristics (PyTorch: by trial); first, loss and gradients
must be PyTorch's in float32 proper. In float16 all of the network is in float16, and there is no optimizer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from benchmarks import models
from benchmarks.interleaved import RATE, quartiles
from benchmarks.systems.pytorch import Step
from benchmarks.workloads import Draw, Kind, Row, chosen
from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.execution.interleaved_timing import block, rounds
from onnxgrad_cli.execution.session import CPU, Buffer, take_out
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.training.steps.base import numpy_type

SIZES = {"resnet50": 32, "bert_classifier": 16, "gpt2": 8, "vit_small": 32}
"""The networks, and the batch of each: what fills a card without being all of it."""

CARD, CUDA = "cuda", "CUDAExecutionProvider"
"""What PyTorch calls the card, and onnxruntime's provider for it."""

AGREE = {"exact": (1e-4, 1e-3), "float32": (2e-3, 1e-2), "float16": (1e-2, 5e-2)}
"""How far loss and norm of the gradients may be from PyTorch's: in float32 proper, with TF32, in float16."""


def resized(row: Row, batch: int) -> Row:
    """The row with another batch."""
    first = next(iter(row.inputs.values())).shape[0]

    def draw(value: Draw) -> Draw:
        return replace(value, shape=(value.shape[0] // first * batch, *value.shape[1:]))

    name = row.name.replace(f"batch {first}", f"batch {batch}").replace(f" {first} x", f" {batch} x")
    inputs = {key: draw(value) for key, value in row.inputs.items()}
    return replace(row, name=name, inputs=inputs, label=draw(row.label))


class Case:
    """A network in one precision: its files, and the batch."""

    def __init__(self, row: Row, precision: str, folder: Path) -> None:
        self.row, self.precision, self.folder = row, precision, folder
        self.half = precision == "float16"
        self.batch = {
            name: array.astype(np.float16) if self.half and array.dtype == np.float32 else array
            for name, array in row.batch().items()
        }

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of steps that are measured."""
        return ("gradients",) if self.half else ("gradients", "adamw")

    def module(self) -> Any:
        """The network in PyTorch, on the card."""
        module = self.row.module().to(CARD)
        return module.half() if self.half else module

    def training_model(self, kind: Kind, target: str = "ort-cuda") -> Path:
        """The file of a training model, which is made where it is not there."""
        stem = self.folder / f"{self.row.net}.{self.precision}"
        path = stem.with_suffix(f".{self.precision}.{kind}.{target}.onnx")
        if not path.exists():
            source = stem.with_suffix(f".{self.precision}.onnx")
            if not source.exists():
                example = tuple(torch.tensor(self.batch[name], device=CARD) for name in self.row.inputs)
                models.export(self.module(), example, source, tuple(self.row.inputs), self.row.axes)
            shapes = {name: draw.shape for name, draw in self.row.inputs.items()}
            optimizer = "adamw" if kind == "adamw" else ""
            loss = LossSpec("cross-entropy")
            options = Options(
                losses=(loss,), label="y", optimizer=optimizer, mode="train", target=target, shapes=shapes
            )
            onnx.save(build(source, options).model, path)
        return path


def in_pytorch(case: Case, kind: Kind, compiled: bool) -> Step:
    """A step in PyTorch, on the card, with its fused optimizer."""
    variant = "adamw-fused" if kind == "adamw" else kind
    return Step(case.module(), dict(case.batch), variant, CARD, compiled)


class OnCard:
    """A step of a training model on onnxruntime's CUDA provider: all that it reads and writes lies on the card."""

    def __init__(
        self, case: Case, kind: Kind, graph: bool = False, exact: bool = False, profile: Path | None = None
    ) -> None:
        path = case.training_model(kind)
        model = onnx.load(path)
        self.roles = describe(model)
        given = {tensor.name for tensor in model.graph.initializer}
        held = [n for n, role in self.roles.inputs.items() if role in ("weight", "state") and n in given]
        model, values = take_out(model, held, path)
        values |= self.roles.begun(values)
        fed = {name: case.batch.get(name, np.array(RATE, np.float32)) for name in self.roles.fed}
        made = self.roles.successors if self.roles.optimizer else self.roles.gradients
        outputs = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(outputs[name] for name in (self.roles.loss, *made.values()))
        self.session = _session(model, graph, exact, profile)
        fed_there, held_there = ({name: _there(array) for name, array in each.items()} for each in (fed, values))
        self._written = {name: _there(np.empty_like(values[name])) for name in made}
        self._loss = _there(np.zeros((), numpy_type(outputs[self.roles.loss].type)))
        sides = [(held_there, self._written)]
        if self.roles.optimizer:
            sides.append((held_there | self._written, held_there))
        self._runs = [
            (
                self._bind(fed_there | before, {made[name]: after[name] for name in made}),
                _run_options(i if graph else 0),
            )
            for i, (before, after) in enumerate(sides, 1)
        ]

    def _bind(self, read: dict[str, Any], written: dict[str, Any]) -> Any:
        binding = self.session.io_binding()
        for name, value in read.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in {self.roles.loss: self._loss, **written}.items():
            binding.bind_ortvalue_output(name, value)
        return binding

    def step(self) -> float:
        """The loss before the step."""
        self.session.run_with_iobinding(*self._runs[0])
        self._runs = self._runs[::-1]
        return float(self._loss.numpy())

    def norm(self) -> float:
        """Of all gradients together."""
        found = (value.numpy().astype(np.float64) for value in self._written.values())
        return math.sqrt(sum(float(np.vdot(array, array)) for array in found))


def _there(array: np.ndarray) -> Any:
    """The array on the card."""
    return Buffer(array, CUDA).value


def _run_options(captured: int) -> onnxruntime.RunOptions:
    """Options of runs that are captured as the graph of this number; 0 is none."""
    options = onnxruntime.RunOptions()
    if captured:
        options.add_run_config_entry("gpu_graph_id", str(captured))
    return options


def _session(model: onnx.ModelProto, graph: bool, exact: bool, profile: Path | None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    given = {"use_tf32": "0" if exact else "1", "cudnn_conv_algo_search": "HEURISTIC"}
    given |= {"enable_cuda_graph": "1"} if graph else {}
    providers = [(CUDA, given), CPU]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)


def on_the_processor(case: Case) -> tuple[int, Counter[str]]:
    """The nodes of a step, and the operators of those that the card does not run."""
    system = OnCard(case, "gradients", profile=case.folder / "profile")
    system.step()
    events = json.loads(Path(system.session.end_profiling()).read_text())
    nodes = {e["name"]: e["args"] for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")}
    left = Counter(a["op_name"] for a in nodes.values() if a["provider"] != CUDA)
    return len(nodes), left + Counter(a["op_name"] for a in nodes.values() if a["op_name"].startswith("Memcpy"))


def tf32(on: bool) -> None:
    """Let PyTorch take TF32 for products and convolutions, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def agree(what: str, ours: Any, theirs: Any, limits: tuple[float, float]) -> tuple[float, float]:
    """How far loss and norm of the gradients differ, after a step each.

    Raises:
        AssertionError: too far.
    """
    pairs = [(ours.step(), theirs.step()), (ours.norm(), theirs.norm())]
    found = [abs(a - b) / abs(b) for a, b in pairs]
    assert all(a <= b for a, b in zip(found, limits, strict=True)), f"{what}: {pairs}"
    return found[0], found[1]


def measure(case: Case, count: int) -> Iterator[str]:
    """The lines of a row: each a kind of step."""
    name = f"{case.row.name}, {case.precision}"
    if not case.half:
        tf32(False)
        off = agree(name, OnCard(case, "gradients", exact=True), in_pytorch(case, "gradients", False), AGREE["exact"])
        yield f"{name}: in float32 proper, loss and gradients differ by {off[0]:.1e} and {off[1]:.1e}"
        tf32(True)
    for kind in case.kinds:
        make: dict[str, Callable[[], Any]] = {
            "onnxgrad": lambda kind=kind: OnCard(case, kind),
            "captured": lambda kind=kind: OnCard(case, kind, graph=True),
            "PyTorch": lambda kind=kind: in_pytorch(case, kind, False),
            "compiled": lambda kind=kind: in_pytorch(case, kind, True),
        }
        systems = {key: each() for key, each in make.items()}
        if kind == "gradients":
            for key in ("onnxgrad", "captured"):
                agree(f"{name}, {key}", systems[key], systems["PyTorch"], AGREE[case.precision])
        firsts = {key: [system.step() for _ in range(3)] for key, system in systems.items()}
        found = rounds({key: lambda s=system: block(s.step) for key, system in systems.items()}, count)
        yield f"| {name} | {kind} | " + " | ".join(_cells(found)) + f" | {firsts}"
    nodes, left = on_the_processor(case)
    yield f"{name}: of {nodes} nodes on the processor or between: {dict(left) or 'none'}"


def _cells(found: dict[str, Sequence[float]]) -> Iterator[str]:
    """Medians in milliseconds, and ratios of ours to PyTorch's, eager and compiled, with the quartiles of rounds'."""
    for seconds in found.values():
        yield f"{statistics.median(seconds) * 1e3:.2f}"
    for ours in ("onnxgrad", "captured"):
        for theirs in ("PyTorch", "compiled"):
            low, _, high = quartiles([a / b for a, b in zip(found[ours], found[theirs], strict=True)])
            yield f"{statistics.median(found[ours]) / statistics.median(found[theirs]):.2f} [{low:.2f}-{high:.2f}]"


def main() -> None:
    """Prepare, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precision", nargs="*", choices=("float32", "float16"), default=("float32", "float16"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prepare", action="store_true", help="make the models and compile, nothing else")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    onnxruntime.preload_dlls()  # those that PyTorch has brought
    tf32(True)
    torch.backends.cudnn.benchmark = True
    for precision in arguments.precision:
        for net in arguments.only:
            case = Case(resized(chosen([net])[0], SIZES[net]), precision, arguments.folder)
            if arguments.prepare:
                for kind in case.kinds:
                    case.training_model(kind)
                in_pytorch(case, "gradients", True).step()
            else:
                for line in measure(case, arguments.rounds):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
