"""Declare an option once, at the dataclass field that holds its value: default, help, bounds, section and flags.

The command line, the configuration file, environment variables, `--help`, the reference and the checks of values from
Python are generated from the declarations. This package imports no large packages at its top, so that `--help` starts
quickly.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, dataclass_transform, get_args, get_origin

from onnxgrad_cli.common import checks, flags

Documented = TypeVar("Documented")

DECLARATION = "option"
"""The key of a field's `Declaration` in the metadata of the dataclass field."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of an option: the facts about a field other than its type and default.

    Attributes:
        help: the effect of the option, with its unit.
        details: more text, for the documentation of the field in Python.
        section: the heading of the option in `--help-all`; by default the attribute `SECTION` of the field's class.
        common: True if `--help` lists the option even if the command has many options.
        flags: the flags on the command line, the longest last; by default the name of the field with hyphens.
        metavar: the form of the value, such as FILE, for the help.
        least, above, most, below: bounds of a number; `least` and `most` are inclusive, the others exclusive.
        example: a valid value as Python code, for hints.
        shown: the text of the default in the help, if the default value itself does not explain it.
        separator: the text between the elements of a tuple that is typed as one text; otherwise "".
        parse: 'module:function', the function that parses the text typed on the command line; '' if click parses it.
        file: True if the value is the path of a file to read.
        complete: 'module:REGISTRY', the registry whose names the shell completes.
        code: True if the value may name Python code. Such a value is accepted only on the command line.
        function: True if the value is FILE.py:FUNCTION.
    """

    help: str
    details: str = ""
    section: str = ""
    common: bool = False
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    example: str = ""
    shown: str = ""
    separator: str = ""
    parse: str = ""
    file: bool = False
    complete: str = ""
    code: bool = False
    function: bool = False


class DeclaredField(NamedTuple):
    """A field of a class of options that declares an option.

    Attributes:
        name: the name of the field.
        kind: the type of the field, without None; Any if the type is imported only for type checkers.
        optional: True if the value may be None.
        default: the default value; None if a factory creates it.
        declaration: the other facts about the option.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    declaration: Declaration

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the option on the command line, the longest last."""
        return self.declaration.flags or (flags.plain_flag(self.name),)


def option(*, default: Any = MISSING, default_factory: Callable[[], Any] | None = None, help: str, **more: Any) -> Any:
    """Return a dataclass field that declares an option. The other arguments are those of `Declaration`."""
    metadata = {DECLARATION: Declaration(help, **more)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def declared(cls: type) -> Mapping[str, DeclaredField]:
    """Return the fields of a class that declare options, as a map from name to field, in the order of the fields."""
    found = {option.name: option for option in _declared(cls)}
    flags.FLAGS.update((name, option.flags[-1]) for name, option in found.items())
    return found


def _declared(cls: type) -> Iterator[DeclaredField]:
    for each in fields(cls):
        if DECLARATION in each.metadata:
            kind = eval(str(each.type), {}, _Names(vars(sys.modules[cls.__module__])))
            parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
            kinds = [part for part in parts if part is not NoneType]
            declaration = each.metadata[DECLARATION]
            owner = next(base for base in cls.__mro__ if each.name in get_annotations(base))
            section = declaration.section or getattr(owner, "SECTION", "")
            yield DeclaredField(
                each.name, kinds[0] if len(kinds) == 1 else Any, len(kinds) < len(parts),
                None if each.default is MISSING else each.default, replace(declaration, section=section),
            )  # fmt: skip


class _Names(dict[str, Any]):
    """The namespace in which annotations are evaluated. Types that are imported only for type checkers become Any."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def check(options: Any) -> None:
    """Check the type and bounds of the value of each declared field. Replace lists by tuples.

    Raises:
        UsageError: a value does not fit; the message names the field.
    """
    for each in declared(options.__class__).values():
        value = getattr(options, each.name)
        if value is not None or not each.optional:
            checked = _checked(each, value)
            if checked is not value:
                object.__setattr__(options, each.name, checked)


def _checked(option: DeclaredField, value: Any) -> Any:
    """Check a value against the declaration of its field, and return it. A sequence is converted to a tuple."""
    name, kind, declaration = option.name, option.kind, option.declaration
    origin, example = get_origin(kind), declaration.example
    if origin is Literal:
        checks.one_of(name, value, kind)
    elif origin is tuple:
        (item, *_) = get_args(kind)
        plain = str if get_origin(item) is Literal else object if item is Any else item
        value = checks.tuple_of(name, value, plain, f"such as {name}={example}" if example else "")
        if get_origin(item) is Literal:
            for each in value:
                checks.one_of(name, each, item)
    elif origin is not None and issubclass(origin, Mapping):
        checks.mapping(name, value, f"such as {example}")
    elif kind is bool:
        checks.flag(name, value)
    elif kind is str:
        checks.text(name, value, option.optional)
    elif kind in (int, float):
        if type(value) is kind and value == option.default:
            return value  # the default may be out of bounds, such as 0 for "not set" if the least number is 1
        checks.within(name, value, whole=kind is int, least=declaration.least, above=declaration.above,
                      most=declaration.most, below=declaration.below, example=example)  # fmt: skip
    elif origin is None and kind is not Any:
        checks.of_type(name, value, kind, example or f"a {kind.__name__}")
    return value


def document(cls: type[Documented]) -> type[Documented]:
    """Append the help of the declared fields of a class to its docstring, and return the class."""
    own = get_annotations(cls)
    lines = [
        f"        {each.name}: {f'{each.metadata[DECLARATION].help} {each.metadata[DECLARATION].details}'.rstrip()}"
        for each in fields(cls)  # type: ignore[arg-type]
        if each.name in own and DECLARATION in each.metadata
    ]
    head, raises, tail = (cls.__doc__ or "").rstrip().partition("\n\n    Raises:")
    cls.__doc__ = (
        "\n".join([head, "", "    Attributes:", *lines, raises.removeprefix("\n") + tail]) if lines else cls.__doc__
    )
    return cls


@dataclass_transform(frozen_default=True, field_specifiers=(option, field))
def options_class(cls: type[Documented]) -> type[Documented]:
    """Decorate a class of options: make it a frozen dataclass, with its declared fields in its docstring."""
    return document(dataclass(frozen=True)(cls))
