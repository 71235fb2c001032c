"""The tables of gradient rules and of definitions: which function differentiates, or replaces, which operator.

Both are found by (domain, operator, version of the operator's schema). What is in no table is refused. Beside them
stand the operands behind which gradients stop, whatever a rule says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import onnx

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.domains import full_name, plain_domain

NEWEST_OPSET = 28
"""The newest opset that the rules were proven at; which one onnxruntime loads is another question, and asked of it."""


@dataclass(frozen=True)
class Rule:
    """How one operator is differentiated.

    Attributes:
        op_type, domain: the operator.
        versions: the first and last schema version the rule is proven for.
        function: the rule itself; None where every derivative is zero by mathematics, and where it is refused.
        kink: the convention followed where the derivative does not exist.
        needs_opset: the lowest opset of the default domain that has what the rule emits.
        integers: whether it makes integers of floats or floats of integers and their cotangents go through it.
        refusal, hint: why the operator is never differentiated, where it is known and refused, and what to do then.
    """

    op_type: str
    domain: str
    versions: tuple[int, int]
    function: Callable[..., Any] | None
    kink: str = ""
    needs_opset: int = 13
    integers: bool = False
    refusal: str = ""
    hint: str = ""

    @property
    def is_zero(self) -> bool:
        """Whether the derivative is zero by mathematics."""
        return self.function is None and not self.refusal

    @property
    def source(self) -> str:
        """Where the rule stands: module and function."""
        if self.function is None:
            return "refused" if self.refusal else "zero by mathematics"
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def signature(self) -> Signature:
        """What the function asks for."""
        assert self.function is not None
        return Signature.of(self.function)


@dataclass(frozen=True)
class Definition:
    """What an operator without a rule of its own means, in operators that have one.

    Attributes:
        op_type, domain: the operator.
        versions: the first and last schema version the definition holds for.
        function: `definition(op, x0, x1, ..., *, attributes)`, which emits and returns the outputs.
        needs_opset: the lowest opset of the default domain that has what it emits.
    """

    op_type: str
    domain: str
    versions: tuple[int, int]
    function: Callable[..., Any]
    needs_opset: int = 13

    @property
    def source(self) -> str:
        """Where the definition stands: module and function."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


@dataclass(frozen=True)
class Signature:
    """What a rule's parameters ask for, read from their names once.

    `g`, `y` are the cotangent and value of output 0; `gs`, `ys` ask for tuples of all outputs. Inputs follow by
    position (`*xs` for a variadic operator); keyword-only parameters are the attributes the rule handles. `needed` are
    the attributes without a default: a definition can't do without them, a rule gets None for what is absent.
    """

    all_cotangents: bool
    all_outputs: bool
    inputs: int
    variadic: bool
    attributes: Mapping[str, Any]
    any_attribute: bool
    needed: tuple[str, ...]

    @staticmethod
    def of(function: Callable[..., Any]) -> Signature:
        """Read the signature of a rule, `rule(op, g|gs, y|ys, x0, x1, ..., *, attribute, ...)`."""
        if function not in _SIGNATURES:
            checks.function(function, "a rule")
            parameters = list(inspect.signature(function).parameters.values())
            names = [parameter.name for parameter in parameters]
            if len(names) < 3 or names[1] not in ("g", "gs") or names[2] not in ("y", "ys"):
                raise OnnxgradError(
                    f"the rule {function.__qualname__} does not start with (op, g, y, ...)",
                    "a rule takes op, the cotangent g (or gs, all of them), the output y (or ys), then the inputs",
                )
            _SIGNATURES[function] = Signature._after(3, parameters)
        return _SIGNATURES[function]

    @staticmethod
    def of_definition(function: Callable[..., Any]) -> Signature:
        """Read the signature of a definition, `definition(op, x0, x1, ..., *, attribute=default, ...)`."""
        if function not in _SIGNATURES:
            checks.function(function, "a definition")
            _SIGNATURES[function] = Signature._after(1, list(inspect.signature(function).parameters.values()))
        return _SIGNATURES[function]

    @staticmethod
    def _after(leading: int, parameters: list[inspect.Parameter]) -> Signature:
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return Signature(
            all_cotangents="gs" in names[:leading],
            all_outputs="ys" in names[:leading],
            inputs=len(names) - leading,
            variadic=any(p.kind is p.VAR_POSITIONAL for p in parameters),
            attributes={
                p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is p.KEYWORD_ONLY
            },
            any_attribute=any(p.kind is p.VAR_KEYWORD for p in parameters),
            needed=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty),
        )


_SIGNATURES: dict[Callable[..., Any], Signature] = {}
_RULES: dict[tuple[str, str], list[Rule]] = {}
_DEFINITIONS: dict[tuple[str, str], list[Definition]] = {}
_STOPPED: dict[tuple[str, str], frozenset[int]] = {}
_NONE: frozenset[int] = frozenset()
_FOUND: dict[tuple[str, str, int], Rule | None] = {}
"""What `lookup` has found; forgotten whenever the table changes."""

_LAST = 10**6
"""The last version of a definition that holds until a newer one is registered: definitions also cover what is newer
than onnxruntime."""


def rule(
    op_type: str,
    *,
    domain: str = "",
    versions: tuple[int, int | None] = (1, None),
    kink: str = "",
    needs_opset: int = 13,
    integers: bool = False,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of an operator (several names: separated by spaces).

    Args:
        op_type: the operator, or several that share one rule.
        domain: the operator's domain; "" is ai.onnx.
        versions: first and last schema version the rule is right for; None is the newest it was proven at.
        kink: the convention where the derivative does not exist; shown to users.
        needs_opset: the lowest opset of the default domain that has what the rule emits.
        integers: whether the operator quantizes or dequantizes: its integers have (float) cotangents too.
        override: replace an existing rule instead of refusing.

    Raises:
        OnnxgradError: a rule for one of these versions exists already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        Signature.of(function)
        for name in _names(op_type):
            last = versions[1] or _newest(domain)
            _add(Rule(name, plain_domain(domain), (versions[0], last), function, kink, needs_opset, integers), override)
        return function

    return register


def no_gradient(op_types: str, *, domain: str = "", kink: str = "", override: bool = False) -> None:
    """Declare operators whose derivative is zero by mathematics: shapes, indices, comparisons, steps."""
    for name in _names(op_types):
        _add(Rule(name, plain_domain(domain), (1, _newest(domain)), None, kink), override)


def refuse(op_types: str, reason: str, hint: str = "", *, domain: str = "", override: bool = False) -> None:
    """Declare operators that are refused by name wherever a cotangent would have to go through them, even as integers.

    Args:
        op_types: the operators, separated by spaces.
        reason, hint: why, and what to do about it; shown to users.
        domain: their domain; "" is ai.onnx.
        override: replace existing rules instead of refusing.
    """
    for name in _names(op_types):
        versions = (1, _newest(domain))
        _add(Rule(name, plain_domain(domain), versions, None, integers=True, refusal=reason, hint=hint), override)


def stop_gradient(op_types: str, inputs: Iterable[int], *, domain: str = "") -> None:
    """Declare operands that get no gradient, whatever the operator's rule says.

    It holds for every node of these operators in a model, not for those that losses, definitions and rules write.
    The gradients of what lies behind such an operand are then no derivatives of the loss, which the report says and
    the proof of a training model leaves out. A later call adds operands; `scoped` forgets them.

    Args:
        op_types: the operators, separated by spaces.
        inputs: positions among their inputs, from 0.
        domain: their domain; "" is ai.onnx.

    Raises:
        OnnxgradError: a position is no position of the operator's, or models that have it are converted to another.
    """
    _load()
    checks.of_type("inputs", inputs, Iterable, "a list of positions")
    positions = frozenset(inputs)
    for name in _names(op_types):
        key = (plain_domain(domain), name)
        _check_stopped(*key, positions)
        _STOPPED[key] = _STOPPED.get(key, frozenset()) | positions


def _check_stopped(domain: str, op_type: str, positions: frozenset[int]) -> None:
    full = full_name(op_type, domain)
    if not positions or not all(type(position) is int and position >= 0 for position in positions):
        raise OnnxgradError(
            f"stop_gradient({op_type!r}, {sorted(positions, key=str)}): not a set of positions",
            "give the positions of the operator's inputs, counted from 0",
        )
    try:
        schema = onnx.defs.get_schema(op_type, NEWEST_OPSET, domain)
    except onnx.defs.SchemaError:
        if not domain:
            raise OnnxgradError(f"stop_gradient: there is no operator {full}", "give its domain=") from None
        return
    if schema.deprecated:
        raise OnnxgradError(
            f"stop_gradient: {full} is deprecated: models are converted before they are differentiated",
            "name the operator that took its place",
        )
    if max(positions) >= schema.max_input:
        raise OnnxgradError(f"stop_gradient: {full} has no input {max(positions)}", f"it has {schema.max_input}")


def stopped(op_type: str, domain: str = "") -> frozenset[int]:
    """The operands of an operator that `stop_gradient` has declared."""
    return _STOPPED.get((plain_domain(domain), op_type), _NONE) if _STOPPED else _NONE


def all_stopped() -> Iterator[tuple[str, str, frozenset[int]]]:
    """Every operator with operands that `stop_gradient` has declared: domain, name and the operands' positions."""
    for (domain, op_type), positions in sorted(_STOPPED.items()):
        yield domain, op_type, positions


def definition(
    op_type: str,
    *,
    domain: str = "",
    versions: tuple[int, int | None] = (1, None),
    needs_opset: int = 13,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the definition of an operator (several names: separated by spaces).

    `definition(op, x0, x1, ..., *, attribute=default, ...)` returns the operator's outputs (one value or a tuple),
    written with `op`. Before anything is differentiated, a node that has no rule is replaced by its definition, so
    that its gradient follows from the rules. Attributes come with the schema's defaults, or, where there is no
    schema, with those of the function. What a definition does not cover it refuses by raising `Unknown(reason)`.

    Raises:
        OnnxgradError: a definition for one of these versions exists already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        Signature.of_definition(function)
        for name in _names(op_type):
            last = versions[1] or _LAST
            _add(Definition(name, plain_domain(domain), (versions[0], last), function, needs_opset), override)
        return function

    return register


def _names(op_types: str) -> list[str]:
    """Operators, separated by spaces."""
    checks.text("op_type", op_types)
    return op_types.split()


def _newest(domain: str) -> int:
    """The last version that a rule holds for unless it says so: opsets of the standard are proven one by one."""
    return _LAST if plain_domain(domain) else NEWEST_OPSET


def _add(new: Rule | Definition, override: bool) -> None:
    if override:
        _load()  # what is to be replaced must be there
    table: dict[tuple[str, str], list[Any]] = _RULES if isinstance(new, Rule) else _DEFINITIONS
    rules = table.setdefault((new.domain, new.op_type), [])
    for old in list(rules):
        if old.versions[0] <= new.versions[1] and new.versions[0] <= old.versions[1]:
            if not override:
                kind = "rules" if isinstance(new, Rule) else "definitions"
                raise OnnxgradError(
                    f"two {kind} for {full_name(new.op_type, new.domain)}: {old.source} and {new.source}",
                    "pass override=True to replace the first",
                )
            rules.remove(old)
    rules.append(new)
    _FOUND.clear()


def lookup(op_type: str, domain: str = "", opset: int = NEWEST_OPSET) -> Rule | None:
    """The rule for an operator in a model that imports `domain` at version `opset`; None if there is none."""
    _load()
    key = (op_type, plain_domain(domain), opset)
    if key not in _FOUND:
        checks.text("op_type", op_type)
        _FOUND[key] = _find(_RULES, *key)
    return _FOUND[key]


def lookup_definition(op_type: str, domain: str, opset: int) -> Definition | None:
    """The definition of an operator in a model that imports `domain` at version `opset`; None if there is none."""
    _load()
    return _find(_DEFINITIONS, op_type, plain_domain(domain), opset)


def _find(table: dict[tuple[str, str], list[Any]], op_type: str, domain: str, opset: int) -> Any:
    try:
        version = onnx.defs.get_schema(op_type, opset, domain).since_version
    except onnx.defs.SchemaError:
        version = opset
    return next((r for r in table.get((domain, op_type), ()) if r.versions[0] <= version <= r.versions[1]), None)


def first_known(op_type: str, domain: str, opset: int) -> int | None:
    """The first version after `opset` from which an operator has a rule or a definition; None if it never has."""
    _load()
    key = (plain_domain(domain), op_type)
    entries = [*_RULES.get(key, ()), *_DEFINITIONS.get(key, ())]
    return min((entry.versions[0] for entry in entries if entry.versions[0] > opset), default=None)


def all_rules() -> Iterator[Rule]:
    """Every rule, by domain and operator."""
    _load()
    for key in sorted(_RULES):
        yield from sorted(_RULES[key], key=lambda r: r.versions)


def all_definitions() -> Iterator[Definition]:
    """Every definition, by domain and operator."""
    _load()
    for key in sorted(_DEFINITIONS):
        yield from sorted(_DEFINITIONS[key], key=lambda d: d.versions)


@contextmanager
def scoped() -> Iterator[None]:
    """Rules, definitions and stopped operands registered inside the block are forgotten after it."""
    _load()
    tables: tuple[dict[tuple[str, str], Any], ...] = (_RULES, _DEFINITIONS, _STOPPED)
    saved = [{key: type(entry)(entry) for key, entry in table.items()} for table in tables]
    try:
        yield
    finally:
        for table, before in zip(tables, saved, strict=True):
            table.clear()
            table.update(before)
        _FOUND.clear()


BUILT_IN = ("onnxgrad_cli.autodiff.definitions", "onnxgrad_cli.autodiff.rules")
"""What registers the rules and definitions of this package."""

_STATE = {"loaded": False}


def _load() -> None:
    """Register the built-in rules, then those of installed packages (entry-point group `onnxgrad.rules`).

    Raises:
        OnnxgradError: a package's rules fail.
    """
    if _STATE["loaded"]:
        return
    _STATE["loaded"] = True  # at once: what is loaded registers rules, which may ask for this
    for package in BUILT_IN:
        import_module(package)
    for plugin in entry_points(group="onnxgrad.rules"):
        try:
            plugin.load()
        except Exception as error:  # it is code of others, which fails as it likes
            _STATE["loaded"] = False
            package = plugin.dist.name if plugin.dist else plugin.value
            what = f"{type(error).__name__}: {error}"
            raise OnnxgradError(
                f"the rules of the installed package '{package}' ({plugin.value}) fail: {what}",
                f"repair the package, or uninstall it: pip uninstall {package}",
            ) from error
