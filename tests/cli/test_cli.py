"""The command line as its users meet it: results, narration, JSON, configuration, pipes, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from onnxgrad_cli import cli, files
from onnxgrad_cli.cli.commands.listing import KINDS
from onnxgrad_cli.files import writing
from onnxgrad_cli.files.outputs import is_ours
from tests.cli_harness import MLP, PROGRAM, UNKNOWN_OPS, WEIGHT, Result, Shell, save, save_external

HOME = Path(__file__).parents[2]
COMMANDS = {"build", "inspect", "check", "train", "export", "expand", "derive", "list", "view"}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONNXGRAD_")]:
        monkeypatch.delenv(name)
    save(MLP, tmp_path / "mlp.onnx")
    return Shell(tmp_path, capsys)


def outputs(path: str | Path) -> list[str]:
    return [value.name for value in onnx.load(path).graph.output]


def process(*arguments: str, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(HOME), **variables}
    return subprocess.run([*PROGRAM, *arguments], input=stdin, capture_output=True, env=environment, check=False)


# -- build --------------------------------------------------------------------------------------------------


def test_build(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--label", "t")
    assert result.code == 0, result.err
    assert set(shell.files()) == {"mlp.onnx", "mlp.train.onnx", "mlp.train.onnx.report.md"}
    assert outputs("mlp.train.onnx") == ["loss", "w1_grad", "b1_grad", "w2_grad"]
    assert "every check passed" in result.out
    assert re.fullmatch(r"built \| \d+\.\d\d s\n", result.err), "the command line is not repeated"
    session = onnxruntime.InferenceSession("mlp.train.onnx")
    x, t = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
    y = onnxruntime.InferenceSession("mlp.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(session.run(["loss"], {"x": x, "t": t})[0], np.mean(y**2), rtol=1e-6)


def test_model_is_marked_as_ours(shell: Shell) -> None:
    shell("build", "mlp.onnx")
    assert is_ours(Path("mlp.train.onnx")) and is_ours(Path("mlp.train.onnx.report.md"))
    assert not is_ours(Path("mlp.onnx"))


def test_reports(shell: Shell) -> None:
    reports = ("--report", "r.md", "--report", "r.html", "--report", "r.json")
    assert shell("build", "mlp.onnx", *reports).code == 0
    assert {"r.md", "r.html", "r.json"} == set(shell.files()) - {"mlp.onnx", "mlp.train.onnx"}
    data = json.loads(Path("r.json").read_text())
    assert data["status"] == "built" and data["proof"]["status"] == "passed"
    assert shell("build", "mlp.onnx", *reports).code == 0, "its own reports are replaced without asking"
    assert shell("build", "mlp.onnx", "-o", "other.onnx", "--no-report").code == 0
    assert "other.onnx.report.md" not in shell.files()


def test_quiet(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "-q")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_verbose(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "-v")
    assert [line.split()[0] for line in result.err.splitlines()[:8]] == [
        "prepare", "loss", "yield", "backward", "outputs", "few-bits", "in-turn", "cleanup",
    ]  # fmt: skip
    assert shell("build", "mlp.onnx", "-vv").code == 0


def test_dump_passes_and_stop_after(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--dump-passes", "dump", "--stop-after", "backward")
    assert result.code == 0, result.err
    names = ["1-prepare.onnx", "2-loss.onnx", "3-yield.onnx", "4-backward.onnx"]
    assert sorted(path.name for path in Path("dump").iterdir()) == names
    kinds = [{node.op_type for node in onnx.load(Path("dump") / name).graph.node} for name in names]
    assert ["YieldOp" in kind for kind in kinds] == [False, False, True, True]
    assert "YieldOp" in {node.op_type for node in onnx.load("mlp.backward.onnx").graph.node}
    assert "mlp.train.onnx" not in shell.files()
    assert result.err.startswith("stopped | ")
    assert shell("build", "mlp.onnx", "--dump-passes", "dump").code == 0, "its own dumps are replaced"
    last = {node.op_type for node in onnx.load("dump/8-cleanup.onnx").graph.node}
    assert "YieldOp" not in last and "ConstantOfShape" in last


def test_losses_and_names(shell: Shell) -> None:
    result = shell("build", "mlp.onnx", "--loss", "mse:y:t", "--loss", "mae:y:u:0.5", "--freeze", "b*",
                   "--grad-of-input", "x", "--keep-outputs", "-o", "t.onnx")  # fmt: skip
    assert result.code == 0, result.err
    assert outputs("t.onnx") == ["loss", "w1_grad", "w2_grad", "x_grad", "y"]
    assert {"t", "u"} < {value.name for value in onnx.load("t.onnx").graph.input}


def test_loss_options(shell: Shell) -> None:
    command = ("build", "mlp.onnx", "--loss", "huber", "-o", "t.onnx", "--json")
    assert shell(*command, "--loss-option", "delta=0.5").json["asked"]["options"]["loss options"] == "delta=0.5"
    assert shell(*command, "--loss-option", "delta=wide").code == 2
    assert shell(*command, "--loss-option", "deltas=1").code == 2


def test_shapes(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--dim", "batch=8").code == 0
    dims = onnx.load("mlp.train.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [8, 4]
    assert shell("build", "mlp.onnx", "--shape", "x:5,4").code == 0
    dims = onnx.load("mlp.train.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [5, 4]


def test_rules_from_a_file(shell: Shell) -> None:
    save(UNKNOWN_OPS.replace("{1, 2, 3, 4}", "{1, 2, 3, 4}, float[batch, 4] k"), Path("unknown.onnx"))
    Path("rules.py").write_text(
        "from onnxgrad_cli import rule\n"
        "@rule('Twirl Swirl', domain='my.ops')\n"
        "def twirl(op, g, y, x):\n    return g * 2\n"
    )
    from onnxgrad_cli.autodiff import registry

    with registry.scoped():
        assert shell("build", "unknown.onnx", "--rules", "rules.py", "--no-verify").code == 0
        assert [row["domain"] for row in shell("list", "operators", "twirl", "--json").json] == ["my.ops"]
    assert outputs("unknown.train.onnx") == ["loss", "b_grad"]


def test_proof_on_given_data(shell: Shell) -> None:
    np.savez("d.npz", x=np.ones((7, 4), np.float32), more=np.zeros(1))
    result = shell("build", "mlp.onnx", "--test-data", "d.npz", "--json")
    assert result.code == 0, result.err
    assert "x [7, 4]" in json.dumps(result.json["proof"])
    assert "arrays that are not inputs are ignored: more" in result.err and "drawn at random: label" in result.err


@pytest.mark.parametrize("form", ["csv", "jsonl", "npy"])
def test_proof_on_the_first_samples_of_data_to_train_on(shell: Shell, form: str) -> None:
    x = np.arange(28, dtype=np.float32).reshape(7, 4) / 10
    if form == "csv":
        rows = "\n".join(",".join(map(str, row)) for row in x)
        Path("d.csv").write_text(f"x_0,x_1,x_2,x_3\n{rows}\n")
    elif form == "jsonl":
        Path("d.jsonl").write_text("".join(json.dumps({"x": row.tolist()}) + "\n" for row in x))
    else:
        Path("d.npy").mkdir()
        np.save("d.npy/x.npy", x)
    result = shell("build", "mlp.onnx", "--test-data", f"d.{form}", "--verify", "--json")
    assert result.code == 0, result.err
    assert "x [4, 4]" in json.dumps(result.json["proof"])
    assert "the first 4 of 7 samples are used" in result.err and "drawn at random: label" in result.err
    assert shell("check", "mlp.train.onnx", "--data", f"d.{form}").code == 0
    derived = shell("derive", "mlp.onnx", "--test-data", f"d.{form}", "--verify", "-o", "v.onnx")
    assert derived.code == 0 and "the first 4 of 7" in derived.err


TOKENS = """
<ir_version: 8, opset_import: ["": 17]>
words (int64[batch, T] ids, int64[batch, T] attention_mask) => (float[batch, 2] y)
<float[5, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1}, int64[1] along = {1}, int64[1] last = {2}>
{
  rows = Gather(table, ids)
  seen = Cast<to = 1>(attention_mask)
  wide = Unsqueeze(seen, last)
  kept = Mul(rows, wide)
  y = ReduceSum<keepdims = 0>(kept, along)
}
"""


def test_proof_on_text(shell: Shell) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "good": 1, "bad": 2, "film": 3, "very": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("tokenizer.json")
    save(TOKENS, Path("words.onnx"))
    Path("d.jsonl").write_text('{"text": "good film", "label": 1}\n{"text": "very very bad film", "label": 0}\n')
    on = ("--test-data", "d.jsonl", "--tokenizer", "tokenizer.json", "--verify")
    built = shell("build", "words.onnx", "--loss", "cross-entropy", *on, "--json")
    assert built.code == 0, built.err
    assert "ids [2, 4], attention_mask [2, 4], label [2]" in json.dumps(built.json["proof"])
    assert "drawn at random" not in built.err, "a mask follows from the tokens"
    checked = shell("check", "words.train.onnx", "--data", "d.jsonl", "--tokenizer", "tokenizer.json", "--json")
    assert checked.code == 0 and "ids [2, 4]" in json.dumps(checked.json), checked.err
    derived = shell("derive", "words.onnx", *on, "--kind", "jacobian", "--wrt", "table", "-o", "v.onnx")
    assert derived.code == 0 and "drawn at random" not in derived.err, derived.err
    alone = shell("check", "words.train.onnx", "--tokenizer", "tokenizer.json")
    assert alone.code == 2 and "--tokenizer converts text in data, but no data are given" in alone.err


def test_data_are_fitted_or_refused(shell: Shell) -> None:
    def code(**arrays: np.ndarray) -> int:
        np.savez("d.npz", **arrays)
        return shell("build", "mlp.onnx", "--test-data", "d.npz").code

    assert code(x=np.ones((7, 4))) == 0, "float64 is cast to the model's float32"
    assert code(x=np.ones((7, 5), np.float32)) == 2
    assert code(x=np.ones(4, np.float32)) == 2
    assert code(x=np.ones((7, 4), np.complex64)) == 2
    assert code(x=np.ones((7, 4), np.float32), label=np.ones((6, 2), np.float32)) == 2, "two sizes of one symbol"


def test_failed_proof_writes_no_model(shell: Shell) -> None:
    """A wrong rule for Sigmoid: code 4, the report says so, and there is no model to train with."""
    Path("rules.py").write_text(
        "from onnxgrad_cli import rule\n@rule('Sigmoid', override=True)\ndef sigmoid(op, g, y, x):\n    return g * y\n"
    )
    from onnxgrad_cli.autodiff import registry

    with registry.scoped():
        result = shell("build", "mlp.onnx", "--rules", "rules.py")
        assert result.code == 4
        assert "does not pass its checks" in result.err and "failed | " in result.err
        assert set(shell.files()) == {"mlp.onnx", "rules.py", "mlp.train.onnx.report.md"}
        assert "check failed" in Path("mlp.train.onnx.report.md").read_text().lower()
        assert shell("build", "mlp.onnx", "--rules", "rules.py", "--no-verify").code == 0
    assert shell("check", "mlp.train.onnx").code == 4


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
    assert result.code == 0 and "2 weights will get a gradient" in result.out
    found = shell("inspect", "mlp.onnx", "--freeze", "b1", "--json").json
    assert [weight["name"] for weight in found["weights"]] == ["w1", "w2"]
    assert [(weight["name"], weight["reason"]) for weight in found["not_trained"]] == [("b1", "frozen by --freeze")]
    save(UNKNOWN_OPS, Path("unknown.onnx"))
    result = shell("inspect", "unknown.onnx", "--json")
    assert result.code == 3 and len(result.json["refusals"]) == 2
    Path("unknown.onnx").unlink()
    assert shell.files() == before


@pytest.mark.parametrize(("weights", "why"), [("nan", "the weight 'w1'"), ("-100", "all gradients are zero")])
def test_check_of_what_can_not_be_proved(shell: Shell, weights: str, why: str) -> None:
    """A weight that is no number, and a Relu that lets nothing through: the exit code says that nothing is proved."""
    model = onnx.load("mlp.onnx")
    model.graph.node[2].op_type = "Relu"
    name = "w1" if weights == "nan" else "b1"
    for tensor in model.graph.initializer:
        if tensor.name == name:
            values = np.full_like(onnx.numpy_helper.to_array(tensor), float(weights))
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, "odd.onnx")
    assert shell("build", "odd.onnx").code == 0
    result = shell("check", "odd.train.onnx")
    assert result.code == 4 and "not proved: " in result.err and why in result.err, result.err
    assert shell("check", "odd.train.onnx", "--json").json["verdict"] == "not_proved"
    assert shell("build", "odd.onnx", "--verify", "-o", "other.onnx").code == 4 and not Path("other.onnx").exists()


def test_check(shell: Shell) -> None:
    shell("build", "mlp.onnx", "--label", "t", "--no-verify")
    result = shell("check", "mlp.train.onnx", "--dim", "batch=3")
    assert result.code == 0, result.err
    assert all(line.startswith("passed") for line in result.out.splitlines())
    assert "x [3, 4]" in result.out and result.err.startswith("proved | ")
    np.savez("d.npz", x=np.ones((6, 4), np.float32), t=np.ones((6, 2), np.float32))
    found = shell("check", "mlp.train.onnx", "--data", "d.npz", "--json").json
    assert found["status"] == "passed" and "x [6, 4]" in json.dumps(found)


def test_check_on_labels_that_are_none(shell: Shell) -> None:
    """A class that does not exist is told; labels that are all left out prove nothing, and that is told too."""
    shell(
        "build", "mlp.onnx", "--label", "t", "--loss", "cross-entropy", "--loss-option", "ignore-index=1", "--no-verify"
    )

    def checked(*labels: int) -> Result:
        np.savez("d.npz", t=np.array(labels))
        return shell("check", "mlp.train.onnx", "--data", "d.npz")

    assert checked(0, 1).code == 0
    for label in (2, -1):
        result = checked(0, label)
        assert result.code == 2 and f"'t' is {label} in sample 1" in result.err
    result = checked(1, 1)
    assert "not proved: finite: its loss is not finite on these data" in result.err and "passed |" not in result.err


def test_check_finds_a_wrong_gradient(shell: Shell) -> None:
    shell("build", "mlp.onnx", "--label", "t")
    model = onnx.load("mlp.train.onnx")
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            if name == "w1_grad":
                node.output[position] = "half"
    tensor = onnx.numpy_helper.from_array(np.float32(2), "two")
    model.graph.initializer.append(tensor)
    model.graph.node.append(onnx.helper.make_node("Mul", ["half", "two"], ["w1_grad"], name="wrong"))
    onnx.save(model, "mlp.train.onnx")
    result = shell("check", "mlp.train.onnx")
    assert result.code == 4 and "w1" in result.out and result.err.startswith("failed | ")


@pytest.mark.parametrize("kind", KINDS)
def test_lists(shell: Shell, kind: str) -> None:
    result, found = shell("list", kind), shell("list", kind, "--json").json
    key = "op" if kind == "operators" else "name"
    assert result.code == 0
    assert len(found) > 3
    assert all(row[key] in result.out for row in found)
    assert "onnxgrad" not in result.out.splitlines()[0]
    name = found[-1][key]
    assert {row[key] for row in shell("list", kind, f"{name[:-1].upper()}?", "--json").json} >= {name}
    result = shell("list", kind, "no-such-name")
    assert (result.code, result.out) == (2, "") and f"'no-such-name' matches none of the {kind}" in result.err


def test_the_kinds_are_listed(shell: Shell) -> None:
    assert [row["name"] for row in shell("list", "--json").json] == list(KINDS)
    assert [line.split()[0] for line in shell("list").out.splitlines()[1:]] == list(KINDS)
    result = shell("list", "layers")
    assert result.code == 2 and "'layers' is not one of 'losses', 'optimizers'" in result.err


def test_rules_are_of_operators(shell: Shell) -> None:
    Path("rules.py").touch()
    result = shell("list", "losses", "--rules", "rules.py")
    assert result.code == 2 and "--rules has an effect on `onnxgrad list operators` only" in result.err


def test_operators(shell: Shell) -> None:
    rows = {row["op"]: row for row in shell("list", "operators", "--json").json}
    assert rows["Relu"]["derivative"] == "rule" and rows["Relu"]["kink"]
    assert rows["Shape"]["derivative"] == "zero"
    assert [row["op"] for row in shell("list", "operators", "relu", "--json").json] == ["Relu"]


def test_a_pattern_that_names_no_operator(shell: Shell) -> None:
    result = shell("list", "operators", "Rellu*")
    assert (result.code, result.out) == (2, "") and "'Rellu*' matches none of the operators" in result.err
    assert "did you mean Relu" in result.err


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

CONFIG = """
loss = "huber"
label = "from_file"
freeze = ["b1"]
shape = { x = ["n", 4] }
no-report = true
verify = false
data = "belongs to another command.npz"

[loss-option]
delta = 0.5
"""


def test_config_file(shell: Shell) -> None:
    Path("c.toml").write_text(CONFIG)
    found = shell("build", "mlp.onnx", "--config", "c.toml", "--json")
    assert found.code == 0, found.err
    assert found.json["asked"]["options"] == {
        "--loss": "huber", "--label": "from_file", "--freeze": "b1", "--shape": "x=n, 4", "loss options": "delta=0.5",
    }  # fmt: skip
    assert found.json["proof"] is None and "mlp.train.onnx.report.md" not in shell.files()
    assert outputs("mlp.train.onnx") == ["loss", "w1_grad", "w2_grad"]


def test_environment_variables(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAD_BUILD_LABEL", "from_environment")
    monkeypatch.setenv("ONNXGRAD_BUILD_FREEZE", "b1 w1")
    monkeypatch.setenv("ONNXGRAD_BUILD_DIM", "batch=2")
    options = shell("build", "mlp.onnx", "--json").json["asked"]["options"]
    assert options == {"--label": "from_environment", "--freeze": "b1, w1", "--dim": "batch=2"}


def test_which_comes_first(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, then the environment, then the file, then the default."""
    Path("c.toml").write_text(CONFIG)

    def label(*options: str) -> str:
        found = shell("build", "mlp.onnx", "--config", "c.toml", "--json", *options)
        return str(found.json["asked"]["options"]["--label"])

    assert label() == "from_file"
    monkeypatch.setenv("ONNXGRAD_BUILD_LABEL", "from_environment")
    assert label() == "from_environment"
    assert label("--label", "typed") == "typed"
    monkeypatch.setenv("ONNXGRAD_BUILD_CONFIG", "c.toml")
    monkeypatch.delenv("ONNXGRAD_BUILD_LABEL")
    assert shell("build", "mlp.onnx", "--json").json["asked"]["options"]["--label"] == "from_file"


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
