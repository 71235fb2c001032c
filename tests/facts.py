"""Compare errors by their data, not by their English: the code, and the arguments, names and numbers in the message."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import pytest

from onnxgrad_cli.errors import OnnxgradError, Refusal

TOKEN = re.compile(
    r"`([a-z][a-z0-9_]*(?:=[^`]*)?)`"  # an argument
    r"|(?<!\w)'([^'\n]*)'(?!\w)"  # a name in quotes
    r"|(?<![\w.'])(-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?!\w)"  # a number
    r"|\b([A-Za-z]+[\d_]\w*|[A-Z][a-z]+[A-Z]\w*)\b"  # an identifier, such as float32, post_transform or MatMul
)
"""A part of a message that is data."""


class Described(Protocol):
    """An error of the library, or the problem that the command line prints for it."""

    @property
    def code(self) -> str: ...

    @property
    def message(self) -> str: ...


def facts(error: Described, refusals: Iterable[Refusal] = ()) -> tuple[str, ...]:
    """Return the code of an error, and the arguments, names and numbers of its message in their order.

    Of an error with refusals, return the node, the operator, and the names and numbers of the reason of each. Of paths,
    only the last part is returned.
    """
    if refusals:
        return (error.code, *(word for each in refusals for word in (each.node, each.op_type, *_tokens(each.reason))))
    return (error.code, *_tokens(error.message))


def _tokens(text: str) -> list[str]:
    return [
        argument or name.rstrip("/").rpartition("/")[2] or number.rstrip(",") or identifier
        for argument, name, number, identifier in TOKEN.findall(text)
    ]


@contextmanager
def raises(kind: type[OnnxgradError], *expected: str) -> Generator[pytest.ExceptionInfo[OnnxgradError]]:
    """Expect an error of a class with these facts; see `facts`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert facts(caught.value, getattr(caught.value, "refusals", ())) == expected, caught.value


def raises_as(
    kind: type[OnnxgradError], expected: tuple[str, ...] | str
) -> AbstractContextManager[pytest.ExceptionInfo[OnnxgradError]]:
    """Expect an error with these facts or, if the facts don't tell it from another error, with this pattern."""
    return raises(kind, *expected) if isinstance(expected, tuple) else pytest.raises(kind, match=expected)
