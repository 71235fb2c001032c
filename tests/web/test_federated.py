"""Federated training by sample_models/federated: what three clients and a server make is what PyTorch makes of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxgrad_cli import LoraSpec, Trainer, run_build
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.jobs.pack import run_pack
from sample_models.federated.client import Client, batches
from tests.older_runtime import Absent
from tests.web import javascript
from tests.web.cases import SAMPLES, options_of

ROUNDS, STEPS, SIZE, RATE = 3, 9, 16, 0.05
PROGRAMS, MLP = SAMPLES / "federated", SAMPLES / "digits_mlp.onnx"
DIGITS = np.load(SAMPLES / "digits.npz")
CUTS = [(0, 64), (64, 256), (256, 600)]
"""Which of the digits each client has: all of one, and too few for its steps without beginning anew, of another."""

Arrays = dict[str, np.ndarray]
Update = Callable[[int, bytes], bytes]


def part(number: int) -> Arrays:
    """The samples of a client."""
    first, end = CUTS[number]
    return {"x": DIGITS["train_x"][first:end], "y": DIGITS["train_y"][first:end]}


def build(folder: Path, model: str = "digits_mlp", **more: Any) -> Path:
    """A training model of a sample; returns its JSON."""
    report = run_build(
        SAMPLES / f"{model}.onnx", folder / "model.onnx", options_of(model, target="portable", **more),
        weights="inputs", verify=False, no_report=True,
    )  # fmt: skip
    assert report.status == "built", report.verdict
    return folder / "model.json"


def serve(client: Client, start: bytes, update: Update) -> bytes:
    """What a server makes in all rounds: the mean of the updates by numbers of samples, added to the weights."""
    weights, into = client.arrays(start)
    for _ in range(ROUNDS):
        found = [client.arrays(update(number, bytes(weights)))[1] for number in range(3)]
        for name in client.shared:
            into[name] += np.average([each[name] for each in found], 0, [end - first for first, end in CUTS])
    return bytes(weights)


def network(x: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """digits_mlp in PyTorch; of matrices with adapters the factors are in `w` too."""
    x = x.flatten(1)
    for layer in ("fc1", "fc2", "fc3"):
        x = torch.relu(x) if layer != "fc1" else x
        matrix = w[f"{layer}.weight"]
        if f"{layer}.weight_lora_A" in w:
            matrix = matrix + w[f"{layer}.weight_lora_B"] @ w[f"{layer}.weight_lora_A"]  # alpha is the rank
        x = torch.nn.functional.linear(x, matrix, w[f"{layer}.bias"])
    return x


def fedavg(start: Mapping[str, torch.Tensor], shared: Sequence[str], optimizer: Any) -> dict[str, torch.Tensor]:
    """FedAvg in PyTorch: the mean of what the clients have made of the shared weights, by their numbers of samples."""
    held = dict(start)
    for _ in range(ROUNDS):
        trained = []
        for number in range(3):
            own = {**held, **{name: held[name].clone().requires_grad_() for name in shared}}
            step = optimizer([own[name] for name in shared], lr=RATE)
            x, y = (torch.tensor(array) for array in part(number).values())
            for rows in torch.arange(STEPS * SIZE).remainder(len(y)).split(SIZE):
                step.zero_grad()
                torch.nn.functional.cross_entropy(network(x[rows].double(), own), y[rows]).backward()
                step.step()
            trained.append(own)
        shares = [(end - first) / CUTS[-1][-1] for first, end in CUTS]
        for name in shared:
            held[name] = sum(share * own[name].detach() for share, own in zip(shares, trained, strict=True))
    return held


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "weights": ({"optimizer": "sgd"}, torch.optim.SGD),
    "slots": ({"optimizer": "momentum"}, partial(torch.optim.SGD, momentum=0.9)),
    "factors": ({"optimizer": "sgd", "lora": LoraSpec(4)}, torch.optim.SGD),
}
"""How the model is built, and the optimizer in PyTorch."""


def check_against_torch(case: str, roles: Path, update: Update) -> bytes:
    """All rounds of a case end in the weights of PyTorch's FedAvg, and in a model with them; returns the weights."""
    client, begin = Client(roles), roles.with_suffix(".bin").read_bytes()
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(MLP).graph.initializer}
    arrays = {**stored, **client.arrays(begin)[1]}
    start = {name: torch.tensor(array, dtype=torch.float64) for name, array in arrays.items()}
    expected = fedavg(start, client.shared, CASES[case][1])
    weights = serve(client, begin, update)
    for name, array in client.arrays(weights)[1].items():
        if name in client.shared:
            np.testing.assert_allclose(array, expected[name].numpy(), rtol=0, atol=2e-6, err_msg=name)
            assert (expected[name] - start[name]).abs().max() > 1e-3
        else:
            np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    final, out = roles.with_name("global.bin"), roles.with_name("global.onnx")
    final.write_bytes(weights)
    run_export(final, MLP, out, roles=roles)
    x = DIGITS["test_x"]
    (logits,) = ort.InferenceSession(out).run(None, {"x": x})
    np.testing.assert_allclose(logits, network(torch.tensor(x).double(), expected).numpy(), rtol=0, atol=1e-4)
    return weights


@pytest.mark.parametrize("case", CASES)
def test_three_clients_are_pytorchs(case: str, tmp_path: Path) -> None:
    roles = build(tmp_path, **CASES[case][0])
    clients = [Client(roles) for _ in CUTS]
    check_against_torch(
        case, roles, lambda number, weights: clients[number].update(weights, batches(part(number), STEPS, SIZE), RATE)
    )


def test_the_command_is_the_class(tmp_path: Path) -> None:
    roles = build(tmp_path, optimizer="adamw")
    np.savez(tmp_path / "samples.npz", **part(0))
    start, out = tmp_path / "model.bin", tmp_path / "update.bin"
    command = [sys.executable, PROGRAMS / "client.py", roles, start, tmp_path / "samples.npz", out, "2", "8", "0.1"]
    subprocess.run(command, check=True)
    assert out.read_bytes() == Client(roles).update(start.read_bytes(), batches(part(0), 2, 8), 0.1)


def test_running_statistics_are_sent(tmp_path: Path) -> None:
    """What a client of its own makes is what training makes."""
    roles = build(tmp_path, "digits_cnn", optimizer="sgd", mode="train")
    client, trainer, start = Client(roles), Trainer(tmp_path / "model.onnx"), (tmp_path / "model.bin").read_bytes()
    update = client.arrays(client.update(start, batches(part(1), 3, 8), RATE))[1]
    for batch in batches(part(1), 3, 8):
        trainer.step(batch, RATE)
    trained = {**trainer.weights(), **trainer.state()}
    assert set(client.shared) == trained.keys() - {"step"} and "bn1.running_var" in client.shared
    for name in client.shared:
        np.testing.assert_allclose(client.arrays(start)[1][name] + update[name], trained[name], rtol=1e-5, atol=1e-6)
        assert update[name].any(), name


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    roles = build(tmp_path, optimizer="sgd")
    client, start = Client(roles), (tmp_path / "model.bin").read_bytes()
    with pytest.raises(SystemExit, match="bytes are not the"):
        client.update(start[:-4], batches(part(0), 1, 8), RATE)
    with pytest.raises(SystemExit, match="not finite after training"):
        client.update(start, batches(part(0), 2, 8), float("inf"))


@pytest.fixture(scope="module")
def node() -> str:
    try:
        return javascript.node()
    except Absent as why:
        pytest.skip(str(why))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_clients_in_node(case: str, node: str, tmp_path: Path) -> None:
    """Folders of `onnxgrad pack` with the samples of each describe the weights as the build does."""
    roles = build(tmp_path, **CASES[case][0])
    shutil.copy(PROGRAMS / "client.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(javascript.FOLDER / "node_modules")
    for number in range(3):
        np.savez(tmp_path / "samples.npz", **part(number))
        run_pack(tmp_path / "model.onnx", tmp_path / str(number), data=tmp_path / "samples.npz")
        assert Client(tmp_path / str(number) / "model.json").held == Client(roles).held

    def command(number: int, weights: bytes) -> bytes:
        (tmp_path / "weights.bin").write_bytes(weights)
        how = [str(number), "weights.bin", "update.bin", *map(str, (STEPS, SIZE, RATE))]
        done = subprocess.run([node, "client.mjs", *how], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "update.bin").read_bytes()

    check_against_torch(case, roles, command)
    for how, said in (("1 8 Infinity", "not finite|loss is"), ("x 8 0.1", "NaN steps")):
        command_line = [node, "client.mjs", "0", "weights.bin", "none.bin", *how.split()]
        done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode and re.search(said, done.stderr), done.stderr
        assert not (tmp_path / "none.bin").exists()


@pytest.mark.slow
def test_half_precision_is_refused_in_node(node: str, tmp_path: Path) -> None:
    """There weights of 16 bits are whole numbers, whose differences mean nothing."""
    shutil.copy(PROGRAMS / "client.mjs", tmp_path)
    (tmp_path / "program.mjs").write_text("""
        import { update } from './client.mjs';
        const inputs = { w: { type: 'float16', array: 'Uint16Array', dims: [2], size: 2, offset: 0 } };
        const trainer = { roles: { bytes: 4, stored: 4, inputs }, load() {}, save: () => new Uint8Array(4) };
        await update(trainer, new Uint8Array(4), [], 0.1);
    """)
    done = subprocess.run([node, "program.mjs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "'w' is neither float32 nor float64" in done.stderr


@pytest.mark.slow
def test_flowers_mean_is_the_servers(tmp_path: Path) -> None:
    """The block of docs/how-to/federated.md under the strategy FedAvg of flwr, a round of 15 steps on 20 samples."""
    there = os.environ.get("ONNXGRAD_FLOWER_PYTHON")
    if not there:
        pytest.skip("ONNXGRAD_FLOWER_PYTHON names no Python that has flwr and onnxruntime")
    roles = build(tmp_path, optimizer="sgd").rename(tmp_path / "digits.json")
    (tmp_path / "model.bin").rename(tmp_path / "digits.bin")
    page = (javascript.ROOT / "docs" / "how-to" / "federated.md").read_text()
    (program,) = re.findall(r'```python title="flower_client.py"\n(.*?)```', page, re.DOTALL)
    (tmp_path / "flower_client.py").write_text(program)
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", **part(number))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{javascript.ROOT}"}
    command = [there, Path(__file__).with_name("flower_run.py")]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    client, start = Client(roles), (tmp_path / "digits.bin").read_bytes()
    stored = client.arrays(start)[1]
    changes = [client.arrays(client.update(start, batches(part(n), 15, 20), 0.1))[1] for n in range(3)]
    found, sizes = np.load(tmp_path / "flower.npz"), [end - first for first, end in CUTS]
    assert set(found.files) == set(client.shared)
    for name in client.shared:
        mean = stored[name] + np.average([each[name] for each in changes], 0, sizes)
        np.testing.assert_allclose(found[name], mean, rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(mean - stored[name]).max() > 1e-3
