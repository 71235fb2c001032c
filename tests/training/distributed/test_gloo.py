"""Processes under torchrun and Slurm train as one: through the command, beside one process and beside PyTorch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad_cli.common.launchers import Launch
from onnxgrad_cli.common.narration import silent
from onnxgrad_cli.data import Batches, Data
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.training.distributed import gloo, liveness
from onnxgrad_cli.training.distributed.communicator import RankError
from onnxgrad_cli.training.distributed.gloo import Gloo
from onnxgrad_cli.training.run.folder import load_checkpoint
from tests.cli_harness import PROGRAM
from tests.facts import facts

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "sample_models" / "digits_mlp.onnx"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data = np.load(ROOT / "sample_models" / "digits.npz")
    np.savez("digits.npz", x=data["train_x"][:331], y=data["train_y"][:331])
    np.savez("val.npz", x=data["test_x"][:50], y=data["test_y"][:50])
    return tmp_path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def torchrun(world: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    return [*launcher, "--master-port", str(free_port()), "--no-python", "--", *PROGRAM, *arguments]


def command(out: str, *more: str, model: Path = MODEL) -> tuple[str, ...]:
    data = () if "--data" in more else ("--data", "digits.npz")
    loss = () if "--loss" in more else ("--loss", "cross-entropy", "--label", "y")
    return ("train", str(model), *data, *loss, "--batch-size", "32", "--threads", "1", "-o", out, *more)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


# -- in threads of one process -----------------------------------------------------------------------------------------


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(gloo, "CONNECT", 5.0)
    monkeypatch.setattr(gloo, "REPORT", 2.0)
    monkeypatch.setattr(gloo, "COLLECTIVE", timedelta(seconds=10))
    monkeypatch.setattr(liveness, "SILENT", 0.3)
    monkeypatch.setattr(liveness, "PERIOD", 0.05)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    return free_port()


def in_threads(function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """Call a function in two threads, with the arguments of each, and return both results."""
    with ThreadPoolExecutor(2) as pool:
        return [each.result(timeout=60) for each in [pool.submit(function, *given) for given in zip(*arguments)]]  # noqa: B905


@contextmanager
def joined(port: int) -> Iterator[list[Gloo]]:
    links = in_threads(lambda rank: Gloo(Launch("torchrun", rank, 2, "127.0.0.1", port), silent), (0, 1))
    try:
        yield links
    finally:
        in_threads(Gloo.close, links)


def test_arrays_are_summed_and_values_come_from_the_first(port: int) -> None:
    arrays = [np.array([1.0, 2.0], np.float32), np.array([10.0, 20.0], np.float32)]
    value = {"names": ["a"] * 1000, "array": np.arange(3)}
    with joined(port) as links:
        assert [(link.rank, link.world) for link in links] == [(0, 2), (1, 2)]
        in_threads(Gloo.all_reduce, links, arrays)
        assert [array.tolist() for array in arrays] == [[11.0, 22.0]] * 2
        for found in in_threads(Gloo.broadcast, links, (value, "ignored")):
            assert found["names"] == value["names"] and found["array"].tolist() == [0, 1, 2]


def test_an_error_of_one_reaches_the_other(port: int) -> None:
    error = OnnxgradError("no file 'a'", "look again", code="missing_file")

    def run(link: Gloo) -> OnnxgradError | None:
        if link.rank == 1:
            return link.fail(error)
        with pytest.raises(RankError) as found:
            link.all_reduce(np.ones(1))
        assert (found.value.rank, *facts(found.value)) == (1, "missing_file", "1", "a")
        return link.fail(found.value)

    with joined(port) as links:
        reported = in_threads(run, links)
    assert reported[0] is not None and reported[0].hint == "look again" and facts(reported[0])[2:] == ("a",)
    assert reported[1] is None  # rank 0 reports it


def test_a_process_that_ends_is_named(port: int) -> None:
    with joined(port) as links:
        links.pop().close()
        with pytest.raises(RankError) as lost:
            links[0].all_reduce(np.ones(1))
    assert facts(lost.value) == ("failed", "1")


def test_a_restarted_run_does_not_read_errors_of_the_one_before(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives the processes."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(gloo, "REPORT", 0.2)
    with joined(port) as links:
        assert links[1].fail(OnnxgradError("no file")) is not None  # rank 0 says nothing
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    arrays = [np.ones(1), np.ones(1)]
    with joined(port) as links:
        in_threads(Gloo.all_reduce, links, arrays)
    assert arrays == [2.0, 2.0]
    assert store.check([f"onnxgrad/{restarts}/alive/{rank}" for restarts in range(2) for rank in range(2)])


def test_processes_that_find_nobody_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "CONNECT", 0.2)
    monkeypatch.setattr(liveness, "PATIENCE", 0.05)
    for rank in range(2):
        told: list[str] = []
        with pytest.raises(OnnxgradError) as failed:
            Gloo(Launch("torchrun", rank, 2, "127.0.0.1", port), lambda text, level: told.append(text))  # noqa: B023
        assert failed.value.hint and failed.value.exit_code == 1
        assert [line.endswith(" rank 1") for line in told] == [True] * (rank == 0)


def weights_of(path: str | Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t).astype(np.float64) for t in onnx.load(path).graph.initializer}


def error_of(found: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference, over the largest weight."""
    largest = max(np.abs(array).max() for array in found.values())
    return float(max(np.abs(found[name] - other[name]).max() for name in found) / largest)


def epochs_of(folder: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(folder) / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if "rate" not in line]


@pytest.mark.slow
def test_two_processes_are_one(folder: Path) -> None:
    more = ("--val", "val.npz", "--metric", "accuracy", "--epochs", "2", "--optimizer", "adamw")
    two = run(torchrun(2, *command("two.onnx", *more, "--run", "log")))
    assert two.returncode == 0, two.stderr
    assert two.stderr.count("2 processes train together") == two.stderr.count("wrote two.onnx\n") == 1
    assert two.stderr.count("epoch 1/2") == 1 and two.stdout.count("epoch ") == 1
    one = run([*PROGRAM, *command("one.onnx", *more)])
    assert one.returncode == 0 and one.stdout == two.stdout
    assert error_of(weights_of("one.onnx"), weights_of("two.onnx")) < 1e-6


# -- processes that fail --------------------------------------------------------------------------------------------


def ranks() -> dict[int, list[int]]:
    """The processes of the command in this folder, by rank: each has a child that trains."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(e.split(b"=", 1) for e in (entry / "environ").read_bytes().split(b"\0") if b"=" in e)
            here = (entry / "cwd").samefile(".")
        except (OSError, ValueError):
            continue
        if here and b"TORCHELASTIC_RUN_ID" in environment:
            found.setdefault(int(environment[b"RANK"]), []).append(int(entry.name))
    return {rank: sorted(processes) for rank, processes in found.items()}


def begun(world: int, *more: str) -> subprocess.Popen[str]:
    """A long run that has written a checkpoint."""
    arguments = command("long.onnx", "--epochs", "100000", "--save-every", "3", *more)
    launched = subprocess.Popen(
        torchrun(world, *arguments), env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    limit = time.monotonic() + 60
    while not Path("long.onnx.run/checkpoint.safetensors").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    return launched


def assert_killed(world: int, killed: int) -> None:
    launched = begun(world)
    processes = ranks()
    os.kill(processes[killed][-1], signal.SIGKILL)
    start = time.monotonic()
    _, said = launched.communicate(timeout=60)
    assert time.monotonic() - start < 20 and launched.returncode == 1
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and errors[0].startswith(f"error: rank {killed} ended without an error message"), said
    assert not any(Path(f"/proc/{process}").exists() for each in processes.values() for process in each)
    progress = load_checkpoint(Path("long.onnx.run/checkpoint.safetensors"))[1]
    assert progress["steps"] >= 3
    more = ("--epochs", str(len(progress["run"]["epochs"]) + 1), "--resume")
    done = run([*PROGRAM, *command("long.onnx", *more)])
    assert done.returncode == 0 and "continuing after step" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the system does not list processes in /proc")
@pytest.mark.parametrize(("world", "killed"), [(2, 0), (2, 1), (4, 0), (4, 2)])
@pytest.mark.thinned(2)
def test_any_killed_process_ends_all(folder: Path, world: int, killed: int) -> None:
    assert_killed(world, killed)


ONE_FAILS = """
import os, sys
arguments = sys.argv[1:]
if os.environ["RANK"] == "{rank}":
    name, value = {more!r}
    if name in arguments:
        arguments[arguments.index(name) + 1] = value
    else:
        arguments += [name, value]
os.execv(sys.executable, [sys.executable, "-m", "onnxgrad_cli", *arguments])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "more", "words"),
    [
        (1, ["--data", "none.npz"], "rank 1: no such file or folder: 'none.npz'"),
        (0, ["--data", "none.npz"], "no such file or folder: 'none.npz'"),
        (1, ["--batch-size", "31"], "the processes have different options"),
        (1, ["--data", "other.npz"], "the processes have different data"),
    ],
    ids=str,
)
@pytest.mark.thinned(2)
def test_an_error_of_one_ends_all(folder: Path, rank: int, more: list[str], words: str) -> None:
    data = dict(np.load("digits.npz"))
    data["y"][7] += 1
    np.savez("other.npz", **data)
    Path("program.py").write_text(ONE_FAILS.format(rank=rank, more=more))
    launcher = torchrun(3)
    done = run([*launcher[: launcher.index("--no-python")], "--", "program.py", *command("a.onnx")])
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == [f"error: {words}"], done.stderr
    assert not Path("a.onnx").exists()


@pytest.mark.slow
def test_an_error_of_all_is_reported_once(folder: Path) -> None:
    for more, words in (
        (("--data", "none.npz"), "error: no such file or folder: 'none.npz'"),
        (("--nonsense",), "error: No such option '--nonsense'"),
    ):
        done = run(torchrun(2, *command("a.onnx", *more)))
        errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert done.returncode == 1 and len(errors) == 1 and errors[0].startswith(words), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_an_interrupted_launcher_leaves_a_checkpoint(folder: Path, number: int) -> None:
    launched = begun(2)
    launched.send_signal(number)
    _, said = launched.communicate(timeout=60)
    assert "--resume continues the run" in said and "error:" not in said, said
    assert load_checkpoint(Path("long.onnx.run/checkpoint.safetensors"))[1]["steps"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, pytest.param(0, marks=pytest.mark.long), 1])
def test_slurm_without_a_supervisor(folder: Path, killed: int | None) -> None:
    """The processes of srun meet at the first node; a killed one is noticed although nobody ends the others."""
    arguments = command("a.onnx", "--epochs", "2" if killed is None else "100000", "--save-every", "3")
    step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True,
            env={**ENVIRONMENT, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(3)
    ]  # fmt: skip
    if killed is not None:
        limit = time.monotonic() + 60
        while not Path("a.onnx.run/checkpoint.safetensors").exists() and time.monotonic() < limit:
            time.sleep(0.1)
        processes[killed].kill()
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert all(process.returncode == (0 if killed is None else 1) for process in processes if process.returncode >= 0)
    errors = [line for text in said for line in text.splitlines() if line.startswith("error:")]
    if killed is None:
        assert not errors and said[1:] == ["", ""] and Path("a.onnx").exists()
    else:
        assert len(errors) == 1 and errors[0].startswith(f"error: rank {killed} ended"), said
        assert said[2] == "" and "frame #" not in said[1]


# -- what several processes compute ---------------------------------------------------------------------------------

CNN = ROOT / "sample_models" / "digits_cnn.onnx"
WEIGHTS = ",".join(map(str, np.linspace(0.2, 3, 10)))
READER = Path("reader.onnx")
TOKENS = ("--data", "tokens.jsonl", "--loss", "causal-lm:logits:labels")
POOLED = ("--data", "tokens.jsonl", "--loss", "cross-entropy:pooled:y")  # of all places, padded ones too

RUNS = {
    "sgd": (MODEL, ("--optimizer", "sgd", "--learning-rate", "0.1")),
    "adamw": (MODEL, ("--optimizer", "adamw", "--schedule", "one-cycle", "--learning-rate", "0.01")),
    "lora": (MODEL, ("--lora", "4", "--optimizer", "adamw")),
    "accumulate": (MODEL, ("--accumulate", "2", "--optimizer", "adamw")),
    "clip": (MODEL, ("--clip-norm", "0.1", "--optimizer", "sgd", "--learning-rate", "0.1")),
    "class-weights": (MODEL, ("--loss-option", f"class-weights={WEIGHTS}", "--optimizer", "momentum")),
    "ignored": (MODEL, ("--data", "ignored.npz", "--optimizer", "momentum", "--accumulate", "2")),
    "sample-weights": (MODEL, ("--sample-weight", "w", "--data", "weighted.npz", "--optimizer", "sgd")),
    "sum": (MODEL, ("--reduction", "sum", "--optimizer", "sgd")),
    "ema": (MODEL, ("--ema", "0.9", "--use-ema", "--val", "val.npz")),
    "balance": (MODEL, ("--balance", "--optimizer", "sgd", "--learning-rate", "0.1")),
    "augment": (CNN, ("--augment", "flip,crop", "--optimizer", "sgd", "--learning-rate", "0.1")),
    "tokens": (READER, (*TOKENS, "--optimizer", "sgd", "--learning-rate", "0.1")),
    "tokens-lora": (READER, (*TOKENS, "--lora", "2", "--optimizer", "adamw")),
    "padded": (READER, (*POOLED, "--optimizer", "sgd", "--learning-rate", "0.1")),
}
"""Model and options of runs of 55 steps, of which each eleventh has 11 samples."""


@pytest.fixture
def more_data(folder: Path) -> None:
    data, draw = dict(np.load("digits.npz")), np.random.default_rng(1)
    labels = data["y"].copy()
    labels[draw.random(len(labels)) < 0.6] = -100
    np.savez("ignored.npz", x=data["x"], y=labels)
    np.savez("weighted.npz", **data, w=draw.uniform(0, 2, len(labels)).astype(np.float32))
    with Path("tokens.jsonl").open("w") as stream:
        for length in draw.integers(2, 16, 331).tolist():
            row = draw.integers(0, 10, length).tolist()
            labels = [token if draw.random() < 0.5 else -100 for token in row]
            stream.write(json.dumps({"input_ids": row, "labels": labels, "y": row[0]}) + "\n")
    reader = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        reader (int64[batch, places] input_ids) => (float[batch, places, 10] logits, float[batch, 10] pooled)
        { e = Gather(embedding, input_ids)  one = Constant <value = int64 {1}> ()  c = CumSum(e, one)  t = Tanh(c)
          logits = MatMul(t, head)  m = ReduceMean <axes = [1], keepdims = 0> (t)
          pooled = MatMul(m, head) }""")
    for name, shape in (("embedding", (10, 8)), ("head", (8, 10))):
        values = draw.normal(size=shape).astype(np.float32)
        reader.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(reader, READER)


@pytest.mark.slow
@pytest.mark.usefixtures("more_data")
@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if (name, world) in (("adamw", 4), ("padded", 2)) else pytest.mark.long)
        for name in RUNS
        for world in (2, 4)
    ],
)
def test_several_processes_compute_what_one_computes(name: str, world: int) -> None:
    model, more = RUNS[name]
    more = (*more, "--epochs", "5")
    one = run([*PROGRAM, *command("1.onnx", *more, model=model)])
    assert one.returncode == 0, one.stderr
    expected = weights_of("1.onnx")
    assert error_of(expected, weights_of(str(model))) > 1e-3  # it has been trained
    several = run(torchrun(world, *command("several.onnx", *more, model=model)))
    assert several.returncode == 0, several.stderr
    assert error_of(expected, weights_of("several.onnx")) < 1e-6
    for mine, wanted in zip(epochs_of("several.onnx.run"), epochs_of("1.onnx.run"), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_several_processes_compute_what_pytorch_computes(folder: Path) -> None:
    """Steps of torch.optim.SGD on whole batches, with a mean over class weights and over labels that count."""
    import torch

    data, draw = dict(np.load("digits.npz")), np.random.default_rng(1)
    data["y"][draw.random(331) < 0.6] = -100
    np.savez("ignored.npz", **data)
    more = ("--data", "ignored.npz", "--loss-option", f"class-weights={WEIGHTS}", "--optimizer", "sgd")
    several = run(torchrun(3, *command("3.onnx", *more, "--learning-rate", "0.1", "--epochs", "5")))
    assert several.returncode == 0, several.stderr

    w = {name: torch.tensor(array, dtype=torch.float32).requires_grad_() for name, array in weights_of(MODEL).items()}
    optimizer = torch.optim.SGD(w.values(), 0.1)
    class_weights = torch.linspace(0.2, 3, 10)
    order = Batches(Data(Path(), {}, {}, 331, {}), 32)
    for _ in range(5):
        for part in order:
            h = torch.tensor(data["x"][part.indices]).flatten(1)
            for layer in ("fc1", "fc2"):
                h = torch.relu(h @ w[f"{layer}.weight"].T + w[f"{layer}.bias"])
            logits = h @ w["fc3.weight"].T + w["fc3.bias"]
            labels = torch.tensor(data["y"][part.indices])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels, class_weights).backward()
            optimizer.step()
    assert error_of({name: t.detach().double().numpy() for name, t in w.items()}, weights_of("3.onnx")) < 1e-6
