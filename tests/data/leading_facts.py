"""Compare the beginning of an error's data, if the end of its message is another library's text."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from onnxgrad_cli.errors import OnnxgradError
from tests.facts import facts


@contextmanager
def raises_first(kind: type[OnnxgradError], *expected: str) -> Generator[pytest.ExceptionInfo[OnnxgradError]]:
    """Expect an error of a class whose facts begin with these; see `tests.facts.raises`."""
    with pytest.raises(kind) as caught:
        yield caught
    assert facts(caught.value)[: len(expected)] == expected, caught.value
