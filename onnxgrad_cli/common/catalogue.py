"""Things that a user asks for by name, losses and optimizers: modules of a package register them with a decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Generic, TypeVar

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest

T = TypeVar("T")


class Documented:
    """What a function does, which its docstring says."""

    function: Callable[..., Any]

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return self.doc.partition("\n")[0]

    @property
    def doc(self) -> str:
        """What it does."""
        return inspect.getdoc(self.function) or ""


class Catalogue(Generic[T]):
    """Things of one kind by name, in the order in which they were registered."""

    def __init__(self, kind: str, plural: str, modules: Sequence[str], otherwise: str = "") -> None:
        """Args:
        kind, plural: what the things are called in messages.
        modules: what registers the built-in ones, imported when something is first asked for.
        otherwise: what else can be done where a name is unknown.
        """
        self._kind, self._plural, self._modules, self._otherwise = kind, plural, modules, otherwise
        self._found: dict[str, T] = {}

    def add(self, name: str, thing: T, override: bool = False) -> None:
        """Register a thing.

        Raises:
            OnnxgradError: there is one of this name, and `override` is not said.
        """
        checks.text("name", name)
        if name in self._found and not override:
            raise OnnxgradError(f"two {self._plural} are called '{name}'", "pass override=True to replace the first")
        self._found[name] = thing

    def lookup(self, name: str) -> T:
        """The thing called `name`.

        Raises:
            UsageError: there is none.
        """
        self._load()
        if name not in self._found:
            hint = suggest(name, self._found, self._plural)
            raise UsageError(
                f"there is no {self._kind} '{name}'",
                hint
                if not self._otherwise
                else f"{hint} {self._otherwise}"
                if hint.endswith("?")
                else f"{hint}; {self._otherwise}",
            )
        return self._found[name]

    def __iter__(self) -> Iterator[T]:
        self._load()
        return iter(list(self._found.values()))

    @contextmanager
    def scoped(self) -> Iterator[None]:
        """What is registered inside the block is forgotten after it."""
        self._load()
        saved = dict(self._found)
        try:
            yield
        finally:
            self._found.clear()
            self._found.update(saved)

    def _load(self) -> None:
        for module in self._modules:
            import_module(module)
