"""The tables of gradient rules, of definitions that replace operators, and of operands at which gradients stop.

Rules and definitions are looked up by domain, operator and version of the operator's schema. An operator that has
neither is refused. Gradients stop at the operands declared by `stop_gradient`, whatever the operator's rule returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from onnxgrad_cli.common import checks
from onnxgrad_cli.errors import OnnxgradError
from onnxgrad_cli.ir.domains import full_name, plain_domain
from onnxgrad_cli.ir.node_values import schema_of

NEWEST_OPSET = 28
"""The newest opset for which the gradient rules were checked. It may differ from the newest that onnxruntime loads."""


@dataclass(frozen=True)
class Rule:
    """The gradient rule of one operator.

    Attributes:
        op_type, domain: the operator.
        versions: the first and the last schema version for which the rule is proven.
        function: the rule itself. None if every derivative is zero by mathematics (`no_gradient`), or if the operator
            is refused (`refuse`).
        kink: the convention at points where the derivative does not exist.
        needs_opset: the lowest opset of the default domain that contains all operators that the rule emits.
        integers: True if the operator converts floats to integers or back, and cotangents pass through it.
        refusal: the reason why the operator is never differentiated, or "".
        hint: the fix that a refusal suggests.
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
        """True if the derivative is zero by mathematics."""
        return self.function is None and not self.refusal

    @property
    def source(self) -> str:
        """The module and the function of the rule."""
        if self.function is None:
            return "refused" if self.refusal else "zero by mathematics"
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def signature(self) -> Signature:
        """The parameters of the function."""
        assert self.function is not None
        return Signature.of(self.function)


@dataclass(frozen=True)
class Definition:
    """The definition of an operator without a rule by operators that have rules.

    Attributes:
        op_type, domain: the operator.
        versions: the first and the last schema version for which the definition is valid.
        function: `definition(op, x0, x1, ..., *, attributes)`, which emits and returns the outputs.
        needs_opset: the lowest opset of the default domain that contains all operators that the definition emits.
    """

    op_type: str
    domain: str
    versions: tuple[int, int]
    function: Callable[..., Any]
    needs_opset: int = 13

    @property
    def source(self) -> str:
        """The module and the function of the definition."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


@dataclass(frozen=True)
class Signature:
    """The parameters of a rule or definition. Their meaning follows from their names.

    `g` and `y` are the cotangent and the value of output 0. `gs` and `ys` are tuples with the cotangents and values of
    all outputs. Inputs follow by position, or as `*xs` for a variadic operator. Keyword-only parameters are the
    attributes that the function handles.

    Attributes:
        all_cotangents: True if the rule has the parameter `gs`.
        all_outputs: True if the rule has the parameter `ys`.
        inputs: the number of inputs by position.
        variadic: True if the function accepts any number of inputs.
        attributes: attribute -> its default; None if it has none.
        any_attribute: True if the function accepts all attributes.
        needed: the attributes without a default. If a node lacks one of them, a rule gets None for it, and a definition
            can't be used.
    """

    all_cotangents: bool
    all_outputs: bool
    inputs: int
    variadic: bool
    attributes: Mapping[str, Any]
    any_attribute: bool
    needed: tuple[str, ...]

    @staticmethod
    @cache
    def of(function: Callable[..., Any]) -> Signature:
        """Read the signature of a rule, `rule(op, g|gs, y|ys, x0, x1, ..., *, attribute, ...)`."""
        checks.function(function, "a rule")
        names = list(inspect.signature(function).parameters)
        if len(names) < 3 or names[1] not in ("g", "gs") or names[2] not in ("y", "ys"):
            what = f"the rule {function.__qualname__} must start with the parameters (op, g, y, ...)"
            hint = "name the cotangent g (or gs for all cotangents) and the output y (or ys for all outputs)"
            raise OnnxgradError(what, hint, code="wrong_value")
        return Signature._after(3, function)

    @staticmethod
    @cache
    def of_definition(function: Callable[..., Any]) -> Signature:
        """Read the signature of a definition, `definition(op, x0, x1, ..., *, attribute=default, ...)`."""
        checks.function(function, "a definition")
        return Signature._after(1, function)

    @staticmethod
    def _after(leading: int, function: Callable[..., Any]) -> Signature:
        parameters = list(inspect.signature(function).parameters.values())
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        needed = tuple(name for name, default in attributes.items() if default is inspect.Parameter.empty)
        return Signature(
            all_cotangents="gs" in names[:leading],
            all_outputs="ys" in names[:leading],
            inputs=len(names) - leading,
            variadic=any(p.kind is p.VAR_POSITIONAL for p in parameters),
            attributes=attributes | dict.fromkeys(needed),
            any_attribute=any(p.kind is p.VAR_KEYWORD for p in parameters),
            needed=needed,
        )


_RULES: dict[tuple[str, str], list[Rule]] = {}
_DEFINITIONS: dict[tuple[str, str], list[Definition]] = {}
_STOPPED: dict[tuple[str, str], frozenset[int]] = {}
_NONE: frozenset[int] = frozenset()
_FOUND: dict[tuple[str, str, int], Rule | None] = {}
"""The cached results of `lookup`. The cache is cleared whenever a rule is added or removed."""

_LAST = 10**6
"""The last version that is stored for a rule or definition without a limit. No real version is as high."""


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
    """Register the decorated function as the rule of an operator.

    Args:
        op_type: the operator, or several names separated by spaces that share the rule.
        domain: the operator's domain; "" is ai.onnx.
        versions: the first and the last schema version for which the rule is correct. None as the last: `NEWEST_OPSET`
            for standard operators, no limit for others.
        kink: the convention at points where the derivative does not exist; shown to users.
        needs_opset: the lowest opset of the default domain that contains all operators that the rule emits.
        integers: True if the operator quantizes or dequantizes. Its integers then have cotangents too, which are
            floats.
        override: True to replace an existing rule instead of raising an error.

    Raises:
        OnnxgradError: a rule for one of these versions exists already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        Signature.of(function)
        _add_rules(op_type, domain, versions, function, override, kink, needs_opset, integers)
        return function

    return register


def formula_rule(op_type: str, formula: Callable[..., Any], kink: str = "") -> Callable[..., Any]:
    """Register a rule that is a single formula, such as a lambda expression, and return it.

    The formula includes `g`, so that for example g / y is a single Div, instead of a Div and a Mul.
    """
    formula.__qualname__ = op_type.lower()
    return rule(op_type, kink=kink)(formula)


def no_gradient(op_types: str, *, domain: str = "", kink: str = "", override: bool = False) -> None:
    """Declare operators whose derivative is zero by mathematics: shapes, indices, comparisons, steps."""
    _add_rules(op_types, domain, (1, None), None, override, kink)


def refuse(op_types: str, reason: str, hint: str = "", *, domain: str = "", override: bool = False) -> None:
    """Declare operators that are refused by name if a cotangent would pass through them, even through integers.

    Args:
        op_types: the operators, separated by spaces.
        reason: the reason; shown to users.
        hint: the fix to suggest; shown to users.
        domain: their domain; "" is ai.onnx.
        override: True to replace existing rules instead of raising an error.
    """
    _add_rules(op_types, domain, (1, None), None, override, integers=True, refusal=reason, hint=hint)


def stop_gradient(op_types: str, inputs: Iterable[int], *, domain: str = "") -> None:
    """Declare operands that get no gradient, whatever the operator's rule returns.

    The declaration applies to every node of these operators in a model, but not to the nodes that losses, definitions
    and rules write. The gradients of values before such an operand then differ from the derivatives of the loss. The
    report says so, and the numerical check leaves out these gradients. A later call for the same operator adds
    operands. Declarations inside `scoped` are removed at its end.

    Args:
        op_types: the operators, separated by spaces.
        inputs: positions among their inputs, from 0.
        domain: their domain; "" is ai.onnx.

    Raises:
        OnnxgradError: the standard has no such operator, or the operator has no such input. Or the operator is
            deprecated: models are converted to its successor before they are differentiated. Or `inputs` is empty or
            contains a value that is not a position.
    """
    _load()
    checks.of_type("inputs", inputs, Iterable, "a list of positions")
    positions = frozenset(inputs)
    for name in _names(op_types):
        key = (plain_domain(domain), name)
        _check_stopped(*key, positions)
        _STOPPED[key] = _STOPPED.get(key, frozenset()) | positions


def _check_stopped(domain: str, op_type: str, positions: frozenset[int]) -> None:
    if not positions or not all(type(position) is int and position >= 0 for position in positions):
        what = (
            f"stop_gradient({op_type!r}, {sorted(positions, key=str)}): the positions must be a set of input positions"
        )
        raise OnnxgradError(what, "give the positions of the operator's inputs, counted from 0", code="wrong_value")
    full, schema = full_name(op_type, domain), schema_of(op_type, NEWEST_OPSET, domain)
    if schema is None and not domain:
        what = f"stop_gradient: the operator {full} does not exist"
        raise OnnxgradError(what, "pass its domain with domain=", code="unknown_name")
    if schema is not None and schema.deprecated:
        what = f"stop_gradient: {full} is deprecated, and models are converted before they are differentiated"
        raise OnnxgradError(what, "name the operator that replaced it", code="conflict")
    if schema is not None and max(positions) >= schema.max_input:
        what = f"stop_gradient: {full} has no input {max(positions)}"
        raise OnnxgradError(what, f"it has {schema.max_input} inputs", code="wrong_value")


def stopped(op_type: str, domain: str = "") -> frozenset[int]:
    """Return the positions of the operands of an operator at which gradients stop."""
    return _STOPPED.get((plain_domain(domain), op_type), _NONE) if _STOPPED else _NONE


def all_stopped() -> Iterator[tuple[str, str, frozenset[int]]]:
    """Yield domain, name and stopped positions of every operator with operands at which gradients stop."""
    return ((*key, positions) for key, positions in sorted(_STOPPED.items()))


def definition(
    op_type: str,
    *,
    domain: str = "",
    versions: tuple[int, int | None] = (1, None),
    needs_opset: int = 13,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the definition of an operator.

    `definition(op, x0, x1, ..., *, attribute=default, ...)` writes nodes with `op` and returns the operator's outputs,
    one value or a tuple. Before differentiation, each node without a rule is replaced by the nodes of its definition,
    whose rules then give the gradient. Missing attributes get the defaults of the operator's schema, or those of the
    function if there is no schema. A definition raises `Unknown(reason)` for a case that it does not cover.

    Args:
        op_type: the operator, or several names separated by spaces.
        domain: the operator's domain; "" is ai.onnx.
        versions: the first and the last schema version for which the definition is correct; None means no limit.
        needs_opset: the lowest opset of the default domain that contains all operators that the definition emits.
        override: True to replace an existing definition instead of raising an error.

    Raises:
        OnnxgradError: a definition for one of these versions exists already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        Signature.of_definition(function)
        for name in _names(op_type):
            every = versions[0], versions[1] or _LAST
            _add(Definition(name, plain_domain(domain), every, function, needs_opset), override)
        return function

    return register


def _names(op_types: str) -> list[str]:
    """Split a text at spaces into the names of operators."""
    checks.text("op_type", op_types)
    return op_types.split()


def _add_rules(
    op_types: str, domain: str, versions: tuple[int, int | None], function: Callable[..., Any] | None, override: bool,
    *fields: Any, **more: Any,
) -> None:  # fmt: skip
    """Add a rule for each operator. The last version is by default `NEWEST_OPSET`, or unlimited in other domains."""
    domain = plain_domain(domain)
    every = versions[0], versions[1] or (_LAST if domain else NEWEST_OPSET)
    for name in _names(op_types):
        _add(Rule(name, domain, every, function, *fields, **more), override)


def _add(new: Rule | Definition, override: bool) -> None:
    if override:
        _load()  # the entry to replace must be registered first
    table: dict[tuple[str, str], list[Any]] = _RULES if isinstance(new, Rule) else _DEFINITIONS
    rules = table.setdefault((new.domain, new.op_type), [])
    for old in list(rules):
        if old.versions[0] <= new.versions[1] and new.versions[0] <= old.versions[1]:
            if not override:
                kind = "rules" if isinstance(new, Rule) else "definitions"
                what = f"two {kind} for {full_name(new.op_type, new.domain)}: {old.source} and {new.source}"
                raise OnnxgradError(what, "pass override=True to replace the first", code="conflict")
            rules.remove(old)
    rules.append(new)
    _FOUND.clear()


def lookup(op_type: str, domain: str = "", opset: int = NEWEST_OPSET) -> Rule | None:
    """Return the rule of an operator in a model that imports `domain` at version `opset`, or None."""
    key = (op_type, plain_domain(domain), opset)
    if key not in _FOUND:
        checks.text("op_type", op_type)
        _FOUND[key] = _find(_RULES, *key)
    return _FOUND[key]


def lookup_definition(op_type: str, domain: str, opset: int) -> Definition | None:
    """Return the definition of an operator in a model that imports `domain` at version `opset`, or None."""
    return _find(_DEFINITIONS, op_type, plain_domain(domain), opset)


def _find(table: dict[tuple[str, str], list[Any]], op_type: str, domain: str, opset: int) -> Any:
    _load()
    schema = schema_of(op_type, opset, domain)
    version = opset if schema is None else schema.since_version
    return next((r for r in table.get((domain, op_type), ()) if r.versions[0] <= version <= r.versions[1]), None)


def first_known(op_type: str, domain: str, opset: int) -> int | None:
    """Return the lowest version above `opset` at which a rule or definition of an operator begins, or None."""
    _load()
    key = (plain_domain(domain), op_type)
    entries = [*_RULES.get(key, ()), *_DEFINITIONS.get(key, ())]
    return min((entry.versions[0] for entry in entries if entry.versions[0] > opset), default=None)


def all_rules() -> Iterator[Rule]:
    """Yield every rule, sorted by domain and operator."""
    return _in_order(_RULES)


def all_definitions() -> Iterator[Definition]:
    """Yield every definition, sorted by domain and operator."""
    return _in_order(_DEFINITIONS)


def _in_order(table: Mapping[tuple[str, str], list[Any]]) -> Iterator[Any]:
    _load()
    for key in sorted(table):
        yield from sorted(table[key], key=lambda entry: entry.versions)


@contextmanager
def scoped() -> Iterator[None]:
    """Restore the registered rules, definitions and stopped operands at the end of the block."""
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
"""The modules in which the built-in rules and definitions register themselves."""

_STATE = {"loaded": False}


def _load() -> None:
    """Register the built-in rules, then those of installed packages (entry-point group `onnxgrad.rules`).

    Raises:
        OnnxgradError: a package's rules fail.
    """
    if _STATE["loaded"]:
        return
    _STATE["loaded"] = True  # set first, because the loaded modules may call this function
    for package in BUILT_IN:
        import_module(package)
    for plugin in entry_points(group="onnxgrad.rules"):
        try:
            plugin.load()
        except Exception as error:  # code of another package may raise any exception
            _STATE["loaded"] = False
            package = plugin.dist.name if plugin.dist else plugin.value
            what = f"the rules of the installed package '{package}' ({plugin.value}) can't be loaded"
            hint = f"repair the package, or uninstall it: pip uninstall {package}"
            raise OnnxgradError(f"{what}: {type(error).__name__}: {error}", hint) from error
