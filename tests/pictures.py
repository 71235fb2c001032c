"""Draw the pictures of docs/pictures.md, and read DOT and SVG files.

A test runs the commands of the page and compares their graphs with the pictures. `python -m tests.pictures` draws the
pictures again whose graphs have changed. This requires Graphviz.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from html import unescape
from pathlib import Path

from onnxgrad_cli.cli import run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pictures.md"
EXAMPLE = re.compile(r"```sh\n([^`]*) -o (\w+)\.dot\n```\n\n!\[.*\]\((assets/graphs/\2\.svg)\)")


def drawn() -> Iterator[tuple[Path, str]]:
    """Yield each picture's file and the DOT that the commands above it write. All commands run in one folder."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(ROOT / "sample_models", "sample_models")
        for commands, name, picture in EXAMPLE.findall(PAGE.read_text(encoding="utf-8")):
            for command in f"{commands} -o {name}.dot".splitlines():
                err = io.StringIO()
                with redirect_stdout(io.StringIO()), redirect_stderr(err):
                    code = run(shlex.split(command)[1:])
                assert code == 0, f"{command}: {err.getvalue()}"
            yield PAGE.parent / picture, Path(f"{name}.dot").read_text(encoding="utf-8")


TOKEN = re.compile(
    r'\s+|//[^\n]*|(?P<string>"(?:\\.|[^"\\])*")|(?P<word>[A-Za-z_][A-Za-z_0-9]*|[\d.]+)|(?P<mark>->|[{}\[\];=,])'
)


def read_dot(text: str) -> tuple[dict[str, dict[str, str]], list[tuple[str, str]]]:
    """Return the nodes of a DOT graph with their attributes, and the edges. The text is parsed by DOT's grammar.

    If Graphviz is installed, it must be able to read the text too.
    """
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tplain"], input=text.encode(), check=True, capture_output=True)
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        assert found, text[at : at + 80]
        at = found.end()
        if found.lastgroup:
            tokens.append(found[0])
    nodes: dict[str, dict[str, str]] = {}
    edges: list[tuple[str, str]] = []
    stream = iter(tokens)

    def attributes() -> dict[str, str]:
        found = {}
        for name in stream:
            if name == "]":
                return found
            if name != ",":
                assert next(stream) == "="
                found[name] = next(stream)
        raise AssertionError("an open list of attributes")

    def statements() -> None:
        pending: list[str] = []
        for token in stream:
            if token == "}":
                assert not pending
                return
            if token == "{":
                assert pending[0] in ("digraph", "subgraph") and len(pending) == 2
                pending = []
                statements()
            elif token == "[":
                given = attributes()
                if "->" in pending:
                    edges.append((pending[0], pending[2]))
                elif pending[0] not in ("graph", "node", "edge"):
                    nodes[pending[0]] = given
                pending = []
            elif token == ";":
                assert not pending or pending[1] == "="
                pending = []
            else:
                pending.append(token)
        assert not pending

    assert next(stream) == "digraph" and next(stream).startswith('"') and next(stream) == "{"
    statements()
    assert next(stream, None) is None
    return nodes, edges


def dot_text(label: str) -> str:
    """Return the text that a DOT string displays."""
    plain = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label[1:-1], flags=re.DOTALL)
    return unescape(plain)


SVG = "{http://www.w3.org/2000/svg}"


def read_svg(picture: Path) -> tuple[dict[str, str], set[tuple[str, ...]]]:
    """Return the nodes with their texts, and the edges, of an SVG picture drawn by Graphviz."""
    nodes, edges = {}, set()
    for group in ET.parse(picture).iter(f"{SVG}g"):
        title = group.findtext(f"{SVG}title", "")
        if group.get("class") == "node":
            nodes[title] = " ".join(text.text or "" for text in group.iter(f"{SVG}text"))
        elif group.get("class") == "edge":
            edges.add(tuple(title.split("->")))
    return nodes, edges


def is_fresh(picture: Path, text: str) -> bool:
    """Return True if a picture exists and shows the nodes and edges of a DOT graph."""
    nodes, edges = read_dot(text)
    shown = {key: " ".join(dot_text(given["label"]).split()) for key, given in nodes.items()}
    return picture.exists() and read_svg(picture) == (shown, set(edges))


if __name__ == "__main__":
    for file, text in drawn():
        if not is_fresh(file, text):
            subprocess.run(["dot", "-Tsvg", "-o", file], input=text.encode(), check=True)
