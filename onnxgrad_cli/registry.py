"""The table of gradient rules: which function differentiates which operator, at which opsets.

A rule is found by (domain, operator, version of the operator's schema). What is in no table is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import onnx

from onnxgrad_cli.errors import OnnxgradError

NEWEST_OPSET = 26
"""The newest opset the rules were proven at; an operator that changed later is refused until its rule is."""


@dataclass(frozen=True)
class Rule:
    """How one operator is differentiated.

    Attributes:
        op_type, domain: the operator.
        versions: the first and last schema version the rule is proven for.
        function: the rule itself; None where every derivative is zero by mathematics.
        kink: the convention followed where the derivative does not exist.
        needs_opset: the lowest opset of the default domain that has what the rule emits.
    """

    op_type: str
    domain: str
    versions: tuple[int, int]
    function: Callable[..., Any] | None
    kink: str = ""
    needs_opset: int = 13

    @property
    def is_zero(self) -> bool:
        """Whether the derivative is zero by mathematics."""
        return self.function is None

    @property
    def source(self) -> str:
        """Where the rule stands: module and function."""
        if self.function is None:
            return "zero by mathematics"
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def signature(self) -> Signature:
        """What the function asks for."""
        assert self.function is not None
        return Signature.of(self.function)


@dataclass(frozen=True)
class Signature:
    """What a rule's parameters ask for, read from their names once.

    `g`, `y` are the cotangent and value of output 0; `gs`, `ys` ask for tuples of all outputs. Inputs follow by
    position (`*xs` for a variadic operator); keyword-only parameters are the attributes the rule handles.
    """

    all_cotangents: bool
    all_outputs: bool
    inputs: int
    variadic: bool
    attributes: frozenset[str]
    any_attribute: bool

    @staticmethod
    def of(function: Callable[..., Any]) -> Signature:
        """Read the signature of a rule, `rule(op, g|gs, y|ys, x0, x1, ..., *, attribute, ...)`."""
        if function not in _SIGNATURES:
            parameters = list(inspect.signature(function).parameters.values())
            positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            if len(positional) < 3 or positional[1].name not in ("g", "gs") or positional[2].name not in ("y", "ys"):
                raise OnnxgradError(
                    f"the rule {function.__qualname__} does not start with (op, g, y, ...)",
                    "a rule takes op, the cotangent g (or gs, all of them), the output y (or ys), then the inputs",
                )
            _SIGNATURES[function] = Signature(
                all_cotangents=positional[1].name == "gs",
                all_outputs=positional[2].name == "ys",
                inputs=len(positional) - 3,
                variadic=any(p.kind is p.VAR_POSITIONAL for p in parameters),
                attributes=frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
                any_attribute=any(p.kind is p.VAR_KEYWORD for p in parameters),
            )
        return _SIGNATURES[function]


_SIGNATURES: dict[Callable[..., Any], Signature] = {}
_RULES: dict[tuple[str, str], list[Rule]] = {}
_FOUND: dict[tuple[str, str, int], Rule | None] = {}
"""What `lookup` has found; forgotten whenever the table changes."""


def rule(
    op_type: str,
    *,
    domain: str = "",
    versions: tuple[int, int | None] = (1, None),
    kink: str = "",
    needs_opset: int = 13,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of an operator (several names: separated by spaces).

    Args:
        op_type: the operator, or several that share one rule.
        domain: the operator's domain; "" is ai.onnx.
        versions: first and last schema version the rule is right for; None is the newest it was proven at.
        kink: the convention where the derivative does not exist; shown to users.
        needs_opset: the lowest opset of the default domain that has what the rule emits.
        override: replace an existing rule instead of refusing.

    Raises:
        OnnxgradError: a rule for one of these versions exists already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        Signature.of(function)
        for name in op_type.split():
            last = versions[1] or NEWEST_OPSET
            _add(Rule(name, domain, (versions[0], last), function, kink, needs_opset), override)
        return function

    return register


def no_gradient(op_types: str, *, domain: str = "") -> None:
    """Declare operators whose derivative is zero by mathematics: shapes, indices, comparisons, steps."""
    for name in op_types.split():
        _add(Rule(name, domain, (1, NEWEST_OPSET), None), override=False)


def _add(new: Rule, override: bool) -> None:
    rules = _RULES.setdefault((new.domain, new.op_type), [])
    for old in list(rules):
        if old.versions[0] <= new.versions[1] and new.versions[0] <= old.versions[1]:
            if not override:
                raise OnnxgradError(
                    f"two rules for {new.domain or 'ai.onnx'}::{new.op_type}: {old.source} and {new.source}",
                    "pass override=True to replace the first",
                )
            rules.remove(old)
    rules.append(new)
    _FOUND.clear()


def lookup(op_type: str, domain: str, opset: int) -> Rule | None:
    """The rule for an operator in a model that imports `domain` at version `opset`; None if there is none."""
    _load()
    domain = "" if domain == "ai.onnx" else domain
    key = (op_type, domain, opset)
    if key not in _FOUND:
        _FOUND[key] = _find(*key)
    return _FOUND[key]


def _find(op_type: str, domain: str, opset: int) -> Rule | None:
    try:
        version = onnx.defs.get_schema(op_type, opset, domain).since_version
    except onnx.defs.SchemaError:
        version = opset
    return next((r for r in _RULES.get((domain, op_type), ()) if r.versions[0] <= version <= r.versions[1]), None)


def all_rules() -> Iterator[Rule]:
    """Every rule, by domain and operator."""
    _load()
    for key in sorted(_RULES):
        yield from sorted(_RULES[key], key=lambda r: r.versions)


@contextmanager
def scoped() -> Iterator[None]:
    """Rules registered inside the block are forgotten after it."""
    _load()
    saved = {key: list(rules) for key, rules in _RULES.items()}
    try:
        yield
    finally:
        _RULES.clear()
        _RULES.update(saved)
        _FOUND.clear()


@cache
def _load() -> None:
    """Register the built-in rules, then those of installed packages (entry-point group `onnxgrad.rules`)."""
    import onnxgrad_cli.rules  # noqa: F401

    for plugin in entry_points(group="onnxgrad.rules"):
        plugin.load()
