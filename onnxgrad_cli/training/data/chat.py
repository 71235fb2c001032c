"""Conversations as text, by the chat template that is published with a tokenizer, and where in it the answers lie.

A template is a program in Jinja that a stranger wrote: it runs in Jinja's sandbox, may go on for so many rounds of its
loops and calls, and has so much memory and time. Nothing of it is computed before it runs.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.common.packages import install_command, load_package
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.training.data.reading import check_regular, reading

T = TypeVar("T")

Span = tuple[int, int]
"""Where something begins and ends in a text, in characters."""

Messages = Sequence[Mapping[str, Any]]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The form of a conversation where a tokenizer has none of its own: ChatML, as of Qwen and many others."""

ROUNDS = 100_000
"""How often the loops of a template go round for one conversation, and what it calls, at most."""

MEMORY = GB // 4
"""Bytes that a template may take."""

SECONDS = 2.0
"""Of the processor, that a template may take for one conversation: published ones take some hundred microseconds."""

LONGEST = 2**20
"""Characters of a template: published ones have some ten thousand."""

SAFE = (3, 1, 6)
"""The first version of jinja2 whose sandbox holds: before, `|attr('format')` reads any attribute (CVE-2025-27516)."""

ANSWERS = "assistant"
"""The role whose messages are judged."""


class ChatTemplate:
    """A template, compiled."""

    def __init__(self, path: Path, source: str, marks: Mapping[str, str]) -> None:
        """Args:
        path: the file it is from, for messages.
        source: the template.
        marks: what a template may write besides, such as 'bos_token'.

        Raises:
            UsageError: it is no template, is beyond its limits, or the package jinja2 is missing or too old.
        """
        self.path, self._marks = path, marks
        self._alone = 0
        load_package("jinja2", f"the chat template of '{path}'")
        _check_sandbox()
        with reading(path, "a chat template", "a template as published with models is wanted"):
            if len(source) > LONGEST:
                raise ValueError(f"it has more than {LONGEST:,} characters")
            self._render, self._restart = _within_limits(lambda: _compiled(source))

    def render(self, where: str, messages: Messages, asked: bool = False) -> str:
        """A conversation as text; `asked`: up to where the next answer begins.

        Raises:
            UsageError: the template refuses it, or does not end.
        """
        self._restart()
        try:
            return _within_limits(
                lambda: self._render(messages=messages, add_generation_prompt=asked, tools=None, **self._marks)
            )
        except Exception as error:  # a template may raise anything
            raise UsageError(
                f"{where}: the chat template of '{self.path}' refuses the conversation: {error}",
                "templates have rules, such as that user and assistant take turns",
            ) from None

    def judged(self, where: str, messages: Messages, first: int = 0) -> tuple[str, list[Span]]:
        """A conversation as text, and where the answers in it are.

        An answer lies between the text of what was said before, with the mark that asks for it, and the text with it.
        Where a template writes earlier answers otherwise in a longer conversation, the last one alone is judged.

        Args:
            where: the place of the sample, for messages.
            messages: what was said.
            first: the number of the first message that may be judged.
        """
        text = self.render(where, messages)
        spans: list[Span] = []
        answers = [i for i, message in enumerate(messages) if i >= first and message["role"] == ANSWERS]
        for i in answers:
            before, until = self.render(where, messages[:i], True), self.render(where, messages[: i + 1])
            if text.startswith(before) and text.startswith(until) and len(before) <= len(until):
                spans.append((len(before), len(until)))
            elif i == answers[-1]:
                raise UsageError(
                    f"{where}: by the chat template of '{self.path}' the text before the last answer is not how the "
                    "conversation begins",
                    "save text as 'prompt' and 'completion'",
                )
        if len(spans) < len(answers):
            self._alone += 1
        return text, spans if len(spans) == len(answers) else spans[-1:]

    def told(self, tell: Tell) -> None:
        """Tell of how many conversations the last answer alone is judged."""
        if self._alone:
            text = "the chat template writes earlier answers otherwise: the last one alone is judged"
            tell(f"in {self._alone:,} conversations {text}", 0)


def chat_template(tokenizer: Path, settings: Mapping[str, str], tell: Tell) -> ChatTemplate:
    """The chat template beside a tokenizer: chat_template.jinja, or that of its settings, or ChatML."""
    marks = {name: text for name, text in settings.items() if name.endswith("_token")}
    path = tokenizer.with_name("chat_template.jinja")
    if path.exists():
        check_regular(path)
        with reading(path, "text", "save it as UTF-8"), path.open(encoding="utf-8") as file:
            return ChatTemplate(path, file.read(LONGEST + 1), marks)
    if "chat_template" in settings:
        return ChatTemplate(tokenizer.with_name("tokenizer_config.json"), settings["chat_template"], marks)
    tell(f"'{tokenizer}' has no chat template beside it: conversations are written in ChatML", 0)
    return ChatTemplate(tokenizer, CHATML, marks)


def _check_sandbox() -> None:
    """Refuse a version of jinja2 in whose sandbox a template can read what it should not.

    Raises:
        UsageError: it is such a version, or an unknown one.
    """
    try:
        installed = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        installed = "of an unknown version"
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:3]) < SAFE:
        raise UsageError(
            f"jinja2 {installed} lets a chat template read this process's memory and environment",
            install_command("jinja2"),
        )


def check_messages(where: str, name: str, messages: object) -> list[dict[str, Any]]:
    """Messages as they are given to a template.

    Raises:
        UsageError: they are none.
    """
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: '{name}' is no list of messages", 'such as [{"role": "user", "content": "Hello"}]')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UsageError(f"{where}: a message in '{name}' has no role and content that are text", "leave it out")
    return messages


def _within_limits(job: Callable[[], T]) -> T:
    """What a job on a template returns, which may take so much memory and time.

    Raises:
        ValueError: it takes more.
    """
    try:
        with limited_memory(MEMORY), _limited_time():
            return job()
    except MemoryError:
        pass  # an error that is raised while this one is handled would be told as one of the machine
    raise ValueError(f"it takes more than {MEMORY // 2**20} MB")


@contextmanager
def _limited_time() -> Iterator[None]:
    """End what this thread does after so many seconds, at its next call: filters go round loops that nobody counts.

    Raises:
        ValueError: they are over.
    """
    begun, asked = time.thread_time(), time.monotonic() + SECONDS

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal asked
        if time.monotonic() > asked:  # which takes a tenth of the time that it takes to ask for the thread's own
            if time.thread_time() - begun > SECONDS:
                raise ValueError(f"it takes more than {SECONDS:g} seconds")
            asked = time.monotonic() + SECONDS / 10

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def _compiled(source: str) -> tuple[Callable[..., str], Callable[[], None]]:
    """A function that renders a template, and one that lets it begin anew with `ROUNDS`."""
    from jinja2 import nodes, pass_context
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    left = [ROUNDS]

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            spend()
            yield item

    def spend() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError(f"it goes on for more than {ROUNDS:,} rounds")

    class Generation(Extension):
        """A block that marks what was generated; the marks are not needed here."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call(self, *arguments: Any, **keywords: Any) -> Any:
            spend()
            return super().call(*arguments, **keywords)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [
                each if isinstance(each, int) else len(each) for each in (left, right) if not isinstance(each, float)
            ]
            if operator == "**" or (operator == "%" and isinstance(left, str)) or math.prod(sizes) > LONGEST:
                raise ValueError(f"it has {operator} of {left!r:.20} and {right!r:.20}")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise ValueError(message)

    @pass_context
    def unchanged(context: Any, value: Any) -> Any:
        """What is written, as it is: whatever takes a context is not computed while the template is compiled."""
        return value

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
        finalize=unchanged,
        autoescape=False,
    )
    environment.filters |= {"tojson": _json, "_counted": counted}
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
    for switch in tree.find_all(nodes.EvalContextModifier):
        if not all(isinstance(option.value, nodes.Const) for option in switch.options):
            raise ValueError("its autoescape is computed")
    template = environment.from_string(tree)

    def restart() -> None:
        left[0] = ROUNDS

    return template.render, restart


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
