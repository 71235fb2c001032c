"""Render conversations as text with a tokenizer's chat template, and find the answers in the text.

A template is a Jinja program from an untrusted source. It runs in Jinja's sandbox, with limits on its loop iterations,
calls, memory and time. Jinja's optimizer is off, because it would evaluate constant parts at compile time, without
limits on calls.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from onnxgrad_cli.common.memory import GB, limited_memory
from onnxgrad_cli.common.narration import Tell
from onnxgrad_cli.common.packages import install_command, load_package
from onnxgrad_cli.data.read_failures import check_regular, reading
from onnxgrad_cli.errors import UsageError, mismatch, missing_value, wrong_type, wrong_value

T = TypeVar("T")

Span = tuple[int, int]
"""The start and the end of a part of a text: character indices, end exclusive."""

Messages = Sequence[Mapping[str, Any]]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template for tokenizers that have none: ChatML, the format of Qwen and many other models."""

ROUNDS = 100_000
"""The largest number of loop iterations and calls that a template may take for one conversation."""

MEMORY = GB // 4
"""The largest number of bytes of memory that a template may take."""

SECONDS = 2.0
"""The processor time, in seconds, that a template may take for one conversation. Published ones take some 0.0001 s."""

MAX_TEMPLATE_LENGTH = 2**20
"""The largest number of characters in a template. Published templates have some ten thousand."""

SAFE = (3, 1, 6)
"""The first version of jinja2 with a safe sandbox.

In older versions, a template can read any attribute with `|attr('format')` (CVE-2025-27516).
"""

ANSWERS = "assistant"
"""The role whose messages are answers. The loss is computed on answers only."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, path: Path, source: str, marks: Mapping[str, str]) -> None:
        """Args:
            path: the file that the template is from, for messages.
            source: the text of the template.
            marks: name of a special token that the template may use, such as 'bos_token', -> its text.

        Raises:
            UsageError: the source is not a template or exceeds a limit, or the package jinja2 is missing or too old.
        """
        self.path, self._marks = path, marks
        self._alone = 0
        load_package("jinja2", f"the chat template of '{path}'")
        _check_sandbox()
        with reading(path, "a chat template", "use a template as published with models"):
            if len(source) > MAX_TEMPLATE_LENGTH:
                raise ValueError(f"it has more than {MAX_TEMPLATE_LENGTH:,} characters")
            self._render, self._restart = _within_limits(lambda: _compiled(source))

    def render(self, where: str, messages: Messages, asked: bool = False) -> str:
        """Return a conversation as text.

        Args:
            where: the position of the sample in the file, for messages.
            messages: the messages of the conversation.
            asked: append the marker that starts the next answer.

        Raises:
            UsageError: the template refuses the conversation or exceeds a limit.
        """
        self._restart()
        said = {"messages": messages, "add_generation_prompt": asked, "tools": None, **self._marks}
        try:
            return _within_limits(lambda: self._render(**said))
        except Exception as error:  # a template may raise anything
            message = f"{where}: the chat template of '{self.path}' refuses the conversation: {error}"
            hint = "check the rules of the template, such as that user and assistant messages alternate"
            raise wrong_value(message, hint) from None

    def judged(self, where: str, messages: Messages, first: int = 0) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the spans of the answers on which the loss is computed.

        For each answer, two texts are rendered: the messages before the answer with the marker that starts an answer,
        and the messages up to and including the answer. The lengths of these texts are the start and the end of the
        span. Some templates render an answer differently if messages follow it. In that case only the span of the last
        answer is returned.

        Args:
            where: the position of the sample in the file, for messages.
            messages: the messages of the conversation.
            first: the index of the first message on which the loss may be computed.

        Raises:
            UsageError: the template refuses the conversation or exceeds a limit, or the last answer can't be found.
        """
        text = self.render(where, messages)
        spans: list[Span] = []
        answers = [i for i, message in enumerate(messages) if i >= first and message["role"] == ANSWERS]
        for i in answers:
            before, until = self.render(where, messages[:i], True), self.render(where, messages[: i + 1])
            if text.startswith(before) and text.startswith(until) and len(before) <= len(until):
                spans.append((len(before), len(until)))
            elif i == answers[-1]:
                problem = (
                    f"the chat template of '{self.path}' changes the text before the answer when the answer is added"
                )
                hint = "save the text as 'prompt' and 'completion'"
                raise mismatch(f"{where}: the last answer can't be found, because {problem}", hint)
        if len(spans) < len(answers):
            self._alone += 1
        return text, spans if len(spans) == len(answers) else spans[-1:]

    def told(self, tell: Tell) -> None:
        """Report the number of conversations in which the loss is computed on the last answer only."""
        if self._alone:
            text = "the chat template writes earlier answers differently: only the last answer counts in the loss"
            tell(f"in {self._alone:,} conversations, {text}", 0)


def chat_template(tokenizer: Path, settings: Mapping[str, str], tell: Tell) -> ChatTemplate:
    """Return the chat template of a tokenizer.

    The template is read from chat_template.jinja beside the tokenizer, or otherwise from the tokenizer's settings. The
    default is ChatML.
    """
    marks = {name: text for name, text in settings.items() if name.endswith("_token")}
    path = tokenizer.with_name("chat_template.jinja")
    if path.exists():
        check_regular(path)
        with reading(path, "text", "save it as UTF-8"), path.open(encoding="utf-8") as file:
            return ChatTemplate(path, file.read(MAX_TEMPLATE_LENGTH + 1), marks)
    if "chat_template" in settings:
        return ChatTemplate(tokenizer.with_name("tokenizer_config.json"), settings["chat_template"], marks)
    tell(f"there is no chat template beside '{tokenizer}': conversations are written as ChatML", 0)
    return ChatTemplate(tokenizer, CHATML, marks)


def _check_sandbox() -> None:
    """Raise an error if the installed version of jinja2 has no safe sandbox.

    Raises:
        UsageError: the installed version is older than `SAFE`, or unknown.
    """
    installed = "of an unknown version"
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version("jinja2")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:3]) < SAFE:
        message = f"jinja2 {installed} lets a chat template read this process's memory and environment"
        raise UsageError(message, install_command("jinja2"), code="missing_package")


def check_messages(where: str, name: str, messages: object) -> list[dict[str, Any]]:
    """Return `messages` after checking that they are a list of messages for a template.

    Args:
        where: the position of the sample in the file, for messages.
        name: the column of the messages.
        messages: the value in the column.

    Raises:
        UsageError: the value is not a list, is empty, or has an element without a role and a content that are text.
    """
    if not isinstance(messages, list) or not messages:
        hint = 'save a list such as [{"role": "user", "content": "Hello"}]'
        raise wrong_type(f"{where}: '{name}' is not a list of messages", hint)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise missing_value(f"{where}: a message in '{name}' has no text as 'role' or 'content'", "drop it")
    return messages


def _within_limits(job: Callable[[], T]) -> T:
    """Run a function that compiles or renders a template, with limits on memory and time, and return its result.

    Raises:
        ValueError: the function takes more than `MEMORY` bytes or `SECONDS` seconds.
    """
    try:
        with limited_memory(MEMORY), _limited_time():
            return job()
    except MemoryError:
        pass  # an error raised in here would have the MemoryError as context, and be reported as a lack of memory
    raise ValueError(f"it takes more than {MEMORY // 2**20} MB of memory")


@contextmanager
def _limited_time() -> Iterator[None]:
    """Stop this thread's work at the first function call after `SECONDS` seconds of processor time.

    The limit `ROUNDS` is not sufficient, because `ROUNDS` does not count loops inside Jinja's filters.

    Raises:
        ValueError: the time limit is exceeded.
    """
    begun, asked = time.thread_time(), time.monotonic() + SECONDS

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal asked
        if time.monotonic() > asked:  # ten times faster than time.thread_time()
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
    """Compile a template. Return a function that renders it, and a function that resets the count of its iterations."""
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
            raise ValueError(f"it takes more than {ROUNDS:,} rounds of loops and calls")

    class Generation(Extension):
        """Accept the block {% generation %}, with which some templates mark answers. The mark has no effect here."""

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
            sizes = [x if isinstance(x, int) else len(x) for x in (left, right) if not isinstance(x, float)]
            formats = operator == "%" and isinstance(left, str)
            if operator == "**" or formats or math.prod(sizes) > MAX_TEMPLATE_LENGTH:
                raise ValueError(f"its operation {left!r:.20} {operator} {right!r:.20} is not allowed or too large")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise ValueError(message)

    @pass_context
    def unchanged(context: Any, value: Any) -> Any:
        """Return the value. Because this function takes a context, Jinja can't evaluate outputs at compile time."""
        return value

    environment = Environment(
        extensions=[Generation, "jinja2.ext.loopcontrols"], trim_blocks=True, lstrip_blocks=True, optimized=False,
        finalize=unchanged,
    )  # fmt: skip
    environment.filters |= {"tojson": _json, "_counted": counted}
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    tree = environment.parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
    for switch in tree.find_all(nodes.EvalContextModifier):
        if not all(isinstance(option.value, nodes.Const) for option in switch.options):
            raise ValueError("its autoescape setting is not a constant")
    template = environment.from_string(tree)

    def restart() -> None:
        left[0] = ROUNDS

    return template.render, restart


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
