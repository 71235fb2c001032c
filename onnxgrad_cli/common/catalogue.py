"""Registries of objects that users select by name, such as losses and optimizers. Decorators register the objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Generic, TypeVar

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.settings import Option
from onnxgrad_cli.errors import OnnxgradError, suggest, unknown_name

T = TypeVar("T")


class Documented:
    """A registered object whose description is the docstring of its function.

    Attributes:
        name: the name by which users select it.
        function: the function.
        options: the settings of the function.
    """

    name: str
    function: Callable[..., Any]
    options: tuple[Option, ...]

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return self.doc.partition("\n")[0]

    @property
    def doc(self) -> str:
        """The description."""
        return inspect.getdoc(self.function) or ""


class Catalogue(Generic[T]):
    """A registry that maps names to objects of one kind, such as losses. Iterates in the order of registration."""

    def __init__(self, kind: str, plural: str, modules: Sequence[str], otherwise: str = "") -> None:
        """Create an empty registry.

        Args:
            kind, plural: the name of the kind, such as 'metric' and 'metrics', for messages.
            modules: the modules that register the built-in objects. They are imported at the first lookup.
            otherwise: text that is added to the hint if a name is unknown.
        """
        self._kind, self._plural, self._modules, self._otherwise = kind, plural, modules, otherwise
        self._found: dict[str, T] = {}

    def add(self, name: str, thing: T, override: bool = False) -> None:
        """Register an object as `name`. With `override`, it may replace an object of that name.

        Raises:
            OnnxgradError: the name is taken, and `override` is False.
        """
        checks.text("name", name)
        if name in self._found and not override:
            raise OnnxgradError(
                f"two {self._plural} are called '{name}'", "pass override=True to replace the first", code="conflict"
            )
        self._found[name] = thing

    def lookup(self, name: str) -> T:
        """Return the object called `name`.

        Raises:
            UsageError: the name is unknown.
        """
        self._load()
        if name not in self._found:
            hint = suggest(name, self._found, self._plural)
            if self._otherwise:
                hint += f"{'' if hint.endswith('?') else ';'} {self._otherwise}"
            raise unknown_name(f"there is no {self._kind} '{name}'", hint)
        return self._found[name]

    def __iter__(self) -> Iterator[T]:
        self._load()
        return iter(list(self._found.values()))

    @contextmanager
    def scoped(self) -> Iterator[None]:
        """After the block, restore the registry as it was before, so that objects registered inside are forgotten."""
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
