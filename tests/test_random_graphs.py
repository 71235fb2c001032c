"""Compare gradients of random graphs of 3 to 30 operators with central differences.

The gradients come from the reverse walk alone, or from a whole build. `make test` draws a fixed number of programs from
a fixed seed; `make fuzz-graphs` draws other programs for FUZZ_SECONDS. A failure prints the smallest program that
hypothesis finds and saves it as build/random_graphs/<test>.onnx.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.types import Arrays
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.harness import fed, with_gradient
from tests.random_graphs import OLDER, OPSETS, Program, programs

STEP, TOLERANCE = 1e-6, 1e-5
SAVED = Path("build/random_graphs")
KEEP = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
seen: Counter[str] = Counter()
"""Number of directions with each result (`compared`, `noise`, `beside a kink`), and of programs by reason of a skip."""


def compare(function: Callable[[Arrays], float], point: Arrays, gradients: Arrays, scale: float) -> None:
    """Compare gradients with central differences along three directions. Directions that cross a kink are skipped."""
    rng = np.random.default_rng(1)
    at_point = function(point)
    for _ in range(3):
        ways = {name: rng.standard_normal(np.shape(point[name])) for name in gradients}

        def along(distance: float, ways: Arrays = ways) -> float:
            return function(point | {name: np.asarray(point[name] + distance * way) for name, way in ways.items()})

        near = [along(h) for h in (-2 * STEP, -STEP, STEP, 2 * STEP)]
        left, right = (at_point - near[1]) / STEP, (near[2] - at_point) / STEP
        measured, fourth = (near[2] - near[1]) / (2 * STEP), float(np.diff([*near[:2], at_point, *near[2:]], 4)[0])
        claimed = float(sum(np.sum(gradients[name] * way) for name, way in ways.items()))
        size = max(abs(claimed), abs(measured), 1e-2 * scale, 1e-2)
        if abs(left - right) > 1e-3 * size:
            seen["beside a kink"] += 1
        elif abs(fourth) / STEP > TOLERANCE * size:  # some operators of onnx.reference compute in float32
            seen["noise"] += 1
        else:
            seen["compared"] += 1
            assert abs(claimed - measured) <= TOLERANCE * size, f"claimed {claimed:.9g}, measured {measured:.9g}"


def running(model: onnx.ModelProto, feeds: Arrays) -> tuple[Executor, Arrays]:
    """Return the executor of a model and its outputs. Programs that the executors can't run are rejected."""
    try:
        forward = Executor(model)
        return forward, forward(feeds)
    except Exception as error:
        seen[f"the forward does not run: {str(error).strip()[:200]}"] += 1
        reject()


def check_walk(program: Program) -> None:
    model, feeds = program.model(), program.feeds()
    forward, values = running(model, feeds)
    rng = np.random.default_rng(0)
    seeds = {name: np.asarray(rng.standard_normal(np.shape(value))) for name, value in values.items()}
    backward = with_gradient(model, list(feeds), list(values), "g_")
    result = Executor(backward)({**feeds, **fed(backward, {f"g_{name}": each for name, each in seeds.items()})})
    gradients = {name: result[f"g_grad_{name}"] for name in feeds}
    for name, gradient in gradients.items():
        assert gradient.shape == feeds[name].shape, f"{name}: {gradient.shape} for {feeds[name].shape}"

    def function(point: Arrays) -> float:
        outputs = forward(point)
        return float(sum(np.sum(outputs[name] * each) for name, each in seeds.items()))

    compare(function, feeds, gradients, sum(float(np.sum(np.abs(values[n] * s))) for n, s in seeds.items()))


def check_build(program: Program) -> None:
    """Check the gradients of a build with mse on one output. Half of the leaves are weights; all are differentiated."""
    feeds = program.feeds()
    weights = list(feeds)[1::2]
    forward, values = running(program.model(outputs=1), feeds)
    (value,) = values.values()
    label = np.asarray(np.random.default_rng(0).uniform(-1, 1, value.shape))
    options = Options(losses=(LossSpec("mse"),), label="label", grad_of_input=("*",))
    training = build(program.model(weights, outputs=1), options)
    onnx.checker.check_model(training.model, full_check=True)
    result = Executor(training.model)(fed(training.model, {**feeds, "label": label}))
    names = training.training.gradients
    assert set(names) >= set(feeds) - set(weights)

    def function(point: Arrays) -> float:
        (predicted,) = forward(point).values()
        return float(np.mean((predicted - label) ** 2))

    loss = function(feeds)
    assert abs(result["loss"] - loss) <= 1e-9 * max(1.0, loss)
    compare(function, feeds, {name: result[names[name]] for name in feeds if name in names}, loss)


CHECKS = {"walk": check_walk, "build": check_build}


def judge(program: Program, check: str) -> None:
    try:
        CHECKS[check](program)
    except UnsupportedError as error:
        seen[f"refused: {error}"] += 1
        reject()
    except Exception:
        SAVED.mkdir(parents=True, exist_ok=True)
        onnx.save(program.model(), SAVED / f"{check}.onnx")
        raise


DRAWN = {"walk": programs(), "build": programs(most=20, opsets=(*OLDER, *OPSETS))}


def run(check: str, number: int, examples: int) -> None:
    """Draw programs from a seed and check each."""
    each = given(DRAWN[check])(lambda program: judge(program, check))
    seed(number)(settings(KEEP, max_examples=examples)(each))()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.thinned(4)
def test_walk(number: int) -> None:
    before = seen["compared"]
    run("walk", number, 100)
    assert seen["compared"] - before > 200


@pytest.mark.parametrize("number", range(3))
@pytest.mark.thinned(3)
def test_build(number: int) -> None:
    before = seen["compared"]
    run("build", number, 50)
    assert seen["compared"] - before > 100


def main() -> None:
    """Draw and check programs for FUZZ_SECONDS seconds. Three of four programs check the walk, the others a build."""
    seconds, start, drawn = float(os.environ.get("FUZZ_SECONDS", "600")), time.monotonic(), 0
    while time.monotonic() - start < seconds:
        check, number = "build" if drawn % 200 == 150 else "walk", secrets.randbits(32)
        print(f"{time.monotonic() - start:6.0f} s: {drawn} programs; now {check}, seed {number}", flush=True)
        run(check, number, 50)
        drawn += 50
    print(f"{drawn} programs in {time.monotonic() - start:.0f} s")
    for what, count in seen.most_common():
        print(f"{count:7} {what}")


if __name__ == "__main__":
    main()
