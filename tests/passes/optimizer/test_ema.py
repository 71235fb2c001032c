"""The exponential moving average of the weights beside torch.optim.swa_utils."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from onnxgrad_cli.adapters.own_file import adapter_bytes
from onnxgrad_cli.builder import build
from onnxgrad_cli.checkpoints.tensors import save_tensors
from onnxgrad_cli.compat.artifacts import save_checkpoint
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.training.run.folder import load_checkpoint
from onnxgrad_cli.training.trainer import Trainer
from tests.cli_harness import Shell
from tests.steps import KINDS, NAMES, RATE, assert_same, batches, exported, loss, network, options, trained


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize(("dtype", "bound"), KINDS)
def test_beside_torch(runs: int, dtype: str, bound: float) -> None:
    net = network(getattr(torch, dtype))
    data = batches(dtype)
    ours = trained(build(exported(net), options("adam", ema=0.9, accumulate=runs)).model, data)
    theirs = torch.optim.Adam(net.parameters(), lr=RATE)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for at in range(0, len(data), runs):
        theirs.zero_grad()
        for batch in data[at : at + runs]:
            (loss(net, batch) / runs).backward()
        theirs.step()
        average.update_parameters(net)
    assert_same(ours, net, bound)
    for key, expected in average.module.state_dict().items():
        assert not np.allclose(expected, net.state_dict()[key], atol=10 * bound)
        np.testing.assert_allclose(ours[f"{NAMES[key]}_ema"], expected.numpy(), rtol=bound, atol=bound)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_what_is_no_share_is_refused(decay: float) -> None:
    with pytest.raises(UsageError, match="expected a finite number of 0 or more and below 1"):
        build(exported(network(torch.float32)), options("sgd", ema=decay))


def test_a_run_writes_the_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are what is judged, too."""
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    onnx.save(exported(network(torch.float32)), "net.onnx")
    xs, ys = zip(*batches("float32", 4), strict=True)
    np.savez("data.npz", x=np.concatenate(xs), y=np.concatenate(ys))
    asked = "net.onnx --data data.npz --val data.npz --loss cross-entropy --label y --batch-size 8 --epochs 2 --ema 0.9"
    asked += " --accumulate 2 --threads 1 --json"
    result = shell("train", *asked.split(), "--use-ema", "-o", "average.onnx")
    assert result.code == 0, result.err
    assert shell("train", *asked.split(), "-o", "last.onnx").code == 0
    average, last = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(name).graph.initializer}
        for name in ("average.onnx", "last.onnx")
    )
    values, said = load_checkpoint(tmp_path / "average.onnx.run" / "checkpoint.safetensors")
    assert said["steps"] == 16 and values["step"] == 8
    for name in average:
        np.testing.assert_array_equal(average[name], values[f"{name}_ema"])
        np.testing.assert_array_equal(last[name], values[name])
        assert (average[name] != last[name]).any()
    net = network(torch.float32)
    net.load_state_dict({key: torch.tensor(average[name]) for key, name in NAMES.items()})
    exported_to = ("--model", "net.onnx", "--use-ema", "-o", "exported.onnx")
    assert shell("export", "last.onnx.run/checkpoint.safetensors", *exported_to).code == 0
    assert Path("exported.onnx").read_bytes() == Path("average.onnx").read_bytes()
    judged = result.json["epochs"][result.json["best"] - 1]["val_loss"]
    np.testing.assert_allclose(judged, loss(net, (np.concatenate(xs), np.concatenate(ys))).item(), rtol=1e-5)
    refused = shell("train", "net.onnx", "--data", "data.npz", "--loss", "cross-entropy", "--label", "y", "--use-ema")
    assert refused.code == 2 and "there are no moving averages" in refused.err
    refused = shell("train", *asked.split(), "--accumulate", "9", "-o", "none.onnx")
    assert refused.code == 2 and "no step would be taken" in refused.err


def held(folder: Path, kind: str, **others: Any) -> Path:
    """A checkpoint of a run that has taken no step."""
    model = build(exported(network(getattr(torch, kind))), options("adam", **others))
    save_checkpoint(folder / "held", Trainer(model))
    return folder / "held"


def test_the_averages_of_a_checkpoint(tmp_path: Path) -> None:
    """Of one that Python code has written, too: the export has their values, and the rest as it was."""
    onnx.save(exported(network(torch.float32)), tmp_path / "net.onnx")
    trainer = Trainer(build(exported(network(torch.float32)), options("adam", ema=0.9)))
    for x, y in batches("float32", 3):
        trainer.step({"x": x, "y": y}, RATE)
    save_checkpoint(tmp_path / "held", trainer)
    run_export(tmp_path / "held", tmp_path / "net.onnx", tmp_path / "out.onnx", use_ema=True)
    out = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    state, weights = trainer.state(), trainer.weights()
    assert out.keys() == weights.keys()
    for name, array in out.items():
        np.testing.assert_array_equal(array, state[f"{name}_ema"])
        assert (array != weights[name]).any()


def test_what_has_no_averages_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    onnx.save(exported(network(torch.float32)), model)

    def refused(words: str, source: Path) -> None:
        with pytest.raises(UsageError, match=words):
            run_export(source, model, tmp_path / "out.onnx", use_ema=True)
        assert not (tmp_path / "out.onnx").exists()

    refused("`use_ema`: there are no moving averages", held(tmp_path, "float32"))
    refused("'first.weight' is float16, but its average float32", held(tmp_path, "float16", ema=0.9))
    refused("no step was taken", held(tmp_path, "float32", ema=0.9))
    values, said = load_checkpoint(held(tmp_path, "float32", ema=0.9))
    said.pop("averages")
    save_tensors(tmp_path / "held", values, {"progress": said})
    refused("`use_ema`: there are no moving averages", tmp_path / "held")
    (tmp_path / "held").write_bytes(adapter_bytes([], values))
    refused("an adapter file stores no moving averages", tmp_path / "held")
