"""Options that several commands share: make click options from declared fields, and read their values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click

from onnxgrad_cli.cli.parsing.click_option import ANY_PATH, TEXT, FilePath, SectionOption, option, together
from onnxgrad_cli.cli.parsing.code_options import Typed, TypedFunction, function_loader, function_of, load_rules
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.errors import conflict
from onnxgrad_cli.options import Options
from onnxgrad_cli.options.declare import DeclaredField, declared

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem[Any]]"]

Command = TypeVar("Command", bound=Callable[..., Any])


class Pair(click.ParamType[tuple[str, Any]]):
    """The click type of KEY=VALUE or NAME:VALUE. The last colon separates, because the name may contain colons."""

    name = "pair"

    def __init__(self, metavar: str, separator: str, parse: Callable[[str], Any]) -> None:
        self.metavar = metavar
        self.separator = separator
        self.parse = parse

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the form of the value, for the help."""
        return self.metavar

    def join(self, key: str, value: Any) -> str:
        """Return the text that a user would type for a pair."""
        values = value if isinstance(value, list) else [value]
        return f"{key}{self.separator}{','.join(map(str, values))}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Parse a text, and return the pair."""
        if isinstance(value, tuple):
            return value
        split = str(value).rpartition if self.separator == ":" else str(value).partition
        key, separator, rest = split(self.separator)
        try:
            if not key or not separator:
                raise ValueError
            return key, self.parse(rest)
        except ValueError:
            self.fail(f"'{value}' is not of the form {self.metavar}", param, ctx)


def _size(text: str) -> int:
    size = int(text)
    if size < 0:
        raise ValueError
    return size


def _dims(text: str) -> tuple[int | str, ...]:
    dims = [dim.strip() for dim in text.split(",") if dim.strip()]
    return tuple(_size(dim) if dim.lstrip("-").isdigit() else dim for dim in dims)


def _setting(text: str) -> object:
    """Convert the text of a setting to a number, True, False, a tuple of numbers (for 1,2 or [1,2]), or else a text."""
    from onnxgrad_cli.common.settings import value_of

    listed = text.strip().startswith("[") and text.strip().endswith("]")
    text = text.strip()[1:-1] if listed else text
    if "," in text or listed:
        return tuple(value_of(part) for part in text.split(",") if part.strip())
    return value_of(text)


DIM = Pair("SYMBOL=SIZE", "=", _size)
SHAPE = Pair("INPUT:DIM,DIM,...", ":", _dims)
SETTING = Pair("KEY=VALUE", "=", _setting)
PAIRS = {pair.metavar: pair for pair in (DIM, SHAPE, SETTING, Pair("COLUMN=INPUT", "=", str))}
"""Metavar in the help -> the click type that reads such a value."""


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Complete the name of a file in the shell, for a parameter that is a file or '-'."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_names(module: str, registry: str) -> Completer:
    """Return a function for shell completion of an option whose value is a name in a registry, or a file."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        from click.shell_completion import CompletionItem

        known = sorted(each.name for each in getattr(import_module(f"onnxgrad_cli.{module}"), registry))
        found = [CompletionItem(name) for name in known if name.startswith(incomplete)]
        return found or complete_files(ctx, param, incomplete)

    return complete


MODEL = click.argument("model", metavar="MODEL", type=TEXT, shell_complete=complete_files)


FORCE = option("--force", is_flag=True, help="Replace files that onnxgrad did not write.", common=True)


def data_option(help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the required option --data, for samples, to a command."""
    return option(
        "--data", required=True, type=TEXT, shell_complete=complete_files, metavar="DATA", help=help, common=True
    )


def verify_option(help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the option --verify to a command."""
    default = "[default: on, unless the model is large]"
    return option("--verify/--no-verify", default=None, help=f"{help}  {default}", common=True)


def output_option(help: str, metavar: str = "FILE") -> Callable[[Command], Command]:
    """Return a decorator that adds the option -o for the output file to a command."""
    return option("-o", "--out", type=TEXT, shell_complete=complete_files, metavar=metavar, help=help, common=True)


def proof_data(flag: str, help: str, **more: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds two options: data for a check or a measurement, and their tokenizer.

    Args:
        flag: the name of the data option.
        help: the help of the data option.
        more: further arguments of `option` for the data option.
    """
    words = f"A tokenizer.json, or its folder, which converts text in {flag} to tokens."
    return together(
        option(flag, type=ANY_PATH, metavar="DATA", help=help, section="Data", **more),
        option("--tokenizer", type=ANY_PATH, metavar="FILE|DIR", help=words, section="Data"),
    )


def rules(words: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the option --rules, which loads Python files. Its help is `words`."""
    return option(
        "--rules",
        section="Reading the model",
        multiple=True,
        type=FilePath(dir_okay=False),
        metavar="FILE.py",
        help=words,
        cls=Typed,
    )


# -- declared options -------------------------------------------------------------------------------------------------


def declared_options(
    cls: type, *, only: Collection[str] | None = None, without: Collection[str] = (), **changes: Mapping[str, Any]
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options that the fields of a class declare.

    Args:
        cls: a class of `onnxgrad_cli.options`.
        only: the names of the fields whose options are added; None for all.
        without: the names of fields whose options are not added.
        changes: name of a field -> attributes of its `Declaration` that differ for this command.
    """
    fields = declared(cls)
    names = [name for name in (fields if only is None else only) if name not in without]
    changed = {name: replace(fields[name].declaration, **changes.get(name, {})) for name in names}
    return together(*(_option(fields[name]._replace(declaration=changed[name])) for name in names))


def _option(field: DeclaredField) -> Callable[[Command], Command]:
    """Return a decorator that adds the option of a field to a command."""
    declaration, flags, shown = field.declaration, list(field.flags), field.declaration.shown
    more: dict[str, Any] = {"metavar": declaration.metavar, "multiple": _is_repeated(field), "type": _type_of(field)}
    if field.kind is bool:
        more = {"is_flag": True}
        if field.default is not False:
            flags[-1] += f"/--no-{flags[-1].removeprefix('--')}"
            more = {"default": field.default}
            shown = shown or (field.flags[-1] if field.default else "")
    elif field.default == "" or (field.default not in (None, ()) and not shown):
        more |= {"default": field.default, "show_default": bool(field.default)}
    if declaration.complete:
        more["shell_complete"] = complete_names(*declaration.complete.split(":"))
    return click.option(
        *flags,
        field.name,
        cls=TypedFunction if declaration.code else Typed if declaration.function else SectionOption,
        help=f"{declaration.help}  [default: {shown}]" if shown else declaration.help,
        section=declaration.section,
        common=declaration.common,
        **more,
    )


def _is_repeated(field: DeclaredField) -> bool:
    """Return True if an option may be given several times: once for each element of a tuple or pair of a mapping."""
    origin, declaration = get_origin(field.kind), field.declaration
    if origin is tuple:
        return not declaration.separator
    return isinstance(origin, type) and issubclass(origin, Mapping) and not declaration.file


def _type_of(field: DeclaredField) -> Any:
    """Return the click type of a field, or of the elements of a field that is a tuple; None for text."""
    declaration = field.declaration
    item = get_args(field.kind)[0] if get_origin(field.kind) is tuple else field.kind
    if declaration.file or item is Path:
        return FilePath(dir_okay=item is Path, path_type=Path)
    if declaration.metavar in PAIRS:
        return PAIRS[declaration.metavar]
    if declaration.parse or declaration.separator:
        return None
    if get_origin(item) is Literal:
        return click.Choice(get_args(item))
    low = declaration.least if declaration.above is None else declaration.above
    high = declaration.most if declaration.below is None else declaration.below
    if item is int:
        return click.IntRange(*(None if bound is None else int(bound) for bound in (low, high)))  # type: ignore[arg-type]
    if item is float and (low, high) == (None, None):
        return float
    if item is float:
        open_ends = {"min_open": declaration.above is not None, "max_open": declaration.below is not None}
        return click.FloatRange(low, high, **open_ends)
    return None


def values_of(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of a class's fields from click's parsed values, convert them, and return name -> value.

    Options that were not given are left out.

    Raises:
        UsageError: a value does not fit.
    """
    found = {}
    for name, field in declared(cls).items():
        value = values.pop(name, None)
        if value is not None and value != ():
            found[name] = _read(field, value)
    return found


def _read(option: DeclaredField, value: Any) -> Any:
    """Convert a value that click has parsed to the value of a field."""
    declaration, origin, name = option.declaration, get_origin(option.kind), f"`{option.name}`"
    if declaration.file:
        protect_inputs(value)
    if declaration.function:
        return function_of(value, name)
    if declaration.separator:
        value = tuple(each.strip() for each in value.split(declaration.separator) if each.strip())
    if declaration.parse:
        module, _, function = declaration.parse.partition(":")
        parse = getattr(import_module(f"onnxgrad_cli.{module}"), function)
        parse = partial(parse, load=function_loader(name)) if declaration.code else parse
        return tuple(map(parse, value)) if origin is tuple else parse(value)
    if isinstance(value, tuple) and origin is not tuple:
        return _mapping(option, value)
    return value


def _mapping(option: DeclaredField, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Convert pairs (key, value) to a dict.

    Hyphens in the names of settings become underscores. The name of an output or label before a colon stays the same.
    """
    from onnxgrad_cli.common.settings import keyword

    found: dict[str, Any] = {}
    for typed, value in pairs:
        key = typed
        if option.declaration.metavar == SETTING.metavar:
            owner, colon, name = key.rpartition(":")
            key = f"{owner}{colon}{keyword(name)}"
        if key in found:
            raise conflict(f"`{option.name}`: '{typed}' is set twice", "give it one value")
        found[key] = value
    return found


# -- options of a build -----------------------------------------------------------------------------------------------

READING = ("mode", "quantization", "dims", "shapes", "infer_by_run")
"""The fields of `Options` that decide how a model is read. Many commands have these options."""

RULES = rules("Load more gradient rules from a Python file.")


def what_to_build(
    *, only: Collection[str] | None = None, without: Collection[str] = (), **changes: Mapping[str, Any]
) -> Callable[[Command], Command]:
    """Return a decorator that adds build options, and --rules, to a command.

    Args:
        only, without: the names of fields of `Options` whose options are added, or left out; see `declared_options`.
        changes: see `declared_options`.
    """
    return together(declared_options(Options, only=only, without=without, **changes), RULES)


how_to_read = what_to_build(only=READING)
"""A decorator that adds the options in `READING` to a command."""


def options(values: dict[str, Any]) -> Options:
    """Remove the build options from click's parsed values, load the rules that they name, and return `Options`.

    Raises:
        UsageError: a value does not fit.
    """
    for file in values.pop("rules"):
        load_rules(Path(file))
    return Options(**values_of(Options, values))
