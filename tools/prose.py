"""Count habits of hard prose per 1,000 words, by kind of text: docs, docstrings, comments, help and messages.

    python -m tools.prose                    the project's own text
    python -m tools.prose --check            exit with 1 if a kind is above its limit, as `make lint` does
    python -m tools.prose --list docs        each match, as file:line: habit: sentence
    python -m tools.prose click rich torch   installed packages, to compare
    python -m tools.prose --draw 7           200 texts, drawn with seed 7, for somebody to read who hasn't seen the code

The habits are patterns in sentences that readers of the project had to read twice. The count doesn't judge whether a
sentence is clear or true. Code blocks, inline code and Markdown tables of code are not counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

OWN = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "onnxgrad_cli")
"""The files and folders that are read by default."""

LIMITS = {"docs": 1.0, "docstrings": 1.0, "comments": 1.0, "help": 1.0, "messages": 1.0}
"""Kind of text -> largest number of habits per 1,000 words that `make lint` accepts."""

MOST_WORDS = 30
"""Largest number of words in a sentence. Longer sentences are counted as a habit."""

VERBS = (
    "is|are|was|were|be|been|has|had|have|can|can't|could|does|did|do|isn't|comes|came|lies|stands|follows|remains|"
    "makes"
)

HABITS = {
    name: re.compile(pattern)
    for name, pattern in {
        "'what' as a noun": rf"\b[Ww]hat (?!if\b|to expect\b)(?:{VERBS}|an?|the|it|they|he|one|no|nobody|another|each|"
        r"others?|this|that|there|you|we|few|several|its|their|\w+s|\w+ed)\b",
        "'tell' for report": r"\b(?:is|are|was|were|be|been|it|that|which|and) told\b|"
        r"\btells? (?:it|that|of|them|so|no)\b|\btold (?:is|are|by|with|as|of)\b",
        "'Of ...' in front": r"(?:^|[.:;] )Of (?:a|an|the|two|three|all|such|this|that|\w+s)\b",
        "'no X' for 'not an X'": r"(?<![Tt]here )\b(?:is|are|was|were) no(?:ne)? "
        r"(?!longer|more|need|way|reason|guarantee|such|different|matter|\w+ (?:to|for|in|at|of)\b)\w+|"
        r"\b(?:is|are|was|were) none\b",
        "'else', 'besides', 'anew'": r"\b(?:else|besides|anew)[.;)]|\band else\b|[,;] else\b",
        "'of that name'": r"\bso called\b|\bof (?:these|those|that|this) names?\b|\bthat bears?\b|\bbears? the\b",
        "riddle verbs": r"\b(?:answers to|speaks of|hands (?:it|them|out|on)|takes? (?:their|its) turn|knows? of|"
        r"asks? of|is asked (?:of|for)|goes with|comes to|lets? (?:it|them)|serves? better|(?:is|are) judged|"
        r"takes? its name|(?:is|are) met|meets? it|(?:is|are) wanted)\b",
        "'as it is' at the end": r"\bas (?:it|they|he|one) (?:is|are|was|were|stands?|does|do|did|has|had)\b"
        r"(?: (?:there|then|now|before))?[.;,:]",
        "'that of the'": r"\b(?:that|those|these|ones?) of (?:the|an?|which|what|its|their|others?)\b",
    }.items()
}  # fmt: skip

QUESTION = re.compile(r"^(?:What|Whether|How|Where|Why|Who|Whose|Which)\b(?!.*\?)")

DRAWN = {"docs": 60, "docstrings": 60, "messages": 40, "help": 40}
"""Kind of text -> the number of its texts that `--draw` prints. The texts of docs are sentences."""

LABEL = 3
"""Sentences of docs with at most this many words are labels or table cells, which `--draw` leaves out."""

BLOCKS = re.compile(r"```.*?```|~~~.*?~~~|<!--.*?-->|^    \S[^\n]*$", re.S | re.M)
"""Code and comments in Markdown, which are left out. In docstrings and messages, indented text is prose."""

CODE = re.compile(r"`[^`\n]*`")
"""Inline code, which counts as one word."""

HELP = ("help", "short_help", "epilog", "details", "shown")
"""Keywords whose text is help of an option, a command or a field."""

MESSAGES = re.compile(r"(\w*Error|CheckFailed|Refusal|Unknown|Caution|refuse|tell|say|warn|no)$")
"""Names of functions and classes whose texts are printed: errors, hints, refusals, cautions and progress."""


class Text(NamedTuple):
    """A piece of prose.

    Attributes:
        kind: a key of `LIMITS`.
        line: the number of the line in the file at which the text begins.
        words: the text.
        context: for a docstring, the signature of the function or class; for a message, the message with its hints.
    """

    kind: str
    line: int
    words: str
    context: str = ""

    @property
    def plain(self) -> str:
        """The words, with CODE for inline code."""
        return CODE.sub("CODE", self.words)


def texts(path: Path) -> Iterator[Text]:
    """Yield the prose of a file."""
    source = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        line = 1
        for part in re.split(r"(\n\s*\n)", BLOCKS.sub(_blank, source)):
            if part.strip():
                yield Text("docs", line, part)
            line += part.count("\n")
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    yield from _of_code(tree)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("comments", token.start[0], token.string.lstrip("#!: "))


def _blank(code: re.Match[str]) -> str:
    """Return the word CODE as a replacement for code, followed by as many line breaks as the code has."""
    return "CODE" + "\n" * code.group().count("\n")


def _of_code(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            text = getattr(getattr(statement, "value", None), "value", None)
            if isinstance(statement, ast.Expr) and isinstance(text, str):
                yield Text("docstrings", statement.lineno, text, _signature(node))
        if isinstance(node, ast.keyword) and node.arg in HELP:
            for words in _strings(node.value):
                yield Text("help", node.value.lineno, words)
        elif isinstance(node, ast.Call) and MESSAGES.match(
            str(getattr(node.func, "attr", getattr(node.func, "id", "")))
        ):
            found = [(argument.lineno, words) for argument in node.args for words in _strings(argument)]
            whole = "\n  fix: ".join(words for _, words in found)
            yield from (Text("messages", line, words, whole) for line, words in found)


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"{node.name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    return ""


def _strings(node: ast.expr) -> Iterator[str]:
    """Yield the texts of an expression that have several words. Formatted values are replaced by X."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, (ast.IfExp, ast.BinOp)):
        sides = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node.left, node.right)
        for side in sides:
            yield from _strings(side)


def sentences(words: str) -> list[str]:
    """Split a text into sentences. List items and table cells are split from each other too."""
    parts = re.split(r"\n\s*[-*|>#]\s*|\n\s*\n|\|", words)
    return [s.strip() for part in parts for s in re.split(r"(?<=[.!?])\s+", " ".join(part.split())) if s.strip()]


def habits(text: Text) -> Iterator[tuple[str, str]]:
    """Yield the name of each habit in a text, with the sentence."""
    found = sentences(text.plain)
    if text.kind == "docstrings" and found and QUESTION.match(found[0]):
        yield "summary asks a question", found[0]
    for sentence in found:
        for name, pattern in HABITS.items():
            yield from ((name, sentence) for _ in pattern.finditer(sentence))
        if len(sentence.split()) > MOST_WORDS:
            yield f"more than {MOST_WORDS} words", sentence


def files(names: Iterable[str]) -> Iterator[Path]:
    """Yield the Markdown and Python files in files, folders and installed packages, except tests.

    Raises:
        SystemExit: a path or package doesn't exist.
    """
    for name in names:
        path = ROOT / name
        if not path.exists():
            spec = find_spec(name.replace("-", "_")) if name.isidentifier() else None
            if spec is None or spec.origin is None:
                raise SystemExit(f"no such file, folder or package: {name}")
            path = Path(spec.origin)
            path = path.parent if path.name == "__init__.py" else path
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (
            each for each in inside if each.suffix in (".md", ".py") and not {"test", "tests"} & set(each.parts)
        )


def _place(path: Path) -> Path:
    """Return a path of the project relative to its root, and any other path unchanged."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def draw(names: Iterable[str], seed: int) -> None:
    """Print random texts of each kind, numbered, so that a reader can mark those that have to be read twice."""
    random.seed(seed)
    pool: dict[str, list[str]] = {kind: [] for kind in DRAWN}
    for path in files(names):
        for text in texts(path):
            if text.kind == "docs":
                each = [words for words in sentences(text.words) if words[-1] in ".!?:" and len(words.split()) > LABEL]
            else:
                each = [text.context if text.kind == "messages" else f"{text.context}\n{text.words}".strip()]
            pool.get(text.kind, []).extend(f"[{_place(path)}:{text.line}] {words}" for words in each)
    for kind, number in DRAWN.items():
        chosen = random.sample(pool[kind], min(number, len(pool[kind])))
        print(f"{kind}: {len(chosen)} of {len(pool[kind])}\n")
        print("\n\n".join(f"{kind} {at}. {words}" for at, words in enumerate(chosen, 1)), end="\n\n")


def main() -> None:
    """Print the counts of each kind of text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=OWN, metavar="PATH or PACKAGE")
    parser.add_argument("--list", metavar="KIND", choices=[*LIMITS, "all"], help="print each match of a kind of text")
    parser.add_argument("--draw", metavar="SEED", type=int, help="print texts of each kind, drawn with this seed")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kind is above its limit")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        return draw(arguments.names, arguments.draw)
    words: Counter[str] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for path in files(arguments.names):
        for text in texts(path):
            words[text.kind] += len(text.plain.split())
            for habit, sentence in habits(text):
                counts[text.kind, habit] += 1
                if arguments.list in (text.kind, "all"):
                    print(f"{_place(path)}:{text.line}: {habit}: {sentence[:160]}")
    above = []
    for kind, limit in LIMITS.items():
        density = 1000 * sum(n for (of, _), n in counts.items() if of == kind) / max(words[kind], 1)
        above += [f"{kind}: {density:.1f} habits per 1,000 words, {limit:g} are allowed"] if density > limit else []
        if not arguments.list and not arguments.check:
            most = ", ".join(f"{habit} {n}" for (of, habit), n in counts.most_common() if of == kind)
            print(f"{kind:10} {density:5.1f} per 1,000 of {words[kind]:,} words" + (f": {most}" if most else ""))
    if arguments.check and above:
        sys.exit("\n".join([*above, "see `python -m tools.prose --list KIND`"]))


if __name__ == "__main__":
    main()
