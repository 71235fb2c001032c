"""No command overwrites its own inputs, by whatever name they are called."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.test_bad_input import BUILD, BUILT, refused
from tests.cli_harness import (
    MLP,
    WEIGHT,
    Shell,
    save,
    save_external,
)


def test_output_is_the_input(shell: Shell) -> None:
    os.link("mlp.onnx", "hard.onnx")
    Path("soft.onnx").symlink_to("mlp.onnx")
    for out in ("mlp.onnx", "./mlp.onnx", "hard.onnx", "soft.onnx"):
        for force in ((), ("--force",)):
            refused(shell, 2, "never overwritten", command=("build", "mlp.onnx", "--label", "t", "-o", out, *force))
    refused(shell, 2, "never overwritten", command=("build", "mlp.onnx", *BUILD, "--report", "mlp.onnx"))


def test_output_is_the_external_data(shell: Shell) -> None:
    save_external(Path("external.onnx"))
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    command = ("build", "external.onnx", "--label", "t", "-o", "weights.bin", "--force")
    refused(shell, 2, "never overwritten", command=command)


@pytest.fixture
def trained(shell: Shell) -> tuple[object, ...]:
    """A training on data that lie there, which an output can be given to."""
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    return "train", "mlp.onnx", "--data", "d.npz", "--epochs", "1"


def test_no_input_is_overwritten(shell: Shell, trained: tuple[object, ...]) -> None:
    """Neither data nor settings nor code, by whatever name and with --force, whichever output it is."""
    os.link("d.npz", "hard.npz")
    Path("soft.npz").symlink_to("d.npz")
    shutil.copy("d.npz", "v.npz")
    Path("c.toml").write_text('label = "t"\n')
    Path("t.toml").write_text("[kernel_variants]\n")
    Path("rules.py").write_text("")
    save(MLP, Path("loss.onnx"))
    data = ("--data", "d.npz")
    for command, out in (
        (trained, "d.npz"), (trained, "hard.npz"), (trained, "soft.npz"), ((*trained, "--val", "v.npz"), "v.npz"),
        (("predict", "mlp.onnx", *data), "d.npz"), (("attack", "mlp.onnx", *data), "d.npz"),
        (("explain", "mlp.onnx", *data), "d.npz"), (("explain", "mlp.onnx", *data), "soft.npz"),
        (("explain", "mlp.onnx", *data, "--baseline", "v.npz", "--method", "occlusion"), "v.npz"),
        (("build", "mlp.onnx", "--test-data", "d.npz"), "d.npz"),
        (("derive", "mlp.onnx", "--test-data", "d.npz"), "d.npz"),
        (("build", *BUILT, "--config", "c.toml"), "c.toml"), (("build", *BUILT, "--rules", "rules.py"), "rules.py"),
        (("build", *BUILT, "--tuned", "t.toml"), "t.toml"), (("build", *BUILT, "--loss", "loss.onnx"), "loss.onnx"),
    ):  # fmt: skip
        refused(shell, 2, "' is an input, which is never overwritten", command=(*command, "-o", out, "--force"))
    refused(
        shell, 2, "never overwritten", command=("build", *BUILT, "--config", "c.toml", "--report", "c.toml", "--force")
    )


def test_no_input_is_overwritten_that_onnxgrad_wrote(shell: Shell, trained: tuple[object, ...]) -> None:
    attack = ("attack", "mlp.onnx", "--no-verify")
    assert shell(*attack, "--data", "d.npz", "-o", "adv.npz").code == 0
    refused(shell, 2, "never overwritten", command=(*attack, "--data", "adv.npz", "-o", "adv.npz"))
    lora = (*trained, "--lora", "1", "--adapter", "a.safetensors", "-o", "l.onnx")
    assert shell(*lora, "--run", "run").code == 0
    again = (*trained, "--adapter-from", "a.safetensors", "--run", "again")
    refused(shell, 2, "never overwritten", command=(*again, "--adapter", "a.safetensors", "-o", "new.onnx"))
    refused(shell, 2, "never overwritten", command=(*again, "-o", "a.safetensors"))
    checkpoint = "run/checkpoint.safetensors"
    export = ("export", checkpoint, "--model", "mlp.onnx", "-o", checkpoint)
    refused(shell, 2, "never overwritten", command=(*export, "--force"))


def test_no_file_of_a_folder_that_is_read_is_overwritten(shell: Shell) -> None:
    Path("data").mkdir()
    for name, width in (("x", 4), ("label", 2)):
        np.save(f"data/{name}.npy", np.ones((4, width), np.float32))
    explain = ("explain", "mlp.onnx", "--data", "data", "--no-verify", "--force", "-o")
    refused(shell, 2, "in a folder of input files", command=(*explain, "data/x.npy"))
    assert shell("predict", "mlp.onnx", "--data", "data", "-o", "data/new.npz").code == 0
    assert shell("predict", "mlp.onnx", "--data", "data", "-o", "data/new.npz").code == 0, "onnxgrad's own"


def test_the_files_of_a_run_overwrite_no_input(shell: Shell, trained: tuple[object, ...]) -> None:
    """Not in the folder of a run that was killed before its first checkpoint either."""
    Path("run").mkdir()
    Path("run/lock").touch()
    Path("d.npz").rename("run/report.html")
    os.link("run/report.html", "d.npz")
    result = shell(*trained, "-o", "new.onnx", "--run", "run")
    assert result.code == 2 and result.facts == ("conflict", "report.html")
    assert Path("run/report.html").samefile("d.npz") and not Path("new.onnx").exists()


def test_what_one_command_has_read_another_one_writes(shell: Shell, trained: tuple[object, ...]) -> None:
    assert shell("attack", "mlp.onnx", "--data", "d.npz", "-o", "adv.npz", "--no-verify").code == 0
    assert shell("predict", "mlp.onnx", "--data", "adv.npz", "-o", "p.npz").code == 0
    assert shell("attack", "mlp.onnx", "--data", "d.npz", "-o", "adv.npz", "--no-verify").code == 0


def test_folders_that_are_only_called_like_an_input_keep_nothing(shell: Shell) -> None:
    """A folder called as a loss is, and models in a folder of data, of which none is read."""
    np.savez("d.npz", x=np.ones((8, 4), np.float32), label=np.ones((8, 2), np.float32))
    for folder in ("mse", "data"):
        Path(folder).mkdir()
        foreign = onnx.load("mlp.onnx")
        foreign.producer_name = "another"
        onnx.save(foreign, f"{folder}/m.onnx")
    np.save("data/x.npy", np.ones((8, 4), np.float32))
    np.save("data/label.npy", np.ones((8, 2), np.float32))
    for data, out in (("d.npz", "mse/m.onnx"), ("data", "data/m.onnx")):
        done = shell("train", "mlp.onnx", "--data", data, "--epochs", "1", "-o", out, "--run", f"run-{data}", "--force")
        assert done.code == 0, done.err
