"""No command lets through what a file says in control characters, wherever in the file it stands."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from onnx import ModelProto, TensorProto, helper

import onnxgrad_cli
from onnxgrad_cli.cli import cli
from tests.cli_harness import Shell

BREAK = "AFTER THE BREAK"
EVIL = f"\x1b[31m\x1b]0;title\x07\x9b1m\x7f\u202e\u2066\u200b\u3164\r\n{BREAK}[red]`|</text><script>\"'\\#%%{{"
"""Escape sequences, a terminal's title, C1 and DEL, directions of writing, no width, line breaks, and marks."""


def evil(word: str) -> str:
    return f"{word}{EVIL}{word}"


X, H, Y, W, B = map(evil, "xhywb")
BATCH, DOMAIN, FUNCTION, NODE = map(evil, ("batch", "domain", "Function", "node"))


def model(*nodes: onnx.NodeProto, domain: str = DOMAIN) -> ModelProto:
    """y = function(x w) + b, or else these nodes, with a name for everything that can have one."""
    tensor = [TensorProto(name=W, dims=[4, 3], data_type=TensorProto.FLOAT, float_data=np.linspace(-1, 1, 12))]
    tensor += [TensorProto(name=B, dims=[3], data_type=TensorProto.FLOAT, float_data=[1, 2, 3])]
    x = helper.make_tensor_value_info(X, TensorProto.FLOAT, [BATCH, 4])
    y = helper.make_tensor_value_info(Y, TensorProto.FLOAT, [BATCH, 3])
    body = [helper.make_node("Tanh", ["a"], ["c"], name=NODE)]
    function = helper.make_function(domain, FUNCTION, ["a"], ["c"], body, [helper.make_opsetid("", 17)])
    nodes = nodes or (
        helper.make_node("MatMul", [X, W], [H], name=NODE, doc_string=EVIL),
        helper.make_node(FUNCTION, [H], [evil("t")], domain=domain, name=evil("call")),
        helper.make_node("Add", [evil("t"), B], [Y], name=evil("add")),
    )
    graph = helper.make_graph(nodes, evil("graph"), [x], [y], tensor, doc_string=EVIL)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    found = helper.make_model(
        graph, opset_imports=opsets, ir_version=8, functions=[function], producer_name=evil("producer"),
        producer_version=EVIL, domain=EVIL, doc_string=EVIL,
    )  # fmt: skip
    found.metadata_props.add(key=evil("key"), value=EVIL)
    found.metadata_props.add(key="onnxgrad.classes", value=json.dumps({Y: [evil("no"), evil("yes")]}))
    for node in found.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr([evil("scope"), ""]))
    return found


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    """A shell that also hears what libraries print beneath Python, in a folder of models that say evil things."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "m.onnx")
    product = helper.make_node("MatMul", [X, W], [H], name=evil("product"))
    onnx.save(model(product, helper.make_node(evil("Op"), [H], [Y], domain=DOMAIN, name=NODE)), "unknown.onnx")
    onnx.save(model(helper.make_node("MatMul", [X, evil("nobody")], [Y], name=NODE)), "invalid.onnx")
    onnx.save(model(helper.make_node("MatMul", [X, B], [Y], name=NODE)), "shapes.onnx")
    rounded = helper.make_node("Round", [X], [evil("r")], name=NODE)
    onnx.save(model(rounded, helper.make_node("Det", [evil("r")], [Y], name=NODE)), "rank.onnx")
    rng = np.random.default_rng(0)
    data = {X: rng.random((6, 4), np.float32), "label": rng.random((6, 3), np.float32)}
    np.savez("d.npz", **data, **{evil("more"): np.zeros(1)})
    np.savez("few.npz", **{evil("other"): np.zeros((6, 4), np.float32)})
    column = EVIL.replace('"', "").replace("{", "")
    Path("d.csv").write_text(f'"{column}",label\n1,2\n')
    Path("c.toml").write_text(f"label = {json.dumps(EVIL)}\n{json.dumps(evil('key'))} = 1\n")
    Path("help.toml").write_text(f"label = {json.dumps(EVIL)}\n")
    return Shell(tmp_path, capfd)  # type: ignore[arg-type]


BUILD = ("build", "m.onnx", "--force")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "build": [
        (*BUILD, "-vv", "--report", "r.md", "--report", "r.html", "--report", "r.json"),
        (*BUILD, "--json", "--optimizer", "adam", "--keep-outputs", "--grad-of-input", "*"),
        (*BUILD, "--label", EVIL, "--dim", f"{BATCH}=3", "--train", f"*{EVIL}*"),
        (*BUILD, "--artifacts", "artifacts", "--prefix", "p"),
        (*BUILD, "--training-info", "-o", "info.onnx", "--optimizer", "adam"),
        (*BUILD, "--test-data", "d.npz"),
        (*BUILD, "--test-data", "few.npz", "--json"),
        (*BUILD, "--train", "nobody", "--traceback"),
        (*BUILD, "--output", EVIL),
        (*BUILD, "--freeze", "*"),
        (*BUILD, "--freeze", "*", "--json"),
        (*BUILD, "--lora", "9", "--lora-target", "*"),
        (*BUILD, "--dim", "b=3"),
        (*BUILD, "--config", "c.toml"),
        ("build", "unknown.onnx"),
        ("build", "unknown.onnx", "--json", "--no-report"),
        ("build", "invalid.onnx"),
        ("build", "shapes.onnx"),
        ("build", "rank.onnx"),
        ("build", f"{EVIL}.onnx"),
        ("build", "--config", "help.toml", "--help"),
        ("build", "--config", "help.toml", "--help-all"),
    ],
    "inspect": [
        ("inspect", name, *how) for name in ("m.onnx", "unknown.onnx", "rank.onnx") for how in ((), ("--json",))
    ],
    "check": [("check", "t.onnx"), ("check", "t.onnx", "--json", "--data", "d.npz"), ("check", "m.onnx")],
    "train": [
        ("train", "m.onnx", "--data", "d.npz", "--epochs", "2", "--force"),
        ("train", "m.onnx", "--data", "d.npz", "--epochs", "1", "--json", "--val", "0.5", "--force", "--lora", "1",
         "--lora-target", "*", "--adapter", "a.safetensors", "--run", "other", "-o", "o.onnx"),
        ("train", "m.onnx", "--data", "d.npz", "--val", "0.5", "--loss", "bce-logits", "--run", "bce", "-o", "b.onnx",
         "--max-steps", "1", "--metric", "auc", "--log", "csv"),
        ("train", "m.onnx", "--data", "few.npz"),
        ("train", "m.onnx", "--data", "d.csv"),
        ("train", "m.onnx", "--data", f"{EVIL}.npz"),
    ],
    "evaluate": [
        ("evaluate", "m.onnx", "--data", "d.npz", "--loss", "bce-logits"),
        ("evaluate", "m.onnx", "--data", "d.npz", "--metric", "mae", "--json"),
        ("evaluate", "m.onnx", "--data", "few.npz", "--metric", f"mae:{EVIL}"),
        ("evaluate", "unknown.onnx", "--data", "d.npz", "--metric", EVIL),
    ],
    "predict": [
        ("predict", "m.onnx", "--data", "d.npz"), ("predict", "m.onnx", "--data", "d.npz", "-o", "p.csv", "--json"),
        ("predict", "m.onnx", "--data", "few.npz", "--output", EVIL), ("predict", "invalid.onnx", "--data", "d.npz"),
    ],
    "export": [
        ("export", "run/checkpoint.safetensors", "--model", "m.onnx", "-o", "e.onnx"),
        ("export", "run/checkpoint.safetensors", "--model", "unknown.onnx", "--use-ema", "--json"),
        ("export", "d.npz", "--model", "m.onnx"),
    ],
    "tune": [("tune", "m.onnx", "--size", f"{BATCH}=2", "--repeat", "1"), ("tune", "m.onnx", "--size", "b=2")],
    "expand": [("expand", "info.onnx"), ("expand", "info.onnx", "--json"), ("expand", "m.onnx")],
    "derive": [("derive", "m.onnx"), ("derive", "m.onnx", "--json", "-v"), ("derive", "m.onnx", "--wrt", "nobody")],
    "explain": [
        ("explain", "m.onnx", "--data", "d.npz"),
        ("explain", "m.onnx", "--data", "d.npz", "--json", "-v", "--method", "occlusion", "-o", "a.npz"),
        ("explain", "m.onnx", "--data", "d.npz", "--wrt", H, "--method", "integrated-gradients", "--steps", "2"),
        ("explain", "m.onnx", "--data", "d.npz", "--method", "grad-cam"),
        ("explain", "m.onnx", "--data", "few.npz", "-o", "a.png"), ("explain", "unknown.onnx", "--data", "d.npz"),
    ],
    "attack": [
        ("attack", "m.onnx", "--data", "d.npz", "-o", "f.npz", "--force"),
        ("attack", "m.onnx", "--data", "d.npz", "--json", "--output", EVIL),
        ("attack", "unknown.onnx", "--data", "d.npz"),
    ],
    "list": [
        ("list",), ("list", EVIL), ("list", "operators", EVIL), ("list", "operators", "Rel*", "--json"),
        *(("list", kind, *how) for kind in ("losses", "optimizers", "metrics", "schedules", "passes")
          for how in ((), ("--json",))),
    ],
    "pack": [
        ("pack", "p.onnx", "-o", "page", "--data", "d.npz"),
        ("pack", "p.onnx", "-o", "page", "--data", "d.npz", "--json"),
        ("pack", "m.onnx", "-o", "other", "--data", "d.npz"), ("pack", "p.onnx", "-o", f"{EVIL}", "--data", "gone.npz"),
    ],
    "view": [
        *(("view", "m.onnx", "--format", kind) for kind in ("dot", "html")),
        *(("view", "t.onnx", "-o", f"t.{suffix}", "--limit", "2") for suffix in ("dot", "html")),
        ("view", "m.onnx", "--json", "--depth", "1"),
        ("view", "unknown.onnx", "--depth", "1"),
        ("view", "m.onnx", "-o", f"{EVIL}"),
    ],
}  # fmt: skip
"""Command lines by command, of those that `onnxgrad --help` lists."""

NEEDS = {
    "check": ("build", "m.onnx", "-o", "t.onnx"),
    "view": ("build", "m.onnx", "-o", "t.onnx"),
    "export": ("train", "m.onnx", "--data", "d.npz", "--epochs", "1", "--run", "run"),
    "pack": ("build", "m.onnx", "-o", "p.onnx", "--optimizer", "sgd", "--weights", "inputs"),
    "expand": ("build", "m.onnx", "--training-info", "-o", "info.onnx", "--optimizer", "adam"),
}
"""What is run before the lines of a command."""

READ_BY_PEOPLE = {".md", ".html", ".json", ".jsonl", ".txt", ".dot", ".svg"}
"""Suffixes of what is written for people, or as JSON."""


def invisible(text: str) -> list[str]:
    """What can't be seen in a text, and the lines that a name has begun."""
    return re.findall(r"[^\n -~\xa1-\u02ff\u2190-\u25ff×−·…ΣΔ]", text) + re.findall(
        rf"^\W*{BREAK}.*", text, re.MULTILINE
    )


def test_every_command_is_here() -> None:
    assert set(COMMANDS) == set(cli.commands)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.thinned(4)
def test_nothing_invisible_is_printed_or_written(shell: Shell, command: str) -> None:
    if command in NEEDS:
        assert shell(*NEEDS[command]).code == 0
    for line in [*COMMANDS[command], (command, "--help"), (command, f"--{EVIL}")]:
        result = shell(*line)
        assert "internal" not in result.err, line
        for said in (result.out, result.err):
            assert not invisible(said), (line, said)
        for name, content in shell.files().items():
            if Path(name).suffix in READ_BY_PEOPLE:
                assert not invisible(content.decode()), (line, name)


# -- names in a language of marks -----------------------------------------------------------------------------


@pytest.fixture
def written(shell: Shell) -> Shell:
    """The shell after a build with each kind of report, a refusal, a training and each kind of picture."""
    reports = [argument for kind in ("md", "html", "json") for argument in ("--report", f"r.{kind}")]
    assert shell("build", "m.onnx", "-o", "t.onnx", "--keep-outputs", *reports).code == 0
    assert shell("build", "unknown.onnx", "--report", "u.md", "--report", "u.html").code == 3
    assert shell("train", "m.onnx", "--data", "d.npz", "--epochs", "2", "--run", "run").code == 0
    for kind in ("dot", "html"):
        assert shell("view", "t.onnx", "-o", f"all.{kind}").code == 0
        assert shell("view", "t.onnx", "-o", f"few.{kind}", "--depth", "1").code == 0
    return shell


class Elements(HTMLParser):
    """The elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found[tag] += 1


def test_pages_have_no_elements_of_a_name(written: Shell) -> None:
    pages = [path for path in written.folder.rglob("*.html")]
    assert len(pages) == 5
    for path in pages:
        page = path.read_text()
        own = 3 if "Content-Security-Policy" in page else 0  # the data, the layout, and what draws
        assert Elements(page).found["script"] == own and BREAK in page, path


def test_pictures_are_well_formed(written: Shell) -> None:
    for path in written.folder.rglob("*.svg"):
        assert not any("script" in element.tag for element in ElementTree.parse(path).iter())
    for path in written.folder.rglob("*.dot"):
        text = path.read_text()
        assert BREAK in text and BREAK not in re.sub(r'"(?:[^"\\]|\\.)*"', "", text), path


def test_markdown_has_no_marks_of_a_name(written: Shell) -> None:
    pages = [path for path in written.folder.rglob("*.md")]
    assert len(pages) == 3
    for path in pages:
        tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
        inside = [child.type for token in tokens for child in token.children or ()]
        assert not {"html_block", "html_inline", "link_open", "image"} & {*inside, *(t.type for t in tokens)} - (
            {"image"} if path.parent.name == "run" else set()
        )
        heads = [len(row) for row in _rows(tokens)]
        assert heads, path


def _rows(tokens: list[Token]) -> Iterator[list[Token]]:
    """The cells of each row; each row of a table has as many as its head."""
    cells: list[Token] = []
    width = 0
    for token in tokens:
        match token.type:
            case "table_open":
                width = 0
            case "td_open" | "th_open":
                cells.append(token)
            case "tr_close":
                assert width in (0, len(cells))
                width = len(cells)
                yield cells
                cells = []


def test_the_program_in_a_report_says_names_as_they_are(written: Shell) -> None:
    (program,) = (
        step["text"] for step in json.loads(Path("r.json").read_text())["next"] if step["language"] == "python"
    )
    strings = {node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)}
    assert {X, "label"} <= strings
    assert json.loads(Path("r.json").read_text())["weights"][0]["name"] == W


def test_terminal_shows_markup_as_it_is(shell: Shell) -> None:
    assert "'[red]' matches no" in shell("build", "m.onnx", "--train", "[red]").err


def test_only_the_console_prints() -> None:
    """Whatever else printed would go past what makes it visible."""
    package = Path(onnxgrad_cli.__file__).parent
    printing = re.compile(r"\bclick\.(secho|echo)\(|(?<![.\w])print\(|std(out|err)\.write\(")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if printing.search(path.read_text())}
    assert found == {
        "__main__.py",  # a word of its own
        "cli/terminal/console.py",
        "compat/derivative_options.py",  # where a program in Python asks for it
        "report/next_steps.py",  # in a program
    }
