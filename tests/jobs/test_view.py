"""`onnxgrad view`: formats, targets, limits and the JSON output."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.view import run_view
from tests.cli_harness import Shell
from tests.facts import raises
from tests.pictures import read_dot

ROOT = Path(__file__).parents[2]


def test_stdout_is_dot(shell: Shell) -> None:
    result = shell("view", "mlp.onnx")
    assert result.code == 0, result.err
    nodes, _ = read_dot(result.out)
    assert {"legend_input", "legend_weight", "legend_forward", "legend_output"} < nodes.keys()
    assert result.err.startswith("mlp: 4 nodes\n")
    assert shell("view", "mlp.onnx", "-o", "-", "--format", "html").out.startswith("<!DOCTYPE html>")
    assert set(shell.files()) == {"mlp.onnx"}


@pytest.mark.parametrize(
    ("name", "head"),
    [("p.dot", "// drawn"), ("p.gv", "// drawn"), ("p.html", "<!DOCTYPE html>"), ("p.HTM", "<!DOCTYPE html>")],
)
def test_the_suffix_says_the_format(name: str, head: str, shell: Shell) -> None:
    assert shell("view", "mlp.onnx", "-o", name).code == 0
    assert Path(name).read_text().startswith(head)
    assert shell("view", "mlp.onnx", "-o", name).code == 0, "its own pictures are replaced without asking"
    assert shell("view", "mlp.onnx", "-o", "p.txt", "--format", "html").code == 0
    assert Path("p.txt").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("name", "kind"), [("net.svg", "svg"), ("a b/net.PNG", "png"), ("net.pdf", "pdf")])
def test_pictures_of_graphviz_say_how_to_make_them(name: str, kind: str, shell: Shell) -> None:
    """The options and the command of the hint work as they are printed."""
    Path("a b").mkdir()
    result = shell("view", "mlp.onnx", "-o", name)
    assert result.code == 2 and result.facts == ("wrong_value", Path(name).name)
    (hint,) = [line for line in result.err.splitlines() if line.startswith("hint: use ")]
    options, command = hint.removeprefix("hint: use ").split(", then run Graphviz: ")
    assert shell("view", "mlp.onnx", *shlex.split(options)).code == 0
    words = shlex.split(command)
    assert words[:2] == ["dot", f"-T{kind}"] and words[3:] == ["-o", name] and Path(words[2]).is_file()
    if shutil.which("dot"):
        subprocess.run(words, check=True)
        assert Path(name).stat().st_size > 500


def test_refused_targets(shell: Shell) -> None:
    before = shell.files()
    result = shell("view", "mlp.onnx", "-o", "mlp.onnx", "--format", "dot")
    assert result.code == 2 and result.facts == ("conflict", "mlp.onnx")
    result = shell("view", "mlp.onnx", "-o", "picture.bmp")
    assert result.code == 2 and ".html or .dot" in result.err and "--format" in result.err
    assert shell("view", "mlp.onnx", "--format", "png").code == 2
    assert shell("view", "mlp.onnx", "-o", "nowhere/p.dot").code == 1
    assert shell("view", "absent.onnx").code == 1
    assert shell.files() == before, "nothing is written"
    Path("mine.html").write_text("<p>mine</p>")
    assert shell("view", "mlp.onnx", "-o", "mine.html").code == 2
    assert Path("mine.html").read_text() == "<p>mine</p>"
    assert shell("view", "mlp.onnx", "-o", "mine.html", "--force").code == 0


def test_an_unknown_format_is_refused(shell: Shell) -> None:
    with raises(UsageError, "unknown_name", "png"):
        run_view("mlp.onnx", "p.dot", "png")
    assert set(shell.files()) == {"mlp.onnx"}


def test_limit_and_depth(shell: Shell) -> None:
    sample = ROOT / "sample_models" / "tiny_transformer.onnx"
    assert " in " not in shell("view", sample).err.splitlines()[0], "fewer than 150"
    assert re.search(r"109 .*\d+ boxes", shell("view", sample, "--limit", "40").err)
    data = shell("view", sample, "--depth", "2", "--json").json
    titles = [part["title"] for part in data["root"]["parts"]]
    assert {"layers.0", "layers.1"} < set(titles)


def test_json(shell: Shell) -> None:
    data = shell("view", "mlp.onnx", "--json").json
    assert [part["kind"] for part in data["root"]["parts"]] == [
        "input", "weight", "weight", "weight", "forward", "forward", "forward", "forward", "output",
    ]  # fmt: skip
    assert data["edges"][0] == {"source": "v0", "target": "n4", "tensors": ["x: float[batch, 4]"]}
