"""The pages of docs/ are run, every command and every Python block, and what is generated is what the code says now."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import onnxgrad_cli
from onnxgrad_cli import compat
from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.cli import cli, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}
OWN_TESTS = {  # pages that a test of their own runs, or that only measure
    "adding-an-operator.md",
    "from-onnxruntime-training.md",
    "tutorials/casadi.md",
    "tutorials/classifier.md",
    "tutorials/force-matching.md",
    "tutorials/gradient-penalty.md",
    "tutorials/kalman-filter.md",
    "tutorials/language-model.md",
    "tutorials/laplace.md",
    "tutorials/mnist.md",
    "tutorials/ode-sensitivities.md",
    "tutorials/optimal-control.md",
    "tutorials/pictures.md",
    "parallel-training.md",
    "pictures.md",
    "runtimes.md",
}
RUN_BY_THE_README = "python sample_models/train.py train.onnx"
SLOW = {
    *(
        "how-to/automation.md",
        "how-to/python.md",
        "how-to/speed.md",
        "how-to/training-runs.md",
        "how-to/weights.md",
        "jobs.md",
    ),
    *("tutorials/adapters.md", "tutorials/detector.md", "tutorials/explain.md", "tutorials/quantized.md"),
}
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The blocks of a page: language, title, text."""
    return BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))


def runnable() -> list[Any]:
    pages = [
        page for page in PAGES if page not in OWN_TESTS and any(each[0] in ("sh", "python") for each in blocks(page))
    ]
    return [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in pages]


@pytest.mark.parametrize("page", runnable())
def test_every_block_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(page, tmp_path, monkeypatch)


def run_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the blocks of a page from top to bottom, in one folder with the sample models and the files that it shows."""
    shutil.copytree(ROOT / "sample_models", tmp_path / "sample_models")
    monkeypatch.chdir(tmp_path)
    write_files(page)
    return run_in_turn(page)


def write_files(page: str) -> None:
    """Write the files that a page shows."""
    for _, title, text in blocks(page):
        if title:
            assert not Path(title).exists() or Path(title).read_text(encoding="utf-8") == text
            Path(title).write_text(text, encoding="utf-8")


def run_in_turn(page: str) -> dict[str, Any]:
    """Run the commands and the programs of a page, which share their names, and compare what a page says they print."""
    names: dict[str, Any] = {"__name__": "page"}
    printed = io.StringIO()
    for language, title, text in blocks(page):
        if language == "text":
            if printed.getvalue():
                compare_output(page, text, printed.getvalue())
            continue
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(Copied(printed, sys.stdout)),
            contextlib.redirect_stderr(Copied(printed, sys.stderr)),
        ):
            run_block(page, language, title, text, names)
    return names


class Copied(io.TextIOBase):
    """A stream that writes to two others."""

    def __init__(self, *streams: Any) -> None:
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
        return len(text)


NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|[▁▂▃▄▅▆▇█]+")
"""Numbers and curves, which depend on the machine."""


def compare_output(page: str, shown: str, printed: str) -> None:
    """Find the lines that a page shows in an output, in order. Numbers may differ, and ... stands for other lines."""
    lines = iter([" ".join(NUMBER.sub("#", line).split()) for line in printed.splitlines()])
    for line in shown.splitlines():
        wanted = " ".join(NUMBER.sub("#", line).split())
        assert wanted in ("", "...") or wanted in lines, f"{page}: not printed: {line!r}, in:\n{printed}"


def run_block(page: str, language: str, title: str, text: str, names: dict[str, Any]) -> None:
    """Run the commands or the program of a block."""
    if language == "sh":
        for command in text.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(command)
            if command == RUN_BY_THE_README:
                continue
            assert program == "onnxgrad", f"{command}: only onnxgrad's own commands stand in a block of sh"
            assert run(arguments) == 0, command
    elif language == "python" and not title:
        with registry.scoped():
            exec(compile(text, page, "exec"), names)


COMMAND = re.compile(r"`(?:\$ )?onnxgrad ([^`]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def flags(command: str) -> set[str]:
    params = [*cli.params, *cli.commands[command].params]
    return {"--help", *(flag for param in params for flag in (*param.opts, *param.secondary_opts))}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page: str) -> None:
    """Each option that a page names, in whatever place, is one of onnxgrad; each command it names takes its options."""
    text = PAGES[page].read_text(encoding="utf-8")
    for command in COMMAND.findall(text):
        name, *words = command.split()
        if name.isupper():  # `onnxgrad COMMAND --help`
            continue
        assert name in cli.commands, command
        assert {word.split("=")[0] for word in words if FLAG.fullmatch(word)} <= flags(name), command
    known = set().union(*(flags(name) for name in cli.commands))
    foreign = {"--threads", "--against", "--bind-to", "--max-restarts", "--initializers-as-non-constants"}
    # of benchmarks, mpirun, torchrun and onnxsim
    inline = re.findall(r"`([^`\n]+)`", text)
    assert {flag for code in inline for flag in FLAG.findall(code)} <= known | foreign


def test_every_loss_and_optimizer_is_named() -> None:
    from onnxgrad_cli.losses import LOSSES
    from onnxgrad_cli.optimizers import OPTIMIZERS

    for page, catalogue in (("how-to/losses.md", LOSSES), ("how-to/optimizers.md", OPTIMIZERS)):
        text = PAGES[page].read_text(encoding="utf-8")
        assert [each.name for each in catalogue if f"`{each.name}`" not in text] == []


def test_what_is_generated_is_what_the_code_says() -> None:
    from tools import layers, reference, schema

    for path, text in {**layers.files(), **reference.files(), **schema.files()}.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.relative_to(ROOT)} is stale: `make docs` writes it anew"
        )


def test_the_reference_is_whole() -> None:
    python = PAGES["reference/python.md"].read_text(encoding="utf-8")
    names = re.findall(r"^::: onnxgrad_cli\.([\w.]+)$", python, re.MULTILINE)
    offered = {*onnxgrad_cli.__all__, *(f"compat.{name}" for name in compat.__all__)} - {"__version__"}
    assert sorted(names) == sorted(offered)
    commands = PAGES["reference/command-line.md"].read_text(encoding="utf-8")
    assert re.findall(r"^## onnxgrad (\S+)$", commands, re.MULTILINE) == list(cli.commands)
    for command in cli.commands.values():
        assert all(param.opts[-1] in commands for param in command.params if param.opts[-1].startswith("--"))


def nav(entries: list[dict[str, Any]]) -> list[str]:
    return [
        page
        for entry in entries
        for value in entry.values()
        for page in (nav(value) if isinstance(value, list) else [value])
    ]


def test_every_page_is_in_the_navigation() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(nav(settings["project"]["nav"])) == sorted(PAGES)


MARKDOWN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + list(PAGES.values())
HERE = "https://github.com/onnxgrad/onnxgrad/"


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file(page: Path) -> None:
    """Links within the repository, relative or by its address, and paths of modules in the running text."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if match := re.match(rf"{HERE}(?:blob|tree)/main/(.+)", link):
            assert (ROOT / match[1]).exists(), link
        elif "://" not in link:
            assert (page.parent / link).exists(), link
    for path in re.findall(r"`(onnxgrad_cli/[\w/.]*\w/?)`", text):
        assert (ROOT / path).exists(), path


def _steps(section: str) -> list[str]:
    """Return the files of the numbered steps, each of which must hold the names that its step mentions."""
    steps = re.findall(r"^\d+\. `([^`]+)`(.*(?:\n .*)*)", section, re.MULTILINE)
    for file, told in steps:
        content = (ROOT / file).read_text(encoding="utf-8")
        assert [name for name in re.findall(r"`([A-Za-z_]\w+)`", told) if name not in content] == [], file
    return [file for file, _ in steps]


def test_the_walks_open_files_that_exist_and_five_at_most() -> None:
    """And what a step names stands in its file."""
    text = PAGES["architecture.md"].read_text(encoding="utf-8")
    walks = text[text.index("## Five walks") : text.index("## Glossary")].split("\n### ")[1:]
    assert len(walks) == 5
    for walk in walks:
        assert 1 <= len(_steps(walk)) <= 5


def test_the_steps_of_a_build_name_what_their_files_hold() -> None:
    text = PAGES["architecture.md"].read_text(encoding="utf-8")
    section = text[text.index("## A build in the order") : text.index("## The layers")]
    assert len(_steps(section)) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)) == 19


def test_the_glossary_is_in_order() -> None:
    text = PAGES["architecture.md"].read_text(encoding="utf-8")
    terms = re.findall(r"^\*\*(.+?)\*\*: \S", text[text.index("## Glossary") :], re.MULTILINE)
    assert len(terms) > 40
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """Every page builds and every link leads somewhere; `make site` is the real check: it installs the generator."""
    pytest.importorskip("zensical")
    for name in ("docs", "onnxgrad_cli"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "build" / "site" / "reference" / "python.html").exists()
