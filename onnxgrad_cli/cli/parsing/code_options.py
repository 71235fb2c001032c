"""Options that name Python code to load. Loading runs the code, so these options must be typed on the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from onnxgrad_cli.cli.parsing.click_option import SectionOption
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.errors import OnnxgradError, UsageError, missing_file, suggest, unknown_name, wrong_value

UNTRUSTED_SOURCES = {
    click.core.ParameterSource.DEFAULT_MAP: "a configuration",
    click.core.ParameterSource.ENVIRONMENT: "the environment",
}
"""Source of an option's value that someone other than the user may control -> its name in messages."""

CODE = re.compile(r"\.py(?::|$)")
"""A regular expression that matches a value that names a Python file, and not one that is just a name."""


class Typed(SectionOption):
    """An option that is only accepted on the command line.

    Other people may control configuration files and environment variables.
    """

    def names_code(self, value: Any) -> bool:
        """Return True if a value names code. For this option, any value does."""
        return bool(value)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, click.core.ParameterSource]:
        """Return the value and its source.

        Raises:
            UsageError: the value names code and was not typed on the command line.
        """
        value, source = super().consume_value(ctx, opts)
        where = UNTRUSTED_SOURCES.get(source)
        if where and self.names_code(value):
            raise UsageError(
                f"`{self.name}` names code to run, which {where} must not do: {value!r}",
                f"if you trust the file, type the option on the command line: {self.opts[0]} {self.metavar}",
            )
        return value, source


class TypedFunction(Typed):
    """An option that accepts names from any source, but FILE.py:FUNCTION only on the command line."""

    def names_code(self, value: Any) -> bool:
        """Return True if any of the values names code."""
        values = value if isinstance(value, (list, tuple)) else [value]
        return any(CODE.search(str(each)) for each in values)


def load_rules(path: Path) -> None:
    """Run a Python file that registers rules.

    Raises:
        UsageError: the file raises an error.
        OnnxgradError: the file doesn't exist, or the registry refuses a rule in it.
    """
    import onnxgrad_cli.autodiff.rules  # noqa: F401  (the built-in rules come first, so that a file can override them)

    _run(path, "`rules`")


def function_loader(option: str) -> Callable[[str, str], Callable[..., Any]]:
    """Return a function that loads a function, given its Python file and name. A file is run only once.

    Args:
        option: the option in backquotes, for messages.
    """
    modules: dict[str, ModuleType] = {}

    def load(file: str, name: str) -> Callable[..., Any]:
        module = modules[file] = modules[file] if file in modules else _run(Path(file), option)
        function = getattr(module, name, None)
        if not callable(function):
            known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            hint = suggest(name, known, "functions") if known else "the file has no functions"
            raise unknown_name(f"{option}: '{file}' has no function '{name}'", hint)
        return function

    return load


def function_of(text: str, option: str) -> Callable[..., Any]:
    """Return the function that FILE.py:FUNCTION names.

    Raises:
        UsageError: the text does not have this form, the function doesn't exist, or the file raises an error.
        OnnxgradError: the file doesn't exist.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        raise wrong_value(f"{option}: '{text}' is not of the form FILE.py:FUNCTION", "such as my_code.py:my_function")
    return function_loader(option)(file, name)


def _run(path: Path, option: str) -> ModuleType:
    """Run a Python file and return it as a module. It is not added to `sys.modules`, and no __pycache__ is written."""
    if not path.is_file():
        raise missing_file(f"{option}: no such file: '{path}'")
    protect_inputs(path)
    module = ModuleType(path.stem)
    module.__file__ = str(path.absolute())
    try:
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except OnnxgradError:
        raise
    except Exception as error:
        raise UsageError(f"{option}: '{path}' fails: {type(error).__name__}: {error}") from error
    return module
