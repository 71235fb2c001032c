"""Graphs that keep their YieldOp run in ONNX Runtime's training agent: forward up to it, and later backward from it.

That is what the marker is for, and stock onnxruntime can't do it: the agent is onnxruntime-training's, and runs in an
environment of its own (`tests/older_runtime.py`). The measure is stock onnxruntime: the model's own outputs, and the
gradients of option Zero.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from onnxgrad_cli.compat import DerivativeOptions, onnx_derivative
from onnxgrad_cli.ir.types import Arrays
from tests import older_runtime
from tests.compat.test_derivative_options import (
    ABSENT,
    ALSO,
    NETS,
    SIZES,
    Golden,
    as_inputs,
    cotangents_of,
    index,
    names,
    own_values,
    run,
    sampled,
    yield_op,
)
from tests.harness import fed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def agent() -> str:
    """The Python of an environment that has onnxruntime-training."""
    try:
        return older_runtime.python()
    except older_runtime.Absent as reason:
        pytest.skip(str(reason))


def split(agent: str, model: ModelProto, folder: Path, *groups: list[Arrays]) -> list[tuple[Arrays, Arrays]]:
    """Run the forward parts of several passes, then the backward part of each; so for each group of passes.

    Args:
        agent: the Python to run it with.
        model: a graph with a YieldOp.
        folder: for the files that are passed.
        groups: what each pass of a group is fed: inputs, of which those that have a value of their own may be left out
            of all, and the cotangents by the names of the YieldOp's outputs, which are no inputs of the graph.

    Returns:
        For each pass what the forward part returned, and the gradients.
    """
    onnx.save(model, folder / "model.onnx")
    results: list[Path] = []
    words: list[str | Path] = []
    for group in groups:
        words += ["--"] if words else []
        for arrays in group:
            given, found = folder / f"in{len(results)}.npz", folder / f"out{len(results)}.npz"
            np.savez(given, **arrays)
            results.append(found)
            words += [given, found]
    script = Path(__file__).with_name("training_agent_split.py")
    ran = subprocess.run([agent, script, folder / "model.onnx", *words], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    loaded = [dict(np.load(found)) for found in results]
    parts = list(yield_op(model).input), names(model.graph.output)
    return [tuple({name: arrays[name] for name in part} for part in parts) for arrays in loaded]


def compare(found: Arrays, expected: Arrays, tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype or array.dtype == np.float16
        size = max(1.0, float(np.max(np.abs(array.astype(np.float64)), initial=0)))
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance * size, err_msg=name)


def check(agent: str, model: ModelProto, sizes: dict[str, int], folder: Path, tolerance: float = 1e-5) -> None:
    """Two passes with the weights as they are, and one with other weights; the graph of option Zero is the measure."""
    zero, keep, halves = (
        onnx_derivative(model, options=option)
        for option in (DerivativeOptions.Zero, DerivativeOptions.KeepOutputs, DerivativeOptions.KeepYieldOp)
    )
    own = own_values(halves)
    others = {n: np.asarray(own[n] * 0.75, own[n].dtype) for n in names(halves.graph.input) if n in own}
    points = [sampled(model, sizes, seed) for seed in (0, 1)]
    as_it_is = [{**point, **as_inputs(cotangents_of(model, zero, point), zero)} for point in points]
    changed = [{**as_it_is[0], **others}] if others else []
    found = split(agent, halves, folder, as_it_is, *([changed] if changed else []))
    for given, (outputs, gradients) in zip([*as_it_is, *changed], found, strict=True):
        kept = run(keep, given)
        compare(outputs, {name: kept[name] for name in names(model.graph.output)}, tolerance)
        compare(gradients, run(zero, given), tolerance)
    for point, (outputs, _) in zip(points, found[: len(points)], strict=True):
        compare(outputs, run(model, point), tolerance)


LIMITS = {
    net: "onnxruntime-training 1.19.2 aborts on loading a YieldOp and, after it, a body that reads what is around it"
    for net in ("a body reads an output", "a body reads a weight", "recurrent")
}


@pytest.mark.parametrize("net", NETS)
def test_every_net(net: str, agent: str, tmp_path: Path) -> None:
    if net in LIMITS:
        pytest.skip(LIMITS[net])
    check(agent, NETS[net].model, SIZES | ALSO.get(net, {}), tmp_path, 1e-2 if net == "half" else 1e-5)


@pytest.mark.parametrize("sample", ["digits_mlp", "digits_cnn", "linear_regression", "tiny_transformer", "symbolic"])
def test_the_sample_models(sample: str, agent: str, tmp_path: Path) -> None:
    model = onnx.load(older_runtime.ROOT / "sample_models" / f"{sample}.onnx")
    sizes = {axis.dim_param: 3 for value in model.graph.input for axis in value.type.tensor_type.shape.dim}
    check(agent, model, sizes, tmp_path)


def golden_entries() -> list:
    yields = [Golden(entry) for entry in index() if entry.endswith("yield")]
    found = [pytest.param(golden, id=golden.entry) for golden in yields if "inputs" in golden.known]
    return found or [pytest.param(None, marks=pytest.mark.skip(reason=ABSENT))]


@pytest.mark.parametrize("golden", golden_entries())
def test_the_older_graphs(golden: Golden, agent: str, tmp_path: Path) -> None:
    """Theirs, which proves the driver, and ours for the same model give the older function's gradients."""
    theirs, ours, model = onnx.load(golden.built("onnx")), golden.derive(tmp_path), golden.model
    then, expected = Golden(golden.entry.replace("yield", "zero")).arrays
    given = {**own_values(model), **sampled(model)}
    for output, cotangent in cotangents_of(model, None, given).items():
        given |= {f"{output}_grad": cotangent, f"{output}_grad_external": cotangent}
    given |= then
    for graph in (theirs, ours):
        taken = {*names(graph.graph.input), *yield_op(graph).output}
        ((outputs, gradients),) = split(agent, graph, tmp_path, [{n: a for n, a in given.items() if n in taken}])
        compare(outputs, run(model, fed(model, given)), 1e-5)
        compare(gradients, expected or gradients, 1e-5)
        expected = gradients
