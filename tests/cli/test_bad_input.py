"""Everything that can be wrong with what a user gives: the message, the exit code, and nothing left behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from onnxgrad_cli import files
from onnxgrad_cli.adapters.formats import AdapterTarget
from onnxgrad_cli.cli import cli
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.jobs.build import run_build
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


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


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


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            ("--untie", "--loss", "mse"),
            ["--untie requires a value, GLOB, but '--loss' is another option", "--untie=--loss"],
        ),
        (("-o", "--force"), ["-o requires a value, FILE, but '--force' is another option", "--out=--force"]),
        (("--untie",), ["'--untie' requires an argument"]),
    ],
)
def test_an_option_without_its_value_takes_no_other_option_for_it(
    shell: Shell, typed: tuple[str, ...], words: list[str]
) -> None:
    refused(shell, 2, *words, command=("build", "mlp.onnx", *typed))


@pytest.mark.parametrize("option", ["--transform=", "--lora=", "--recompute=", "--loss="])
def test_no_value_is_empty(shell: Shell, option: str) -> None:
    """As a shell makes one of a variable that is not set."""
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    refused(shell, 2, command=("train", "mlp.onnx", "--data", "d.npz", "-o", "t.onnx", option))


def test_no_path_is_empty(shell: Shell) -> None:
    """As a shell makes one of a variable that is not set; Python would take it for the working directory."""
    Path("empty.toml").write_text('out = ""\n')
    params = [(name, param) for name, command in cli.commands.items() for param in command.params]
    paths = [(name, param) for name, param in params if isinstance(param.type, click.Path)]
    assert {name for name, _ in paths} >= set(cli.commands)
    kinds = re.compile("FILE|DIR|FOLDER|DATA|MODEL")
    others = {param.name for _, param in params if kinds.search(param.metavar or "")} - {p.name for _, p in paths}
    assert others == {"losses", "metrics", "transform"}, "these may be names, or a function in a file"
    for name, param in paths:
        with pytest.raises(click.BadParameter, match="empty string"):
            param.type.convert("", param, click.Context(cli.commands[name]))
    build = ("build", "mlp.onnx", "--label", "t")
    for command in (
        (*build, "-o", ""), (*build, "--report", ""), (*build, "--config", "empty.toml"), (*build, "--rules="),
        ("train", "mlp.onnx", "--data", "d.npz", "--run", ""), ("train", "mlp.onnx", "--data", ""),
        ("train", "mlp.onnx", "--data", "d.npz", "--adapter", ""), ("build", ""), ("view", ""),
        ("export", "w.bin", "--model", ""), ("explain", "mlp.onnx", "--data", "d", "-o", ""),
        ("pack", "", "--data", "d"), ("build", "mlp.onnx", "-O", ""), ("build", "mlp.onnx", "--out-dir="),
    ):  # fmt: skip
        refused(shell, 2, "expected a path, got an empty string", command=command)
    for call in (lambda: run_build(""), lambda: run_build("mlp.onnx", ""), lambda: AdapterTarget("")):
        with pytest.raises(UsageError, match="empty string"):
            call()


def test_a_value_may_look_like_an_option_where_it_is_meant(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--label=--loss", "-o", "out/train.onnx").code == 0
    assert "--loss" in {value.name for value in onnx.load("out/train.onnx").graph.input}
    refused(shell, 1, "no such file", command=("inspect", "--", "--label"))


# -- the model's file ---------------------------------------------------------------------------------------


def test_no_such_file(shell: Shell) -> None:
    refused(shell, 1, "no such file: 'mpl.onnx'", "did you mean mlp.onnx?", command=("build", "mpl.onnx", *BUILD))
    refused(shell, 1, "there is no folder 'gone'", command=("build", "gone/mlp.onnx", *BUILD))


def test_empty_file(shell: Shell) -> None:
    Path("empty.onnx").touch()
    refused(shell, 1, "'empty.onnx' is empty", command=("build", "empty.onnx", *BUILD))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97, 0.999])
def test_truncated(shell: Shell, share: float) -> None:
    whole = Path("mlp.onnx").read_bytes()
    Path("cut.onnx").write_bytes(whole[: int(share * len(whole))])
    refused(shell, 1, "'cut.onnx' is no", "hint: ", "again", command=("build", "cut.onnx", *BUILD))


def test_truncated_everywhere(tmp_path: Path) -> None:
    whole, cut = save(MLP, tmp_path / "mlp.onnx").read_bytes(), tmp_path / "cut.onnx"
    for length in range(len(whole) - 20):  # what follows the graph is the opset
        cut.write_bytes(whole[:length])
        with pytest.raises(OnnxgradError):
            files.load_model(cut)


def test_text_file(shell: Shell) -> None:
    Path("notes.onnx").write_text(MLP)
    refused(shell, 1, "'notes.onnx' is a text file", "onnx.parser", command=("build", "notes.onnx", *BUILD))


def test_git_lfs_pointer(shell: Shell) -> None:
    Path("lfs.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(shell, 1, "Git LFS pointer", "git lfs pull", command=("build", "lfs.onnx", *BUILD))


def test_archive(shell: Shell) -> None:
    Path("model.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(shell, 1, "zip archive", "torch.onnx", command=("build", "model.pt", *BUILD))


@pytest.mark.parametrize(
    ("name", "content", "told", "hint"),
    [
        ("m.tflite", b"\x1c\0\0\0TFL3\x14\0", "TensorFlow Lite", "python -m tf2onnx.convert --tflite"),
        ("m.h5", b"\x89HDF\r\n\x1a\n\0", "HDF5", "python -m tf2onnx.convert --keras"),
        ("m.gguf", b"GGUF\x03\0\0\0", "GGUF", "onnxruntime-genai"),
        ("m.pth", b"\x80\x02}q\x00", "pickle", "torch.onnx"),
        ("saved_model.pb", b"\x08\x01\x12\x04\x0a\x02\xff\xfe", "TensorFlow SavedModel", "--saved-model"),
        ("m.mlmodel", b"\x08\x04\x12\x04\x0a\x02\xff\xfe", "Core ML", "export the model"),
        ("cut.pb", b"\x08\x01\x12\x04\x0a\x02\xff\xfe", "has no graph", "export it again"),
        ("folder/saved_model.pb", b"\x08\x01", "TensorFlow SavedModel", "--saved-model folder"),
    ],
)
def test_other_formats_are_told_with_their_converter(
    name: str, content: bytes, told: str, hint: str, shell: Shell
) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content)
    given = "folder" if name.startswith("folder") else name
    refused(shell, 1, told, hint, command=("build", given, *BUILD))


def test_directory(shell: Shell) -> None:
    refused(shell, 1, "'out' is a directory", command=("build", "out", *BUILD))


@pytest.mark.skipif(AS_ROOT, reason="root may read everything")
def test_not_readable(shell: Shell) -> None:
    Path("mlp.onnx").chmod(0)
    refused_ = shell("build", "mlp.onnx", *BUILD)
    assert refused_.code == 1 and "can't be read" in refused_.err


def test_no_graph(shell: Shell) -> None:
    Path("bare.onnx").write_bytes(onnx.ModelProto(ir_version=8, producer_name="test").SerializeToString())
    refused(shell, 1, "has no graph", command=("build", "bare.onnx", *BUILD))


def test_fails_the_checker(shell: Shell) -> None:
    model = parser.parse_model(MLP)
    model.graph.node[0].input[0] = "nobody"
    onnx.save(model, "broken.onnx")
    refused(shell, 1, "not a valid ONNX model", "nobody", command=("build", "broken.onnx", *BUILD))


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
    assert result.code == 3 and "no float output for the loss: Add 'Add_y' produces no floats" in result.err


def test_unknown_command(shell: Shell) -> None:
    refused(shell, 2, "'biuld'", "'build'", command=("biuld", "mlp.onnx"))


def test_config_with_unknown_option(shell: Shell) -> None:
    Path("c.toml").write_text('lable = "y"\n')
    refused(shell, 2, "unknown option 'lable'", "label", command=("build", "mlp.onnx", "--config", "c.toml"))
    Path("c.toml").write_text("label = \n")
    refused(shell, 2, "not TOML", command=("build", "mlp.onnx", "--config", "c.toml"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("epochs = [1, 2]", "'epochs' takes one value, not several"),
        ("epochs = {a = 1}", "'epochs' takes numbers or text, not {'a': 1}"),
        ("epochs = 1979-05-27", "'epochs' takes numbers or text, not datetime.date(1979, 5, 27)"),
        ("epochs = inf", "'inf' is not a valid integer"),
        ("train = [[1]]", "'train' takes one value, not several"),
        ("dim = {batch = {a = 1}}", "'dim' takes numbers or text"),
        ('out = "a\\u0000b"', r"'out' takes numbers or text, not 'a\x00b'"),
        ("balance = 1", "'balance' must be true or false, not 1"),
        ("resume = true", "'True' is not one of 'never', 'auto', 'must'"),
        (f"epochs = {'9' * 5000}", "is not TOML"),
        (f"epochs = {'[' * 5000}", "is not TOML"),
    ],
)
def test_config_with_values_of_other_types(shell: Shell, line: str, words: str) -> None:
    Path("c.toml").write_text(line + "\n")
    refused(shell, 2, words, command=("train", "mlp.onnx", "--data", "d.npz", "--config", "c.toml"))


def test_config_has_what_would_be_typed(shell: Shell) -> None:
    Path("c.toml").write_text(
        'label = 5\nkeep-outputs = true\ntrain = ["w1", "b*"]\nl2 = 1\nreport = "r.json"\ntrain_last = 2\n'
        "[dim]\nbatch = 3\n"
    )
    result = shell("build", "mlp.onnx", "-o", "out/train.onnx", "--config", "c.toml", "--no-verify", "--json")
    assert result.code == 0, result.err
    options = result.json["asked"]["options"]
    assert (options["--label"], options["--train"], options["--dim"]) == ("5", "w1, b*", "batch=3"), options


def test_config_has_sections_of_commands(shell: Shell) -> None:
    Path("c.toml").write_text(
        'label = "a"\n[build]\nlabel = "b"\ntrain = "w1"\n[build.dim]\nbatch = 3\n[train]\nrate = 1\n'
    )
    command = ("build", "mlp.onnx", "-o", "out/train.onnx", "--config", "c.toml", "--no-verify", "--json")
    refused = shell(*command)
    assert refused.code == 2 and "unknown option [train] 'rate'" in refused.err, "what the others get is checked too"
    Path("c.toml").write_text(Path("c.toml").read_text().replace("rate =", "epochs ="))
    options = shell(*command).json["asked"]["options"]
    assert (options["--label"], options["--train"], options["--dim"]) == ("b", "w1", "batch=3")
    assert shell("inspect", "mlp.onnx", "--config", "c.toml", "--json").json["asked"]["options"]["--label"] == "a"
    Path("c.toml").write_text('[biuld]\nlabel = "b"\n')
    assert "unknown section [biuld]\nhint: did you mean build?" in shell(*command).err
    Path("c.toml").write_text('[list]\nlabel = "b"\n')
    assert "unknown option [list] 'label'" in shell(*command).err


@pytest.mark.parametrize(
    "command", [("build", "mlp.onnx", *BUILD), ("list", "operators", "relu"), ("derive", "mlp.onnx")]
)
def test_only_the_command_line_names_code(
    shell: Shell, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rules.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    Path("c.toml").write_text('rules = ["rules.py"]\n')
    hint = "type the option on the command line"
    refused(shell, 2, "a configuration must not", "rules.py", hint, command=(*command, "--config", "c.toml"))
    monkeypatch.setenv(f"ONNXGRAD_{command[0].upper()}_CONFIG", "c.toml")
    refused(shell, 2, "a configuration must not", "rules.py", hint, command=command)
    monkeypatch.delenv(f"ONNXGRAD_{command[0].upper()}_CONFIG")
    monkeypatch.setenv(f"ONNXGRAD_{command[0].upper()}_RULES", "rules.py")
    refused(shell, 2, "the environment must not", "rules.py", hint, command=command)
    assert not Path("ran").exists()
    assert shell(*command, "--rules", "rules.py").code == 0 and Path("ran").exists(), "who types it, means it"


def test_rules_that_fail(shell: Shell) -> None:
    Path("r.py").write_text("1 / 0\n")
    refused(shell, 2, "'r.py' fails: ZeroDivisionError", command=("build", "mlp.onnx", *BUILD, "--rules", "r.py"))
    Path("r.py").write_text("from onnxgrad_cli import rule\n@rule('Sigmoid')\ndef mine(op, g, y, x):\n    return g\n")
    refused(shell, 1, "two rules for ai.onnx::Sigmoid", command=("build", "mlp.onnx", *BUILD, "--rules", "r.py"))


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
    assert "nothing to train" in result.err and "--grad-of-input" in result.err


# -- the files that are written -----------------------------------------------------------------------------


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
    assert result.code == 2 and "'run/report.html' is an input, which is never overwritten" in result.err
    assert Path("run/report.html").samefile("d.npz") and not Path("new.onnx").exists()


def test_what_one_command_has_read_another_one_writes(shell: Shell, trained: tuple[object, ...]) -> None:
    assert shell("attack", "mlp.onnx", "--data", "d.npz", "-o", "adv.npz", "--no-verify").code == 0
    assert shell("predict", "mlp.onnx", "--data", "adv.npz", "-o", "p.npz").code == 0
    assert shell("attack", "mlp.onnx", "--data", "d.npz", "-o", "adv.npz", "--no-verify").code == 0


def test_same_file_twice(shell: Shell) -> None:
    refused(shell, 2, "written twice", command=("build", "mlp.onnx", *BUILD, "--report", "r.md", "--report", "r.md"))


def test_what_is_written_together_has_names_of_its_own(shell: Shell, trained: tuple[object, ...]) -> None:
    inputs = ("build", "mlp.onnx", "--label", "t", "--weights", "inputs", "-o", "out/w.onnx", "--report", "out/w.json")
    refused(shell, 2, "'out/w.json' would be written twice", command=inputs)
    assert shell(*trained, "--lora", "1", "-o", "l.onnx").code == 0
    export = ("export", "l.onnx.run/checkpoint.safetensors", "--model", "mlp.onnx", "-o", "a.safetensors")
    refused(shell, 2, "a.safetensors' would be written twice", command=(*export, "--adapter", "out/../a.safetensors"))


@pytest.mark.parametrize("out", ["N" * 300, "N" * 250])  # of the second the name of the report alone is too long
def test_a_name_that_no_folder_takes(shell: Shell, out: str) -> None:
    refused(shell, 1, "can't be written: File name too long", command=("build", "mlp.onnx", "--label", "t", "-o", out))


def test_foreign_file_is_kept(shell: Shell) -> None:
    save(NO_WEIGHTS, Path("out/train.onnx"))
    refused(shell, 2, "exists, and onnxgrad did not write it", "--force", command=("build", "mlp.onnx", *BUILD))
    assert shell("build", "mlp.onnx", *BUILD, "--force").code == 0
    assert shell("build", "mlp.onnx", *BUILD).code == 0, "a file of its own is replaced without asking"
    Path("out/notes.md").write_text("# Shopping\n")
    refused(shell, 2, "--force", command=("build", "mlp.onnx", *BUILD, "--report", "out/notes.md"))


@pytest.mark.parametrize("out", ["p.csv", "p.jsonl", "p.parquet"])
def test_of_a_file_that_cannot_say_who_wrote_it_nobody_else_is_told(
    shell: Shell, trained: tuple[object, ...], out: str
) -> None:
    if out == "p.parquet":
        pytest.importorskip("pyarrow")
    command = ("predict", "mlp.onnx", "--data", "d.npz", "-o", out)
    assert shell(*command).code == 0
    said = refused(shell, 2, f"error: '{out}' exists\n", "--force", command=command)
    assert "did not write" not in said
    assert shell(*command, "--force").code == 0


def test_other_data_file_is_kept(shell: Shell) -> None:
    save_external(Path("external.onnx"))
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    Path("out/weights.bin").write_bytes(b"something else")
    assert shell("build", "external.onnx", *BUILD).code == 0
    assert Path("out/weights.bin").read_bytes() == b"something else"
    assert [file.read_bytes() for file in Path("out").glob("train.onnx.*.data")] == [WEIGHT.tobytes()]


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


def test_output_path_not_writable(shell: Shell) -> None:
    for out, words in (
        ("gone/train.onnx", "no folder 'gone'"),
        ("out", "'out' is a directory"),
        ("mlp.onnx/train.onnx", "no folder 'mlp.onnx'"),
    ):
        refused(shell, 1, words, command=("build", "mlp.onnx", "--label", "t", "-o", out, "--no-report"))


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="it says not so of its file systems")
def test_file_system_that_is_only_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights that nobody lacks are not to be looked for."""
    trusted, asked = os.access, os.statvfs
    shut = Path("out").resolve()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != shut and trusted(path, mode))
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_flag=os.ST_RDONLY) if Path(path).resolve() == shut else asked(path),
    )
    refused(
        shell, 1, "'out/train.onnx' can't be written: its file system is read-only", command=("build", *BUILT, *BUILD)
    )
    adapter = ("train", "mlp.onnx", "--data", "d.npz", "--lora", "1", "--adapter", "out/peft")
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    refused(shell, 1, "'out/peft' can't be created: its file system is read-only", command=adapter)


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_folder_not_writable(shell: Shell) -> None:
    Path("out").chmod(0o555)
    refused(shell, 1, "permission denied", command=("build", "mlp.onnx", *BUILD))


BUILT = ("mlp.onnx", "--label", "t", "--no-verify")


@pytest.mark.skipif(os.name == "nt", reason="it has no such files")
@pytest.mark.parametrize(
    "place", ["/dev/null", "/dev/gone.onnx", "/proc/gone.onnx", "fifo", "socket", "open", "twice", "folder/1"]
)
def test_what_is_no_file_is_not_written(shell: Shell, place: str) -> None:
    """A device, a pipe, a socket, what is open in this process (as /dev/stdout is), and links to them."""
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as listener, Path("redirected").open("wb") as stream:
        listener.bind("socket")
        Path("open").symlink_to(f"/proc/self/fd/{stream.fileno()}")
        Path("twice").symlink_to("open")
        Path("folder").symlink_to("/proc/self/fd")
        links = {path for path in Path().iterdir() if path.is_symlink()}
        for force in ((), ("--force",)):
            refused(shell, 1, "is not a file", "-o - writes", command=("build", *BUILT, "-o", place, *force))
            told = refused(shell, 1, "is not a file", command=("tune", "mlp.onnx", "-o", place))
            assert "-o -" not in told, "its results go to no stream"
        assert links == {path for path in Path().iterdir() if path.is_symlink()}, "no link is replaced"


@pytest.mark.skipif(os.name == "nt", reason="it has no such files")
def test_what_is_no_file_is_none_for_any_result(shell: Shell) -> None:
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    for suffix in (".md", ".html", ".npz", ".safetensors", ".dot", ""):
        os.mkfifo(f"pipe{suffix}")
    trained = ("train", "mlp.onnx", "--data", "d.npz", "--epochs", "1")
    for command in (
        ("build", *BUILT, "-o", "t.onnx", "--report", "pipe.md"),
        ("build", *BUILT, "-o", "t.onnx", "--picture", "pipe.html"),
        ("derive", "mlp.onnx", "-o", "pipe"), ("expand", "mlp.onnx", "-o", "pipe"),
        ("view", "mlp.onnx", "-o", "pipe.dot"),
        ("predict", "mlp.onnx", "--data", "d.npz", "-o", "pipe.npz"),
        ("explain", "mlp.onnx", "--data", "d.npz", "-o", "pipe.npz"),
        ("attack", "mlp.onnx", "--data", "d.npz", "-o", "pipe.npz"),
        (*trained, "-o", "pipe"), (*trained, "--picture", "pipe.html"),
        (*trained, "--lora", "1", "--adapter", "pipe.safetensors"),
    ):  # fmt: skip
        refused(shell, 1, "is not a file: it is, or leads to, a device, a pipe or a socket", command=command)


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_a_result_goes_through_a_link_that_was_named(shell: Shell) -> None:
    Path("link.onnx").symlink_to("out/t.onnx")
    Path("report.md").symlink_to("out/r.md")
    command = ("build", *BUILT, "-o", "link.onnx", "--report", "report.md")
    assert shell(*command).code == 0, "of a link that leads to nothing, the file that it names is made"
    written = Path("out/t.onnx").read_bytes()
    Path("out/t.onnx").chmod(0o600)
    assert shell(*command, "--train", "w1").code == 0, "a file of onnxgrad's is replaced without asking"
    assert Path("out/t.onnx").read_bytes() != written and stat.S_IMODE(Path("out/t.onnx").stat().st_mode) == 0o600
    assert Path("link.onnx").is_symlink() and Path("report.md").is_symlink()
    assert sorted(path.name for path in Path("out").iterdir()) == ["r.md", "t.onnx"]
    Path("out/t.onnx").write_text("mine")
    refused(shell, 2, "onnxgrad did not write it", "--force", command=command)
    assert shell(*command, "--force").code == 0 and Path("link.onnx").is_symlink()
    Path("same.md").symlink_to("report.md")
    refused(shell, 2, "written twice", command=(*command, "--report", "same.md", "--force"))


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_weights_beside_a_model_are_found_by_its_own_name(shell: Shell) -> None:
    """onnxruntime looks for them beside the name that it is given: a link elsewhere is none to open the model by."""
    save_external(Path("external.onnx"))
    Path("weights.bin").write_bytes(WEIGHT.tobytes())
    Path("link.onnx").symlink_to("out/t.onnx")
    assert shell("build", "external.onnx", "--label", "t", "-o", "link.onnx").code == 0
    written = sorted(path.name for path in Path("out").iterdir())
    assert len(written) == 3 and {"t.onnx", "t.onnx.report.md"} < set(written)
    onnxruntime.InferenceSession("out/t.onnx")
    with pytest.raises(Exception, match="External data"):
        onnxruntime.InferenceSession("link.onnx")


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_names_that_nobody_typed_go_through_no_link(shell: Shell) -> None:
    """A stranger's folder may have links by the names that results have where none is named."""
    Path("mlp.train.onnx").symlink_to("elsewhere")
    Path("mlp.train.onnx.report.md").symlink_to("elsewhere.md")
    assert shell("build", *BUILT).code == 0
    assert not Path("elsewhere").exists() and not Path("elsewhere.md").exists()
    Path("art").mkdir()
    Path("art/training_model.onnx").symlink_to("../elsewhere")
    assert shell("build", *BUILT, "--artifacts", "art").code == 0
    assert not Path("elsewhere").exists() and not Path("art/training_model.onnx").is_symlink()


def test_disk_full_at_save(shell: Shell) -> None:
    """The limit on a file's size is met in the middle of a write, as the end of a disk is."""
    import resource

    before = shell.files()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    unwritten = {"PYTHONDONTWRITEBYTECODE": "1"}  # else Python keeps a module that was cut off, for all who follow
    done = subprocess.run(
        [*PROGRAM, "build", "mlp.onnx", *BUILD, "--no-report"],
        capture_output=True, text=True, preexec_fn=limit, env=_environment() | unwritten, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "'out/train.onnx' can't be written: no space is left" in done.stderr
    assert shell.files() == before


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no disk's copy of a folder")
def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has the bytes, then the file its name, then the disk has the name; another file waits for nothing."""
    out, seen = tmp_path / "out", []
    out.write_bytes(b"old")

    def sync(place: int) -> None:
        of = os.fstat(place)
        seen.append((stat.S_ISDIR(of.st_mode), of.st_size if stat.S_ISREG(of.st_mode) else of.st_ino, out.read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)
    files.save_bytes(b"newer", out)
    assert (seen, out.read_bytes()) == ([], b"newer")
    files.save_bytes(b"the newest", out, durable=True)
    assert seen == [(False, 10, b"newer"), (True, tmp_path.stat().st_ino, b"the newest")]


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no disk's copy of a folder")
@pytest.mark.parametrize(
    ("code", "folder", "words"),
    [
        (errno.ENOSPC, False, "no space is left"),  # a file system may find its place at this moment only
        (errno.EIO, False, "Input/output error"),
        (errno.EIO, True, "Input/output error"),
        (errno.EINVAL, True, ""),  # it can't be asked for that
    ],
)
def test_a_disk_that_does_not_take_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, folder: bool, words: str
) -> None:
    def sync(place: int) -> None:
        if stat.S_ISDIR(os.fstat(place).st_mode) == folder:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", sync)
    out = tmp_path / "out"
    for before in (None, b"old"):
        if before:
            out.write_bytes(before)
        if words:
            with pytest.raises(OnnxgradError, match=words):
                files.save_bytes(b"new", out, durable=True)
        else:
            files.save_bytes(b"new", out, durable=True)
        expected = b"new" if not words or folder else before
        assert [file.read_bytes() for file in tmp_path.iterdir()] == ([expected] if expected else [])
        out.unlink(missing_ok=True)


@pytest.mark.parametrize("where", ["data", "model"])
def test_failure_at_save_brings_back_what_was(shell: Shell, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """External data are copied first: neither they nor the model stay when either can't be written."""
    save_external(Path("external.onnx"), "sub/weights.bin")
    Path("sub").mkdir()
    Path("sub/weights.bin").write_bytes(WEIGHT.tobytes())
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.suffix == {"data": ".data", "model": ".onnx"}[where]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    refused(shell, 1, "no space is left", command=("build", "external.onnx", *BUILD))


# -- interruption -------------------------------------------------------------------------------------------


def test_interrupted_at_save(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    refused(shell, 130, "interrupted", command=("build", "mlp.onnx", *BUILD))


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
