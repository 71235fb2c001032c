"""Several models in one command: each ends for itself, and all are told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

from onnxgrad_cli.cli import cli
from onnxgrad_cli.cli.batch import targets_in, typed
from onnxgrad_cli.cli.terminal.console import Console
from onnxgrad_cli.errors import UsageError
from tests.cli.terminal.test_document import validated
from tests.cli.test_cli import HOME, outputs
from tests.cli_harness import MLP, PROGRAM, UNKNOWN_OPS, Shell, save
from tests.facts import raises


@pytest.mark.slow
def test_one_failure_does_not_stop_the_rest(shell: Shell) -> None:
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    shutil.copy("mlp.onnx", "-second.onnx")
    Path("empty.onnx").touch()
    models = ("unknown.onnx", "mlp.onnx", "empty.onnx", "./-second.onnx")
    arguments = ("build", *models, "-O", "out/deep", "--jobs", "3", "--no-verify", "--no-report", "--freeze=b*")
    result = shell(*arguments, "--json")
    found = validated(result.document)
    assert (result.code, found["exit_code"], found["status"]) == (3, 3, "refused"), "the highest"
    assert [(each["model"], each["status"]) for each in found["result"]] == list(
        zip(models, ("refused", "done", "failed", "done"), strict=True)
    )
    assert found["result"][3]["files"] == ["out/deep/-second.train.onnx"]
    assert {path.name for path in Path("out/deep").iterdir()} == {"mlp.train.onnx", "-second.train.onnx"}
    assert outputs("out/deep/mlp.train.onnx") == ["loss", "w1_grad", "w2_grad"], "the options hold for each"
    assert "error: unknown.onnx: " in result.err and "'empty.onnx' is empty" in result.err
    told = shell("check", "out/deep/mlp.train.onnx", "out/deep/-second.train.onnx", "--jobs", "2")
    assert told.code == 0 and [line.split()[1] for line in told.out.splitlines()[1:]] == ["proved", "proved"]
    inspected = shell("inspect", "mlp.onnx", "empty.onnx", "-q")
    assert (inspected.code, inspected.out) == (1, "") and "'empty.onnx' is empty" in inspected.err


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="there is no SIGINT to send")
def test_an_interrupt_ends_all_and_leaves_nothing(shell: Shell) -> None:
    names = [f"m{i}.onnx" for i in range(4)]
    for name in names:
        shutil.copy("mlp.onnx", name)
    program = subprocess.Popen(
        [*PROGRAM, "build", *names, "-O", "out", "--jobs", "2", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(HOME)}, text=True,
    )  # fmt: skip
    assert program.stderr
    first = program.stderr.readline()
    assert first.startswith("1/4 ")
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 130 and "error: interrupted" in err and "Traceback" not in err, err
    told = {line.partition(": ")[0].split()[1] for line in (first + err).splitlines() if "/4 " in line}
    time.sleep(0.5)
    assert not list(Path("out").glob("*.tmp*")), "what was being written is gone"
    result = validated(json.loads(out))["result"]
    done = {each["model"] for each in result if each["exit_code"] == 0}
    assert told <= done and {each["exit_code"] for each in result} <= {0, 130}
    files = {
        path.name for path in Path("out").glob("*.onnx")
    }  # one may be written whole, and interrupted before it says
    assert files >= {f"{Path(name).stem}.train.onnx" for name in done}


@pytest.mark.parametrize(
    ("models", "options", "words"),
    [
        (("mlp.onnx", "./far/mlp.onnx"), ("-O", "out"), "would both be 'out.mlp.train.onnx'"),
        (
            ("mlp.onnx", "mlp.train.onnx"),
            (),
            "the output for 'mlp.onnx' would replace the input 'mlp.train.onnx'",
        ),
        (("mlp.onnx", "mlp.onnx"), (), "would replace the input 'mlp.onnx'|would both be|named twice"),
        (("mlp.onnx", "-"), ("-O", "out"), r"stdin \(-\) can't be combined with other models"),
        (
            ("/dev/fd/63", "/dev/fd/62"),
            ("-O", "out"),
            "'/dev/fd/63' is a stream, which can't be combined with other models",
        ),
        (("mlp.onnx", "/dev/stdin"), ("-O", "out"), "'/dev/stdin' is a stream"),
        (("mlp.onnx", "b.onnx"), ("-o", "c.onnx"), "--out can't be combined with --out-dir or several models"),
        (("mlp.onnx",), ("-O", "out", "--report", "r.md"), "--report can't be combined with"),
        (("mlp.onnx", "b.onnx"), ("--artifacts", "d"), "--artifacts can't be combined with"),
    ],
)
def test_what_would_collide_is_refused(
    models: tuple[str, ...], options: tuple[str, ...], words: str, shell: Shell
) -> None:
    before = shell.files()
    result = shell("build", *models, *options)
    assert result.code == 2 and re.search(words, result.err), result.err
    assert shell.files() == before


@pytest.mark.slow
def test_a_name_that_is_typed_comes_before_a_folder_that_is_configured(shell: Shell) -> None:
    Path("c.toml").write_text('[build]\nout-dir = "built"\n')
    command = ("build", "mlp.onnx", "--label", "t", "--config", "c.toml")
    assert shell(*command, "-o", "t.onnx").code == 0 and Path("t.onnx").is_file() and not Path("built").exists()
    assert shell(*command).code == 0 and Path("built/mlp.train.onnx").is_file()
    assert shell(*command, "-o", "t.onnx", "-O", "built").code == 2


def test_a_folder_that_can_not_be_made(shell: Shell) -> None:
    Path("file").touch()
    result = shell("build", "mlp.onnx", "-O", "file/out")
    assert result.code == 1 and result.facts == ("unwritable_file", "out_dir", "out")


@pytest.mark.skipif(os.name != "posix", reason="links take rights there")
def test_a_link_is_the_file_that_it_names(shell: Shell) -> None:
    Path("mlp.train.onnx").symlink_to("other.onnx")
    shutil.copy("mlp.onnx", "other.onnx")
    with raises(UsageError, "conflict", "mlp.onnx", "other.onnx"):
        targets_in("", ["mlp.onnx", "other.onnx"], "train")
    with raises(UsageError, "unwritable_file", "mlp.onnx", "mlp.train.onnx"):
        targets_in("", ["mlp.onnx"], "train")


def test_options_are_handed_on_as_they_were_typed() -> None:
    arguments = (
        "build a.onnx --loss mse:y -vv b.onnx -Oout --dim n=2 --dim m=3 --no-verify --jobs 2 --force --json".split()
    )
    command = cli.commands["build"]
    context = click.Context(command, obj=Console(arguments))
    assert list(typed(context, arguments)) == ["--loss=mse:y", "--dim=n=2", "--dim=m=3", "--no-verify", "--force"]
    assert list(typed(context, ["build", "--freeze=-x", "--label", "--", "--", "--json"])) == [
        "--freeze=-x",
        "--label=--",
    ]


@pytest.mark.slow
def test_each_model_may_be_given_data_of_its_own(shell: Shell) -> None:
    save(MLP.replace("x)", "u)").replace("MatMul(x", "MatMul(u"), Path("other.onnx"))
    for name, size in (("x", 7), ("u", 5)):
        np.savez(f"{name}.npz", **{name: np.ones((size, 4), np.float32)})
    models = ("mlp.onnx", "other.onnx")
    built = shell("build", *models, "-O", "out", "--test-data", "x.npz", "--test-data", "u.npz", "--json")
    assert built.code == 0, built.err
    assert ["x [7, 4]" in json.dumps(each["result"]["proof"]) for each in built.document["result"]] == [True, False]
    trained = ("out/mlp.train.onnx", "out/other.train.onnx")
    checked = shell("check", *trained, "--data", "x.npz", "--data", "u.npz", "--json")
    assert checked.code == 0, checked.err
    assert [size in json.dumps(each["result"]) for size, each in zip(
        ("x [7, 4]", "u [5, 4]"), checked.document["result"], strict=True
    )] == [True, True]  # fmt: skip
    Path("check.toml").write_text('[check]\ndata = ["x.npz", "u.npz"]\n')
    assert shell("check", *trained, "--config", "check.toml").code == 0
    assert shell("check", *trained, "--data", "x.npz").code == 2, "which is for all, and fits the first alone"


def test_data_for_more_models_or_fewer_than_there_are_is_refused(shell: Shell) -> None:
    result = shell("check", "a.onnx", "b.onnx", "c.onnx", "--data", "x.npz", "--data", "y.npz")
    assert result.code == 2 and result.facts == ("wrong_value", "data", "2", "3")
    result = shell("build", "mlp.onnx", "--test-data", "x.npz", "--test-data", "y.npz")
    assert result.code == 2 and result.facts == ("conflict", "test_data")


@pytest.mark.slow
def test_one_model_in_a_folder_is_as_one(shell: Shell) -> None:
    """But for the shape of the JSON, which goes by the option and not by how many a glob has found."""
    result = shell("build", "mlp.onnx", "-O", "out", "--no-verify", "--no-report", "--json")
    (only,) = validated(result.document)["result"]
    assert (only["model"], only["files"], result.code) == ("mlp.onnx", ["out/mlp.train.onnx"], 0)
    onnx.checker.check_model("out/mlp.train.onnx")
