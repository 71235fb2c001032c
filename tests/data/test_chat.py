"""Chat templates: what they may use, what they can't do, and their limits."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest

from onnxgrad_cli.cli.terminal.failures import failure
from onnxgrad_cli.data.chat import CHATML, ROUNDS, ChatTemplate
from onnxgrad_cli.errors import OnnxgradError, UsageError
from tests.cli_harness import Shell
from tests.data.conftest import WORDS
from tests.data.leading_facts import raises_first
from tests.data.test_text import CHAT, lines
from tests.facts import facts, raises
from tests.genai_form import decoder


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 100,000 rounds"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 'a' * 10000000000 }}", "its operation 'a' \\* 10"),
        ("{{ '%9999999999d' % 1 }}", "its operation '%9+d' % 1 is not allowed"),
        ("{{ 9 ** 9 ** 9 }}", "its operation 9 \\*\\* 9 is not allowed"),
        ("{{ 'a'.ljust(99999999999) }}", ""),
        (
            "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "",
        ),
        ("{% for i in range(99999) %}{{ range(99999)|sum }}{% endfor %}", "more than 2 seconds"),
        pytest.param(
            "{% set n = namespace(x=[1, 2]) %}{% for i in range(22) %}{% set n.x = n.x + n.x %}{% endfor %}"
            "{{ n.x|map('string')|join }}",
            "more than 2 seconds",
            marks=pytest.mark.slow,
        ),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
    ],
)
@pytest.mark.thinned(6, 2)
def test_a_template_can_do_no_harm(source: str, said: str) -> None:
    template = ChatTemplate(Path("tokenizer.json"), source, {})
    with raises_first(UsageError, "wrong_value", "1", "tokenizer.json") as told:
        template.render("line 1", CHAT)
    assert re.search(said, told.value.message)
    assert ROUNDS == 100_000
    assert sys.getprofile() is None


@pytest.mark.parametrize("place", ["{{ X }}", "{% set n = X %}", "{% if X %}{% endif %}", "{{ [1][X] }}"])
def test_nothing_of_a_template_is_computed_while_it_is_compiled(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    defaults = pytest.importorskip("jinja2.defaults")
    monkeypatch.setitem(defaults.DEFAULT_FILTERS, "length", lambda value: computed.append(value) or 0)
    template = ChatTemplate(Path("tokenizer.json"), place.replace("X", "'abc'|length"), {})
    assert not computed
    template.render("line 1", CHAT)
    assert computed == ["abc"]


def test_autoescape_of_a_template_is_no_program() -> None:
    """Jinja computes it while it compiles a template, whatever it is told."""
    with raises(OnnxgradError, "unreadable_file", "tokenizer.json"):
        ChatTemplate(Path("tokenizer.json"), "{% autoescape 'abc'|length %}{% endautoescape %}", {})
    ChatTemplate(Path("tokenizer.json"), "{% autoescape false %}{% endautoescape %}", {})


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited there")
def test_a_template_beyond_its_memory_is_told_by_name() -> None:
    template = ChatTemplate(Path("tokenizer.json"), "{{ '%0300000000d'|format(1)|length }}", {})
    with pytest.raises(UsageError) as found:
        template.render("line 1", CHAT)
    assert facts(failure(found.value)[0]) == ("wrong_value", "1", "tokenizer.json", "256")


@pytest.mark.parametrize("source", ["{% for %}", "{% include 'x' %}{{ 3", "x" * (2**20 + 1)])
def test_what_is_no_template(source: str) -> None:
    with raises_first(OnnxgradError, "unreadable_file", "tokenizer.json"):
        ChatTemplate(Path("tokenizer.json"), source, {})


def test_what_templates_use() -> None:
    """Blocks, filters and functions that published templates use."""
    source = (
        "{{ bos_token }}{%- if tools is not none -%}tools{%- endif -%}"
        "{%- for m in messages -%}{%- if loop.index > 2 -%}{%- break -%}{%- endif -%}"
        "{% generation %}{{ m.content | trim | tojson }}{% endgeneration %}{{ loop.length }}"
        "{%- endfor -%}{{ strftime_now('%Y')[:2] }}{{ [1, 2] | tojson(indent=1) }}{{ messages[-1]['role'] }}"
    )
    found = ChatTemplate(Path("t"), source, {"bos_token": "<s>"}).render("", CHAT)
    assert found == '<s>"what is the sky ?"4"blue"420[\n 1,\n 2\n]assistant'
    assert ChatTemplate(Path("t"), CHATML, {}).render("", CHAT[:1], True).endswith("<|im_start|>assistant\n")


FORMATTED = "{{ ('{0.__globals__[sys].modules[os].environ[ONNXGRAD_SECRET]}'|attr('format'))(raise_exception) }}"
"""What an old sandbox lets a template read: `|attr('format')` gives str.format itself (CVE-2025-27516)."""


def test_a_template_reads_no_attributes_by_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAD_SECRET", "hidden")
    template = ChatTemplate(Path("tokenizer.json"), FORMATTED, {})
    with raises(UsageError, "wrong_value", "1", "tokenizer.json", "__globals__", "function") as refused:
        template.render("line 1", CHAT)
    assert "hidden" not in str(refused.value)


@pytest.mark.slow
def test_a_sandbox_with_holes_is_refused(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reads no template with an old jinja2, and reads it with the installed one."""
    monkeypatch.chdir(tokenizer.parent)
    shell, real = Shell(tokenizer.parent, capsys), metadata.version
    onnx.save(decoder(len(WORDS)), "model.onnx")
    lines(Path("chat.jsonl"), [{"messages": CHAT}] * 4)
    arguments = ("train", "model.onnx", "--data", "chat.jsonl", "--loss", "causal-lm", "--tokenizer", tokenizer)
    arguments += ("--lora", "1", "--epochs", "1", "-o", "tuned.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda package: "3.1.5" if package == "jinja2" else real(package))
        refused = shell(*arguments)
    assert refused.code == 2 and "jinja2 3.1.5" in refused.err, refused.err
    assert "pip install 'jinja2>=3.1.6'" in refused.err and not Path("tuned.onnx.run").exists()
    assert shell(*arguments).code == 0


@pytest.mark.parametrize("installed", ["3.1.0", "3.0", "2.11.3", None])
def test_versions_with_holes_in_the_sandbox(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Mock(side_effect=metadata.PackageNotFoundError("jinja2") if installed is None else [installed])
    monkeypatch.setattr(metadata, "version", found)
    with raises_first(UsageError, "missing_package", "jinja2"):
        ChatTemplate(Path("tokenizer.json"), CHATML, {})


@pytest.mark.parametrize("installed", ["3.1.6", "3.2", "4.0.0rc1"])
def test_versions_without_them(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    ChatTemplate(Path("tokenizer.json"), CHATML, {})
