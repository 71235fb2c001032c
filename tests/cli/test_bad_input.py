"""Everything that can be wrong with what a user gives: the message, the exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli_harness import (
    INTEGERS,
    MLP,
    NO_WEIGHTS,
    PROGRAM,
    UNKNOWN_OPS,
    WEIGHT,
    Shell,
    save,
    save_external,
)

BUILD = ("--label", "t", "-o", "out/train.onnx")
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def refused(shell: Shell, code: int, *words: str, command: tuple[object, ...]) -> str:
    """The command fails with this code, says these words, and changes no file."""
    before = shell.files()
    result = shell(*command)
    assert result.code == code, result.err
    assert result.err.lstrip().startswith("error: "), result.err
    assert "Traceback" not in result.err and not result.out
    for word in words:
        assert word in result.err, f"{word!r} not in {result.err!r}"
    assert shell.files() == before
    return result.err


# -- the command line ---------------------------------------------------------------------------------------


# -- the model's file ---------------------------------------------------------------------------------------


def test_shapes_contradict_each_other(shell: Shell) -> None:
    save(MLP.replace("float[batch, 4] x", "float[batch, 5] x"), Path("shapes.onnx"))
    refused(shell, 1, "contradict", command=("build", "shapes.onnx", *BUILD))


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_other_commands_read_alike(shell: Shell, command: str) -> None:
    Path("empty.onnx").touch()
    refused(shell, 1, "'empty.onnx' is empty", command=(command, "empty.onnx"))


def test_check_needs_a_training_model(shell: Shell) -> None:
    refused(shell, 2, "not a training model", "onnxgrad build", command=("check", "mlp.onnx"))


# -- external data ------------------------------------------------------------------------------------------


def test_external_data_missing(shell: Shell) -> None:
    save_external(Path("external.onnx"))
    refused(shell, 1, "'weights.bin' is missing", "'w'", command=("build", "external.onnx", *BUILD))


@pytest.mark.parametrize(("entries", "stored"), [({}, 95), ({"offset": 8, "length": 96}, 96), ({"offset": 200}, 96)])
def test_external_data_cut_short(shell: Shell, entries: dict[str, int], stored: int) -> None:
    save_external(Path("external.onnx"), **entries)
    Path("weights.bin").write_bytes(bytes(stored))
    refused(shell, 1, "cut short", f"has {stored}", command=("build", "external.onnx", *BUILD))


@pytest.mark.parametrize("entries", [{"length": 95}, {"offset": -1}])
def test_external_data_contradict_the_tensor(shell: Shell, entries: dict[str, int]) -> None:
    save_external(Path("external.onnx"), **entries)
    Path("weights.bin").write_bytes(bytes(96))
    refused(shell, 1, "are described otherwise", "96 bytes", command=("build", "external.onnx", *BUILD))


def test_external_data_outside_the_folder(shell: Shell, tmp_path: Path) -> None:
    Path("inner").mkdir()
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    Path("inner/link.bin").symlink_to("../weights.bin")
    for location in ("../weights.bin", str(tmp_path / "inner" / "weights.bin"), "link.bin"):
        save_external(Path("inner/external.onnx"), location)
        refused(shell, 1, "outside the model's folder", location, command=("build", "inner/external.onnx", *BUILD))


def test_linked_model_has_its_data_beside_the_target(shell: Shell) -> None:
    Path("blobs").mkdir()
    Path("links").mkdir()
    Path("blobs/5678").write_bytes(WEIGHT.tobytes())
    save_external(Path("blobs/1234"))
    Path("links/model.onnx").symlink_to("../blobs/1234")
    Path("links/weights.bin").symlink_to("../blobs/5678")
    result = shell("build", "links/model.onnx", *BUILD)
    assert result.code == 0, result.err
    assert [file.read_bytes() for file in Path("out").glob("train.onnx.*.data")] == [WEIGHT.tobytes()]
    np.savez("d.npz", x=np.ones((4, 8), np.float32), label=np.ones((4, 3), np.float32))
    data = ("--data", "d.npz")
    for command in (
        ("predict", *data, "-o", "p.npz"), ("evaluate", *data, "--loss", "mse"), ("check",),
        ("train", *data, "--val", "d.npz", "--epochs", "1", "-o", "t.onnx"),
        ("explain", *data, "--output", "y", "-o", "e.npz"),
    ):  # fmt: skip
        result = shell(command[0], "links/model.onnx" if command != ("check",) else "out/train.onnx", *command[1:])
        assert result.code == 0, (command, result.err)
    np.testing.assert_array_equal(np.load("p.npz")["y"][0], WEIGHT.reshape(8, 3).sum(0))


# -- what is asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--output", "yy"), ("no output 'yy'", "y")),
        (("--train", "w3"), ("'w3' matches no float weight", "did you mean")),
        (("--freeze", "b2"), ("'b2' matches no float weight", "b1")),
        (("--grad-of-input", "z"), ("'z' matches no float input", "x")),
        (("--dim", "bach=8"), ("no input has a dimension 'bach'", "batch")),
        (("--shape", "xx:1,4"), ("no input 'xx'", "x")),
        (("--shape", "x:1,5"), ("'x' has size 4 in the model, but 5 is given", "except on the batch axis")),
        (("--stop-after", "backwards"), ("no pass 'backwards'", "did you mean backward?")),
        (("--report", "report.txt"), ("'report.txt'", "use 'report.md'", ".html or .json")),
        (("--report", "report"), ("'report'", "use 'report.md'")),
        (("--loss", "msee"), ("msee", "did you mean")),
        (("--label", "x"), ("'x'",)),
        (("--dim", "batch"), ("SYMBOL=SIZE",)),
        (("--dim", "batch=0"), ("axis 0 of 'x' can't be empty: it is the batch", "1 or more")),
        (("--dim", "batch=-1"), ("SYMBOL=SIZE",)),
        (("--shape", "x:2,0"), ("'x' has size 4 in the model, but 0 is given", "except on the batch axis")),
        (("--shape", "1,4"), ("INPUT:DIM",)),
        (("--l1", "-1"), ("--l1",)),
        (("--lable", "y"), ("--lable", "--label")),
    ],
)
def test_option_does_not_fit(shell: Shell, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(shell, 2, *words, "hint: " if len(words) > 1 else "", command=("build", "mlp.onnx", *BUILD, *options))


def test_label_collides_with_a_value_inside(shell: Shell) -> None:
    refused(shell, 2, "'h'", command=("build", "mlp.onnx", "--label", "h", "-o", "out/train.onnx"))


def test_loss_does_not_fit_the_output(shell: Shell) -> None:
    save(NO_WEIGHTS, Path("rank1.onnx"))
    options = ("--loss", "cross-entropy", "--grad-of-input", "x")
    refused(shell, 2, "cross-entropy", command=("build", "rank1.onnx", *BUILD, *options))


def test_integer_model(shell: Shell) -> None:
    save(INTEGERS, Path("integers.onnx"))
    result = shell("build", "integers.onnx", *BUILD)
    assert result.code == 3 and result.facts == ("refused", "Add_y")


def test_unknown_command(shell: Shell) -> None:
    refused(shell, 2, "'biuld'", "'build'", command=("biuld", "mlp.onnx"))


def test_data_that_do_not_fit(shell: Shell) -> None:
    import numpy as np

    np.savez("d.npz", zz=np.zeros(3))
    build = ("build", "mlp.onnx", *BUILD, "--test-data")
    refused(shell, 2, "no input of the model is called 'zz'", command=(*build, "d.npz"))
    refused(shell, 1, "no such file or folder: 'gone.npz'", command=(*build, "gone.npz"))
    refused(shell, 1, "can't be read as an .npz file", command=(*build, "mlp.onnx"))
    for name, content in (("cut.npz", b"PK\x03\x04 cut short"), ("none.npz", b"")):
        Path(name).write_bytes(content)
        refused(shell, 1, f"'{name}' can't be read as an .npz file", command=(*build, name))


# -- what can't be differentiated: exit code 3, and the report is written ----------------------------------


@pytest.fixture
def unsupported(shell: Shell) -> Iterator[Shell]:
    """The shell in which a build is refused: exactly one file appears, the report."""
    before = shell.files()
    yield shell
    assert set(shell.files()) - set(before) <= {"out/train.onnx.report.md", "unknown.onnx", "bare.onnx"}
    assert "Refused" in Path("out/train.onnx.report.md").read_text()


def test_unknown_operators_are_listed_at_once(unsupported: Shell) -> None:
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    result = unsupported("build", "unknown.onnx", *BUILD)
    assert result.code == 3
    assert "my.ops::Twirl" in result.err and "my.ops::Swirl" in result.err and "--rules" in result.err
    report = Path("out/train.onnx.report.md").read_text()
    assert "my.ops::Twirl" in report and "my.ops::Swirl" in report


def test_refusal_as_json(unsupported: Shell) -> None:
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    result = unsupported("build", "unknown.onnx", *BUILD, "--json")
    assert result.code == 3
    assert result.json["status"] == "refused"
    assert [refusal["op_type"] for refusal in result.json["refusals"]].count("my.ops::Twirl") == 1


def test_nothing_to_train(unsupported: Shell) -> None:
    save(NO_WEIGHTS, Path("bare.onnx"))
    result = unsupported("build", "bare.onnx", *BUILD)
    assert result.code == 3
    assert result.facts == ("refused",) and "--grad-of-input" in result.err


# -- the files that are written -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["build", "evaluate", "predict", "explain", "train"])
def test_weights_in_place_of_a_model(shell: Shell, command: str) -> None:
    """The folder of a training, and a checkpoint in it: what makes a model of them is told."""
    safetensors = pytest.importorskip("safetensors.numpy")
    Path("m.run").mkdir()
    safetensors.save_file({"w": np.ones(3, np.float32)}, "m.run/best.safetensors", {"format": "onnxgrad"})
    data = () if command == "build" else ("--data", "d.npz")
    for source, said in (("m.run", "is a directory"), ("m.run/best.safetensors", "is a safetensors file")):
        told = shell(command, source, *data)
        assert told.code == 1 and said in told.err and "`onnxgrad export" in told.err, told.err


def test_a_training_model_is_not_explained_in_place_of_the_model(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--label", "t", "-o", "t.onnx", "--no-report").code == 0
    for command in ("explain", "attack"):
        told = shell(command, "t.onnx", "--data", "d.npz")
        assert told.code == 2 and "the model is already a training model" in told.err


BUILT = ("mlp.onnx", "--label", "t", "--no-verify")


# -- interruption -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_the_middle(shell: Shell, number: signal.Signals) -> None:
    """The rules' file is run in the middle of the command: there the signal comes."""
    Path("rules.py").write_text(
        "import os, signal\n"
        "from onnxgrad_cli import rule\n"
        "@rule('Sigmoid', override=True)\n"
        "def sigmoid(op, g, y, x):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    return g * y * (1 - y)\n"
    )
    before = shell.files()
    done = subprocess.run(
        [*PROGRAM, "build", "mlp.onnx", *BUILD, "--rules", "rules.py"],
        capture_output=True, text=True, env=_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr
    assert shell.files() == before


def test_interrupted_while_it_waits_for_stdin(shell: Shell) -> None:
    before = shell.files()
    process = subprocess.Popen(
        [*PROGRAM, "build", "-", *BUILD], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
    )
    assert process.stdin and process.stderr
    process.stdin.write(b"\x08" * (1 << 17))  # more than a pipe holds: now it reads
    process.stdin.flush()
    time.sleep(0.5)  # now it waits for more; between two reads Python would hear of the signal after the next one
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130 and "interrupted" in process.stderr.read().decode()
    process.stdin.close()
    process.stderr.close()
    assert shell.files() == before


def _environment() -> dict[str, str]:
    home = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": home}
