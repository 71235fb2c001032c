"""Options that name Python code: it runs as it is loaded, so that only what somebody has typed is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.errors import OnnxgradError, UsageError, suggest

STRANGERS = {
    click.core.ParameterSource.DEFAULT_MAP: "a configuration",
    click.core.ParameterSource.ENVIRONMENT: "the environment",
}
"""Where values come from that nobody may have typed."""

FUNCTION = re.compile(r"(?P<file>.*?\.py):(?P<function>[^:]*)")
"""A function in a Python file, as it is typed."""

CODE = re.compile(r"\.py(?::|$)")
"""What tells code from a name."""


class Typed(click.Option):
    """An option that is taken from the command line alone: a stranger may have set a configuration or a variable."""

    def names_code(self, value: Any) -> bool:
        """Whether a value is code; here any value is."""
        return bool(value)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, click.core.ParameterSource]:
        """The value, and where it comes from.

        Raises:
            UsageError: it names code and was not typed.
        """
        value, source = super().consume_value(ctx, opts)
        where = STRANGERS.get(source)
        if where and self.names_code(value):
            raise UsageError(
                f"{self.opts[0]} names code to run, and {where} can't: {value!r}",
                f"type it on the command line, if you trust the file: {self.opts[0]} {self.metavar}",
            )
        return value, source


class TypedFunction(Typed):
    """An option that takes names, and FILE.py:FUNCTION where it is typed."""

    def names_code(self, value: Any) -> bool:
        """Whether one of the values is code."""
        values = value if isinstance(value, (list, tuple)) else [value]
        return any(CODE.search(str(each)) for each in values)


def load_rules(path: Path) -> None:
    """Run a Python file that registers rules.

    Raises:
        UsageError: there is no such file, or it fails.
        OnnxgradError: one of its rules is refused by the registry.
    """
    import onnxgrad_cli.autodiff.rules  # noqa: F401  (the built-in rules come first, so that a file can override them)

    _run(path, "--rules")


def function_loader(flag: str) -> Callable[[str, str], Callable[..., Any]]:
    """What gives the function of a file, for the option `flag`; a file that it names twice runs once."""
    modules: dict[str, ModuleType] = {}

    def load(file: str, name: str) -> Callable[..., Any]:
        module = modules[file] = modules[file] if file in modules else _run(Path(file), flag)
        function = getattr(module, name, None)
        if not callable(function):
            known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            hint = suggest(name, known, "functions") if known else "it has no functions"
            raise UsageError(f"{flag}: '{file}' has no function '{name}'", hint)
        return function

    return load


def function_of(text: str, flag: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names.

    Raises:
        UsageError: it is not of that form, there is no such file or function, or the file fails.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        raise UsageError(f"{flag}: '{text}' is not of the form FILE.py:FUNCTION", "such as my_code.py:my_function")
    return function_loader(flag)(file, name)


def metric_name(text: str) -> str:
    """A metric as it is typed; of a function in a Python file, which is registered, what asks for it by its name.

    `:higher=true` says of a function that more is better.
    """
    from onnxgrad_cli.training.python_metric import register

    code = FUNCTION.match(text)
    if code is None:
        return text
    rest = text[code.end() :]
    higher = rest.endswith(":higher=true")
    function = function_loader("--metric")(code["file"], code["function"])
    return register(function, higher) + rest.removesuffix(":higher=true").removesuffix(":higher=false")


def _run(path: Path, flag: str) -> ModuleType:
    """Run a Python file as a module that nothing else can import, and that leaves no __pycache__ beside it."""
    if not path.is_file():
        raise UsageError(f"{flag}: no such file: '{path}'")
    keep(path)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except OnnxgradError:
        raise
    except Exception as error:
        raise UsageError(f"{flag}: '{path}' fails: {type(error).__name__}: {error}") from error
    return module
