"""Reports in HTML nest, escape every text and need no other file."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from urllib.parse import quote

from hypothesis import given, settings, strategies as st

from onnxgrad_cli.builder import build
from onnxgrad_cli.common.escape import escaped, escaped_lines
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options, RecomputeSpec
from onnxgrad_cli.report import make_report, render
from onnxgrad_cli.report.blocks import (
    Block,
    Bullets,
    CodeBlock,
    ModelName,
    Name,
    Page as Document,
    Paragraph,
    Picture,
    Section,
    Table,
)
from onnxgrad_cli.report.html import html
from tests.report.test_build_report import HOSTILE, full, hostile, mlp, one_line


class Page(HTMLParser):
    """Checks that elements nest, and collects text, also by the headings, paragraphs and cells that it stands in."""

    VOID = frozenset({"meta", "link", "br", "hr", "img"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.code: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "code":
            self.code.append("")
        if tag in ("h1", "h2", "p", "li", "th", "td", "pre"):
            self.said.append("")
        self.links += [value or "" for key, value in attrs if key in ("href", "src")]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "code":
            self.code[-1] += data
        if self.said and not {"nav", "svg"} & {*self.open}:
            self.said[-1] += data


def test_html_nests_escapes_and_needs_nothing_from_outside() -> None:
    text = render(full(hostile()), "html")
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    assert "script" not in page.tags
    assert one_line(HOSTILE) in page.code
    assert page.links and all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "http" not in text


MARKS = st.text(st.sampled_from("aZ0 _*`~[]()<>&\\!#+-=.|:'\"\t\n\x1b\u202e")) | st.text()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MARKS.filter(str.strip), MARKS, MARKS)
def test_any_text_is_shown_as_it_is(words: str, name: str, listing: str) -> None:
    """No text becomes markup: the page has our elements alone, and they say what was given, made visible."""
    mixed = (words, ModelName(name), words)
    blocks: list[Block] = [
        Paragraph(mixed), Bullets([mixed]), Table((words, "n"), [(mixed, Name(name))], frozenset({1})),
        CodeBlock("sh", listing), Picture(lambda: "<svg></svg>", words, CodeBlock("text", "")),
    ]  # fmt: skip
    verdict = ("Built, ", *mixed, ".")
    page = Page()
    page.feed(html(Document(("Of ", *mixed, "."), verdict, "good", [("x", mixed)], [Section("A b", blocks)]), "p.html"))
    line, shown = escaped("".join(mixed)), escaped(words).strip()
    assert [text.strip() for text in page.said] == [
        f"Of {line}.", f"Built, {line}.", "", "at a glance", "x", line.strip(), "A b", line.strip(), line.strip(),
        shown, "n", line.strip(), escaped(name).strip(), escaped_lines(listing).strip(), shown, "",
    ]  # fmt: skip
    links = [link for link in page.links if link != "#a-b"]
    assert links == [f"p.html#{quote(escaped(name), safe='')}"] * 6 * (name != "")
    assert page.tags <= {
        "html", "head", "meta", "title", "style", "body", "nav", "div", "h1", "h2", "p", "strong", "code", "a", "ul",
        "li", "table", "thead", "tbody", "tr", "th", "td", "pre", "svg",
    }  # fmt: skip


def test_what_memory_costs_is_drawn_and_told() -> None:
    options = Options(losses=[LossSpec("mse")], recompute=RecomputeSpec("budget", size=1))
    report = make_report(built=build(mlp(), options))
    done = report.recomputed
    assert done is not None and done.trade[0] == (done.kept_before, 0) and done.trade[-1] == (done.kept, done.flops)
    assert 'class="taken"' in render(report, "html")
    assert "operations added" in render(report, "html")
    assert json.loads(render(report, "json"))["recomputed"]["trade"] == [list(pair) for pair in done.trade]
