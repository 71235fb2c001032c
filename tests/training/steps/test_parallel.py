"""Several processes train as one: with threads that talk to each other always, and under mpirun where there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgrad_cli import LossSpec, Options, build
from onnxgrad_cli.builder import TrainingModel
from onnxgrad_cli.common.narration import silent
from onnxgrad_cli.data import Batches, Data, open_data
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.train import Course, Trained, run_train
from onnxgrad_cli.options import LoraSpec
from onnxgrad_cli.training.distributed.communicator import Alone, Communicator
from onnxgrad_cli.training.run.folder import LOG, load_checkpoint
from onnxgrad_cli.training.steps.base import NotFinite, TrainerBase
from onnxgrad_cli.training.steps.parallel import ParallelTrainer
from onnxgrad_cli.training.trainer import Trainer
from tests.cli_harness import PROGRAM
from tests.communicators import together
from tests.facts import raises

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "sample_models" / "digits.npz"


def mlp(**more: Any) -> TrainingModel:
    model = onnx.load(ROOT / "sample_models" / "digits_mlp.onnx")
    losses = more.pop("losses", (LossSpec("cross-entropy"),))
    return build(model, Options(losses=losses, label="y", **{"optimizer": "momentum", **more}))


def digits(trainer: TrainerBase, count: int) -> Data:
    data = open_data(DIGITS, trainer.inputs, prefix="train_")
    return replace(data, size=count, arrays={name: array[:count] for name, array in data.arrays.items()})


def trained(trainer: TrainerBase, link: Communicator, steps: int = 6) -> Any:
    """Losses, weights and state after batches of 33, 33 and 1."""
    data = digits(trainer, 67)
    batches = Batches(data, 33, rank=link.rank, world=link.world)
    losses = []
    while trainer.steps < steps:
        losses += [trainer.step(data.batch(part.indices), 0.01) for part in batches]
    return losses, trainer.weights(), trainer.state()


def both(world: int, make: Callable[[], TrainingModel]) -> tuple[Any, list[Any]]:
    """What one process comes to, and what several do."""
    alone = trained(Trainer(make(), threads=1), Alone())
    return alone, together(world, lambda link: trained(ParallelTrainer(make(), link, threads=1), link))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optimizer": "sgd", "reduction": "sum"},
        {"l2": 0.1},
        {"clip_norm": 0.5},
        {"accumulate": 2},
        {"ema": 0.9, "lora": LoraSpec(2)},
        {"loss_options": {"class_weights": np.linspace(0.5, 2, 10)}},
        {"losses": (LossSpec("cross-entropy"), LossSpec("cross-entropy", weight=0.5))},
    ],
    ids=str,
)
@pytest.mark.thinned(5, 2)
def test_all_processes_together_are_one(world: int, more: dict[str, Any]) -> None:
    alone, several = both(world, lambda: mlp(**more))
    for losses, weights, state in several:
        np.testing.assert_allclose(losses, alone[0], rtol=2e-5)
        for name, array in {**alone[1], **alone[2]}.items():
            np.testing.assert_allclose({**weights, **state}[name], array, rtol=1e-4, atol=3e-6, err_msg=name)
        for name, array in weights.items():
            np.testing.assert_array_equal(array, several[0][1][name])


def test_labels_that_are_left_out_are_left_out_of_the_shares() -> None:
    parts = [np.arange(10), np.arange(10, 12), np.arange(12, 30)]

    def step(trainer: TrainerBase, part: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        feeds = digits(trainer, 30).batch(np.arange(30))
        feeds["y"][[0, 3, 10, 11, 14]] = -100  # the second part has none left
        return trainer.step({name: array[part] for name, array in feeds.items()}, 0.1), trainer.weights()

    loss, weights = step(Trainer(mlp(), threads=1), np.arange(30))
    for found, others in together(3, lambda link: step(ParallelTrainer(mlp(), link, threads=1), parts[link.rank])):
        assert abs(found - loss) < 1e-5
        for name, array in weights.items():
            np.testing.assert_allclose(others[name], array, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"reduction": "sum"}, {"accumulate": 2}, {"l2": 0.1}], ids=str)
def test_a_batch_in_which_no_label_counts_has_gradient_0(more: dict[str, Any]) -> None:
    """The second of four. As one process, and so PyTorch, takes it: momentum moves the weights on."""

    def steps(trainer: TrainerBase, part: slice) -> tuple[list[float], dict[str, np.ndarray]]:
        data, losses = digits(trainer, 40), []
        for first in range(0, 40, 10):
            feeds = data.batch(np.arange(first, first + 10))
            if first == 10:
                feeds["y"][:] = -100
            feeds = {name: array[part] for name, array in feeds.items()}
            uncounted = {"uncounted": first == 10} if isinstance(trainer, Trainer) else {}
            losses.append(trainer.step(feeds, 0.1, **uncounted))
        return losses, trainer.weights()

    losses, weights = steps(Trainer(mlp(**more), threads=1), slice(None))
    parts = [slice(3), slice(3, 10)]
    several = together(2, lambda link: steps(ParallelTrainer(mlp(**more), link, threads=1), parts[link.rank]))
    for found, others in several:
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for name, array in weights.items():
            np.testing.assert_allclose(others[name], array, rtol=1e-5, atol=1e-6)


def test_buckets_of_any_size() -> None:
    def run(size: int) -> Any:
        return together(2, lambda link: trained(ParallelTrainer(mlp(), link, threads=1, bucket=size), link))[0]

    small, large = run(1000), run(1 << 30)
    assert small[0] == large[0]
    for name, array in large[1].items():
        np.testing.assert_array_equal(small[1][name], array)


def test_what_is_given_to_sums() -> None:
    weights = sum(4 * int(np.prod(t.dims)) for t in onnx.load(ROOT / "sample_models/digits_mlp.onnx").graph.initializer)
    for size in (1000, 1 << 24):
        volumes = together(2, lambda link: ParallelTrainer(mlp(), link, threads=1, bucket=size).volume)  # noqa: B023
        assert volumes == [weights + 5 * 8] * 2  # and five scalars


def test_running_statistics_are_averaged() -> None:
    model = ROOT / "sample_models" / "digits_cnn.onnx"

    def make() -> TrainingModel:
        options = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer="sgd", mode="train")
        return build(onnx.load(model), options)

    whole = Trainer(make(), threads=1)
    data = digits(whole, 30)
    parts = [np.arange(10), np.arange(10, 30)]
    found = []
    for part in parts:
        one = Trainer(make(), threads=1)
        one.step(data.batch(part), 0.1)
        found.append(one.state())

    def step(link: Communicator) -> Any:
        trainer = ParallelTrainer(make(), link, threads=1)
        trainer.step(data.batch(parts[link.rank]), 0.1)
        return trainer.state()

    for state in together(2, step):
        for name in [name for name in state if "running" in name]:
            np.testing.assert_allclose(state[name], (found[0][name] + 2 * found[1][name]) / 3, rtol=1e-5)


def test_statistics_of_parts_are_told(folder: Path) -> None:
    told: list[str] = []

    def run(link: Communicator) -> None:
        options, course = replace(LOSS, mode="train"), replace(COURSE, max_steps=1)
        tell = (lambda text, level: told.append(text)) if link.rank == 0 else silent
        run_train(ROOT / "sample_models/digits_cnn.onnx", "digits.npz", "a.onnx", options, course, tell=tell,
                  communicator=link)  # fmt: skip

    together(2, run)
    assert [line.startswith("caution: ") for line in told if "BatchNormalization" in line] == [True]


@pytest.mark.parametrize(
    ("samples", "batch", "text", "steps"),
    [(11, 4, "the last 3 samples of each epoch are left out", 2), (9, 4, "the last sample of each epoch is", 2),
     (12, 4, "", 3), (12, 3, "4 for 2 processes", 0)],
)  # fmt: skip
def test_no_process_takes_the_statistics_of_one_sample(
    folder: Path, samples: int, batch: int, text: str, steps: int
) -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        normed (float[n, 2] x) => (float[n, 2] y)
        <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0, 0}, float[2] v = {1, 1}>
        { y = BatchNormalization(x, s, b, m, v) }""")
    x = np.random.default_rng(0).standard_normal((samples, 2)).astype(np.float32)
    np.savez("normed.npz", x=x, label=x)
    told: list[str] = []

    def run(link: Communicator) -> Trained:
        tell = (lambda text, level: told.append(text)) if link.rank == 0 else silent
        course = Course(epochs=1, batch_size=batch, threads=1)
        return run_train(model, "normed.npz", "a.onnx", Options(mode="train"), course, tell=tell, communicator=link)

    if steps:
        assert together(2, run)[0].steps == steps
        assert [text in line for line in told if "the variance" in line] == [True] * bool(text)
    else:
        with pytest.raises(UsageError, match="variance") as error:
            together(2, run)
        assert text in (error.value.hint or "")


def test_float16_is_summed_in_float32() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        half (float16[batch, 2] x) => (float16[batch, 1] y) <float16[2, 1] w = {0, 0}> { y = MatMul(x, w) }""")

    def step(link: Communicator) -> np.ndarray:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        trainer = ParallelTrainer(build(copy, Options(optimizer="sgd")), link, threads=1)
        x = np.full((1 + link.rank, 2), 1 + link.rank, np.float16)
        trainer.step({"x": x, "label": np.ones((1 + link.rank, 1), np.float16)}, 0.25)
        return trainer.weights()["w"]

    for weight in together(2, step):  # the gradient of (x w - 1)² is -2 x, its mean over three samples -10/3
        np.testing.assert_array_equal(weight, np.full((2, 1), 0.25 * 10 / 3, np.float16))


def test_a_loss_that_is_no_number_stops_all(tmp_path: Path) -> None:
    def step(link: Communicator) -> int:
        trainer = ParallelTrainer(mlp(), link, threads=1)
        feeds = digits(trainer, 8).batch(np.arange(8))
        if link.rank:
            feeds["x"] = np.full_like(feeds["x"], np.nan)
        with pytest.raises(NotFinite):
            trainer.step(feeds, 0.1)
        return trainer.steps

    assert together(2, step) == [0, 0]


def test_other_weights_are_refused() -> None:
    def start(link: Communicator) -> None:
        built = mlp()
        tensor = built.model.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + link.rank, tensor.name))
        ParallelTrainer(built, link, threads=1)

    with pytest.raises(UsageError, match="different weights"):
        together(2, start)


# -- whole runs -----------------------------------------------------------------------------------------------------

LOSS = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer="adam")
COURSE = Course(epochs=3, batch_size=33, threads=1, prefix="train_", val_prefix="test_", save_every=10)
MODEL = ROOT / "sample_models" / "digits_mlp.onnx"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data = np.load(DIGITS)
    arrays = {f"{part}_{name}": data[f"{part}_{name}"][:100] for part in ("train", "test") for name in "xy"}
    np.savez("digits.npz", **arrays)
    return tmp_path


def weights_of(path: str) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def assert_alike(one: str, other: str, atol: float = 1e-5) -> None:
    found = weights_of(other)
    for name, array in weights_of(one).items():
        np.testing.assert_allclose(found[name], array, atol=atol, err_msg=name)


def test_a_run_of_two_is_a_run_of_one(folder: Path) -> None:
    alone = run_train(MODEL, "digits.npz", "one.onnx", LOSS, COURSE, val="digits.npz")

    def run(link: Communicator) -> Trained:
        return run_train(MODEL, "digits.npz", "two.onnx", LOSS, COURSE, val="digits.npz", communicator=link)

    first, second = together(2, run)
    assert first.best == second.best == alone.best and first.steps == second.steps == alone.steps == 12
    for mine, wanted in zip(first.epochs, alone.epochs, strict=True):
        np.testing.assert_allclose(list(mine.values()), list(wanted.values()), rtol=1e-4)
    assert second.epochs == first.epochs
    assert_alike("one.onnx", "two.onnx")
    lines = (Path("two.onnx.run") / LOG).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "rate" in line] == list(range(1, 13))


def test_a_run_goes_on_with_another_number_of_processes(folder: Path) -> None:
    def run(world: int, epochs: int, resume: bool) -> None:
        course = replace(COURSE, epochs=epochs)
        together(
            world,
            lambda link: run_train(
                MODEL, "digits.npz", "a.onnx", LOSS, course, resume="must" if resume else "never", communicator=link
            ),
        )

    run_train(MODEL, "digits.npz", "b.onnx", LOSS, COURSE)
    run(2, 1, False)
    run(3, 2, True)
    run(1, 3, True)
    assert_alike("b.onnx", "a.onnx")
    with raises(UsageError, "file_exists", "a.onnx.run"):
        run(2, 3, False)


# -- under mpirun ---------------------------------------------------------------------------------------------------

MPIRUN = shutil.which("mpirun")


def mpirun(world: int, *arguments: str) -> list[str]:
    return [str(MPIRUN), "-n", str(world), *(("--oversubscribe",) if _is_open_mpi() else ()), *PROGRAM, *arguments]


def _is_open_mpi() -> bool:
    return "Open" in subprocess.run([str(MPIRUN), "--version"], capture_output=True, text=True).stdout


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@pytest.fixture
def with_mpi(folder: Path) -> Path:
    if MPIRUN is None:
        pytest.skip("there is no mpirun")
    pytest.importorskip("mpi4py", reason="mpi4py is missing")
    return folder


def command(out: str, *more: str) -> tuple[str, ...]:
    return (
        "train", str(MODEL), "--data", "digits.npz", "--prefix", "train_", "--loss", "cross-entropy", "--label", "y",
        "--batch-size", "33", "--threads", "1", "-o", out, *more,
    )  # fmt: skip


def test_mpirun_of_two_is_one(with_mpi: Path) -> None:
    more = ("--val", "digits.npz", "--val-prefix", "test_", "--epochs", "3")
    done = subprocess.run(mpirun(2, *command("two.onnx", *more)), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 processes train together" in done.stderr and done.stderr.count("wrote two.onnx\n") == 1
    assert subprocess.run([*PROGRAM, *command("one.onnx", *more)], env=ENVIRONMENT).returncode == 0
    assert_alike("one.onnx", "two.onnx")


def test_an_error_ends_all_with_its_code(with_mpi: Path) -> None:
    (with_mpi / "digits.npz").unlink()
    done = subprocess.run(mpirun(2, *command("two.onnx")), env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: no such file or folder") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_process_ends_the_run_and_leaves_a_checkpoint(with_mpi: Path, which: int) -> None:
    long = ("--epochs", "100000", "--save-every", "5")
    run = subprocess.Popen(
        mpirun(2, *command("two.onnx", *long)), env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        checkpoint = Path("two.onnx.run/checkpoint.safetensors")
        limit = time.monotonic() + 60
        while not checkpoint.exists() and time.monotonic() < limit:
            time.sleep(0.1)
        os.kill(ranks()[which], signal.SIGKILL)
        out, said = run.communicate(timeout=60)
    finally:
        for process in (*ranks(), *([run.pid] if run.poll() is None else [])):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert run.returncode != 0
    if which and _is_open_mpi():  # MPICH kills the others at once, and says it itself
        assert "another of its processes has died" in said and "two.onnx.run" in said
    named = f"rank {which}: the process was killed" in said  # where its child was killed
    assert named or "exited on" in said or "BAD TERMINATION" in out
    values, progress = load_checkpoint(checkpoint)
    assert progress["steps"] >= 4 and all(np.isfinite(array).all() for array in values.values())
    epochs = str(len(progress["run"]["epochs"]) + 1)
    more = ("--epochs", epochs, "--resume")
    done = subprocess.run(mpirun(2, *command("two.onnx", *more)), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ranks() -> list[int]:
    """The processes that mpirun has started in this folder, in the order of their ranks."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(e.split(b"=", 1) for e in (entry / "environ").read_bytes().split(b"\0") if b"=" in e)
            here = (entry / "cwd").samefile(".")
        except (OSError, ValueError):
            continue
        rank = environment.get(b"OMPI_COMM_WORLD_RANK", environment.get(b"PMI_RANK"))
        if rank is not None and here:
            found[int(rank)] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def test_ctrl_c_ends_all_at_the_same_step(with_mpi: Path) -> None:
    run = subprocess.Popen(
        mpirun(2, *command("two.onnx", "--epochs", "100000")), env=ENVIRONMENT, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        limit = time.monotonic() + 60
        while not Path("two.onnx.run/checkpoint.safetensors").exists() and time.monotonic() < limit:
            time.sleep(0.1)
        for rank in ranks():
            os.kill(rank, signal.SIGTERM)
        _, said = run.communicate(timeout=60)
    finally:
        for process in (*ranks(), *([run.pid] if run.poll() is None else [])):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert "--resume continues the run" in said and "Traceback" not in said
    assert load_checkpoint(Path("two.onnx.run/checkpoint.safetensors"))[1]["steps"] > 0
