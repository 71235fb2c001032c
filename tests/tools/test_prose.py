"""The counter of hard prose: it reads each kind of text, and finds each habit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose import HABITS, LIMITS, MOST_WORDS, Text, draw, habits, texts

PYTHON = '''"""What a module holds."""
# what is left
LIMIT = 3
"""Whether it ends."""

def f(x):
    """Return `what is code`."""
    option("--x", help="What comes next.")
    tell(f"{x} is told")
    raise UsageError("what is wrong", "let it be" if x else "add it anew.")
'''


def test_each_kind_of_text_is_read(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(PYTHON)
    found = [(text.kind, text.plain) for text in sorted(texts(file), key=lambda text: text.line)]
    assert found == [
        ("docstrings", "What a module holds."),
        ("comments", "what is left"),
        ("docstrings", "Whether it ends."),
        ("docstrings", "Return CODE."),
        ("help", "What comes next."),
        ("messages", "X is told"),
        ("messages", "what is wrong"),
        ("messages", "let it be"),
        ("messages", "add it anew."),
    ]
    page = tmp_path / "p.md"
    page.write_text("# A page\n\nIt shows `code`.\n\n```python\nwhat = is\n```\n")
    assert [(text.line, text.plain) for text in texts(page)] == [
        (1, "# A page"),
        (3, "It shows CODE."),
        (5, "CODE"),
    ]
    assert [text.context for text in texts(file) if text.words == "Return `what is code`."] == ["f(x)"]
    assert [text.context for text in texts(file) if text.words == "let it be"] == [
        "what is wrong\n  fix: let it be\n  fix: add it anew."
    ]
    assert {"docs", "docstrings", "comments", "help", "messages"} == LIMITS.keys()


@pytest.mark.parametrize(
    ("sentence", "habit"),
    [
        ("It writes what is left.", "'what' as a noun"),
        ("The error is told.", "'tell' for report"),
        ("Of two weights, the first is taken.", "'Of ...' in front"),
        ("This is no model.", "'no X' for 'not an X'"),
        ("The file is read anew.", "'else', 'besides', 'anew'"),
        ("It finds a weight of that name.", "'of that name'"),
        ("The option goes with a loss.", "riddle verbs"),
        ("The model stays as it is.", "'as it is' at the end"),
        ("The name is that of the input.", "'that of the'"),
        ("Whether it ends.", "summary asks a question"),
        (" word" * (MOST_WORDS + 1), f"more than {MOST_WORDS} words"),
    ],
)
def test_each_habit_is_found(sentence: str, habit: str) -> None:
    assert [name for name, _ in habits(Text("docstrings", 1, sentence))] == [habit]


def test_plain_sentences_have_no_habit() -> None:
    for sentence in ("Return the weights of a model.", "The loss is no longer finite.", "Which layer fails?"):
        assert not list(habits(Text("docstrings", 1, sentence)))
    assert len(HABITS) == 9


def test_a_draw_depends_on_its_seed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text(PYTHON)
    (tmp_path / "p.md").write_text("".join(f"Sentence {number} has five words.\n\n" for number in range(99)))
    printed = []
    for seed in (7, 7, 8):
        draw([str(tmp_path)], seed)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert "docs: 60 of 99\n" in printed[0] and "docstrings: 3 of 3\n" in printed[0]
