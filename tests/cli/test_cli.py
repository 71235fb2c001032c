"""The command line: results, messages, JSON, pipes and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onnxgrad_cli import cli, files
from onnxgrad_cli.files import writing
from onnxgrad_cli.files.outputs import is_ours
from tests.cli_harness import PROGRAM, UNKNOWN_OPS, WEIGHT, Shell, save, save_external

HOME = Path(__file__).parents[2]
COMMANDS = {"build", "inspect", "check", "train", "export", "expand", "derive", "list", "view"}


def outputs(path: str | Path) -> list[str]:
    return [value.name for value in onnx.load(path).graph.output]


def process(*arguments: str, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(HOME), **variables}
    return subprocess.run([*PROGRAM, *arguments], input=stdin, capture_output=True, env=environment, check=False)


# -- build --------------------------------------------------------------------------------------------------


def test_model_is_marked_as_ours(shell: Shell) -> None:
    shell("build", "mlp.onnx")
    assert is_ours(Path("mlp.train.onnx")) and is_ours(Path("mlp.train.onnx.report.md"))
    assert not is_ours(Path("mlp.onnx"))


def test_quiet(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "-q")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_verbose(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "-v")
    assert [line.split()[0] for line in result.err.splitlines()[:8]] == [
        "prepare", "loss", "yield", "backward", "outputs", "few-bits", "in-turn", "cleanup",
    ]  # fmt: skip
    assert shell("build", "mlp.onnx", "-vv").code == 0


# -- external data, and models too large for protobuf -------------------------------------------------------


def test_external_data_stay_or_travel(shell: Shell) -> None:
    save_external(Path("external.onnx"), offset=16, length=96)
    Path("weights.bin").write_bytes(bytes(16) + WEIGHT.tobytes())
    assert shell("build", "external.onnx").code == 0
    assert {name for name in shell.files() if name.endswith(".bin")} == {"weights.bin"}
    Path("far").mkdir()
    assert shell("build", "external.onnx", "-o", "far/train.onnx").code == 0
    (data,) = Path("far").glob("*.data")
    assert data.read_bytes() == Path("weights.bin").read_bytes()
    stat = data.stat()
    assert shell("build", "external.onnx", "-o", "far/train.onnx").code == 0
    assert data.stat().st_mtime_ns == stat.st_mtime_ns, "equal data are not copied again"
    x, label = np.eye(8, dtype=np.float32), np.zeros((8, 3), np.float32)
    for path in ("external.train.onnx", "far/train.onnx"):
        loss = onnxruntime.InferenceSession(path).run(["loss"], {"x": x, "label": label})[0]
        np.testing.assert_allclose(loss, np.mean(WEIGHT**2), rtol=1e-6)
    tensor = onnx.load("far/train.onnx", load_external_data=False).graph.initializer[0]
    assert tensor.data_location == TensorProto.EXTERNAL and not tensor.raw_data


def test_model_too_large_for_protobuf(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit brought down to the size of the test's model."""
    monkeypatch.setattr(writing, "PROTOBUF_LIMIT", 80)
    monkeypatch.setattr(writing, "MAX_SHAPE_BYTES", 20)
    model, path = files.load_model("mlp.onnx")
    written = files.save_model(model, "big.onnx", path)
    assert [str(file) for file in written] == ["big.onnx", *map(str, Path().glob("big.onnx.*.data"))]
    stored = {t.name: t for t in onnx.load("big.onnx", load_external_data=False).graph.initializer}
    assert stored["w1"].data_location == TensorProto.EXTERNAL and not stored["w1"].float_data
    assert stored["b1"].data_location == TensorProto.DEFAULT
    x = np.ones((2, 4), np.float32)
    runs = [onnxruntime.InferenceSession(name).run(None, {"x": x})[0] for name in ("mlp.onnx", "big.onnx")]
    np.testing.assert_array_equal(*runs)
    assert files.save_model(model, "big.onnx", path) == written[:1], "they are references now"
    assert written[1].exists()
    monkeypatch.undo()


# -- the other commands -------------------------------------------------------------------------------------


def test_inspect(shell: Shell) -> None:
    before = shell.files()
    result = shell("inspect", "mlp.onnx", "--freeze", "b1")
    assert result.code == 0 and "2 weights " in result.out
    found = shell("inspect", "mlp.onnx", "--freeze", "b1", "--json").json
    assert [weight["name"] for weight in found["weights"]] == ["w1", "w2"]
    assert [(weight["name"], weight["reason"]) for weight in found["not_trained"]] == [("b1", "frozen by --freeze")]
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    result = shell("inspect", "unknown.onnx", "--json")
    assert result.code == 3 and len(result.json["refusals"]) == 2
    Path("unknown.onnx").unlink()
    assert shell.files() == before


def test_version(shell: Shell) -> None:
    assert shell("--version").out.startswith("onnxgrad ")


# -- how it speaks ------------------------------------------------------------------------------------------


def test_errors_as_json(shell: Shell) -> None:
    for command in (("build", "gone.onnx", "--json"), ("inspect", "mlp.onnx", "--output", "yy", "--json")):
        result = shell(*command)
        assert result.document["exit_code"] == result.code != 0
        assert result.document["error"]["message"] in result.err
    assert shell("build", "mlp.onnx", "--lable", "y", "--json").document["status"] == "usage"


def test_traceback_on_request(shell: Shell) -> None:
    assert "Traceback" not in shell("build", "gone.onnx").err
    assert "Traceback" in shell("build", "gone.onnx", "--traceback").err


def test_internal_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrad_cli.jobs import build

    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(build, "run_build", fail)
    result = shell("build", "mlp.onnx")
    assert result.code == 1
    assert "internal: ZeroDivisionError: by accident" in result.err and "--traceback" in result.err
    assert "https://github.com/onnxgrad/onnxgrad/issues" in result.err
    traced = shell("build", "mlp.onnx", "--traceback").err
    assert 'File "onnxgrad_cli/cli/commands/build.py"' in traced and str(HOME) not in traced, (
        "whose folders they are, is left out"
    )


def test_no_colour_unless_on_a_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in (result := shell("build", "mlp.onnx")).out + result.err
    monkeypatch.setattr("click._compat.isatty", lambda stream: True)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in shell("build", "gone.onnx").err
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in shell("build", "gone.onnx").err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shell("build", "gone.onnx").err


def test_lines_are_not_broken_in_a_pipe(shell: Shell) -> None:
    name = f"{'long' * 50}.onnx"
    result = shell("build", "mlp.onnx", "-o", name)
    assert any(line.endswith(f" {name}, {name}.report.md") for line in result.out.splitlines())
    assert all(line == line.rstrip() for line in result.out.splitlines())


def test_help_names_every_option_and_exit_code(shell: Shell) -> None:
    assert all(f"  {name} " in shell("--help").out for name in COMMANDS)
    assert all(str(code) in shell("--help").out for code in (0, 1, 2, 3, 4, 130))
    shown = shell("build", "--help-all").out
    for command in cli.cli.commands.values():
        if command.name == "build":
            assert all(flag in shown for param in command.params for flag in param.opts if flag.startswith("--"))
    result = shell()
    assert result.code == 2 and "Usage: onnxgrad" in result.err


def test_command_line_starts_without_the_heavy_packages() -> None:
    """That is what keeps `--help` and completion under 0.15 s."""
    program = (
        "import sys; from onnxgrad_cli.cli import run; import onnxgrad_cli\n"
        "code = run(['build', '--help']); onnxgrad_cli.OnnxgradError\n"
        "heavy = {'onnx', 'numpy', 'onnxruntime', 'rich', 'google'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=HOME, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import onnxgrad_cli

    for name in onnxgrad_cli.__all__:
        assert getattr(onnxgrad_cli, name) is not None
    assert dir(onnxgrad_cli) == sorted(onnxgrad_cli.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onnxgrad_cli.nothing


# -- configuration ------------------------------------------------------------------------------------------


# -- pipes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stdin_to_stdout(shell: Shell) -> None:
    before = shell.files()
    done = process("build", "-", "--label", "t", stdin=Path("mlp.onnx").read_bytes())
    assert done.returncode == 0, done.stderr
    model = onnx.load_model_from_string(done.stdout)
    assert [value.name for value in model.graph.output] == ["loss", "w1_grad", "b1_grad", "w2_grad"]
    assert b"every check passed" in done.stderr, "the summary must not go into the model"
    assert shell.files() == before
    checked = process("check", "-", stdin=done.stdout)
    assert checked.returncode == 0, checked.stderr


def test_file_to_stdout_and_stdin_to_file(shell: Shell) -> None:
    done = process("build", "mlp.onnx", "-o", "-", "-q")
    assert done.returncode == 0 and onnx.load_model_from_string(done.stdout) and not done.stderr
    assert "mlp.train.onnx" not in shell.files()
    done = process("build", "-", "-o", "t.onnx", "--json", stdin=Path("mlp.onnx").read_bytes())
    assert json.loads(done.stdout)["result"]["status"] == "built" and outputs("t.onnx")[0] == "loss"
    assert process("inspect", "-", stdin=Path("mlp.onnx").read_bytes()).returncode == 0


def test_bad_stdin(shell: Shell) -> None:
    for data, words in ((b"", b"stdin is empty"), (b"some text", b"stdin is a text file")):
        done = process("build", "-", stdin=data)
        assert done.returncode == 1 and words in done.stderr and not done.stdout


def test_model_and_json_do_not_share_stdout(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "-o", "-", "--json").code == 2


@pytest.mark.slow
def test_terminals_are_refused(shell: Shell) -> None:
    """On a pseudo-terminal: no binary goes to the screen, and no model is waited for."""
    import pty

    for command, words in (
        (("build", "mlp.onnx", "-o", "-"), b"can't be written to a terminal"),
        (("build", "-"), b"stdin is a terminal"),
    ):
        master, slave = pty.openpty()
        done = subprocess.run(
            [*PROGRAM, *command], stdin=slave, stdout=slave, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HOME)}, check=False,
        )  # fmt: skip
        os.close(slave)
        os.close(master)
        assert done.returncode == 2 and words in done.stderr


def test_reader_that_goes_away(shell: Shell) -> None:
    """`onnxgrad list passes | head -1`"""
    program = subprocess.Popen(
        [*PROGRAM, "list", "passes", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HOME)},
    )  # fmt: skip
    assert program.stdout and program.stderr
    program.stdout.close()
    error = program.stderr.read()
    program.stderr.close()
    assert program.wait() == 1 and error == b""
