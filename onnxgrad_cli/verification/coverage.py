"""List every operator of ONNX, and whether onnxgrad can differentiate it.

Three sources are joined: the registry of onnxgrad's rules, the differentiability tags in the operator schemas of the
standard, and the results that tests have written into the package. The result shows where they contradict each other.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx.defs import OpSchema

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.ir.domains import full_name
from onnxgrad_cli.ir.node_values import schema_of
from onnxgrad_cli.passes.prepare.quantized_operators import MEANINGS, write_out_quantized

PROOFS = Path(__file__).with_name("proofs.json")
"""File with the results of tests. tests/proofs.py and tests/conformance.py write it; this module only reads it."""

OLDEST_OPSET = 13
"""The oldest opset with rules. A model of an older opset is converted first."""

TAGS = {
    OpSchema.DifferentiationCategory.Differentiable: "differentiable",
    OpSchema.DifferentiationCategory.NonDifferentiable: "non-differentiable",
    OpSchema.DifferentiationCategory.Unknown: "",
}

STRAIGHT_THROUGH = "straight-through"

UNTAKEN = ("refused", STRAIGHT_THROUGH)
"""Kinds of operators that a build refuses by default."""

CARRIERS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")

DISAGREEMENTS = {
    ("Hardmax", "differentiable", "zero"): (
        "tagged differentiable, but it is a step function: its derivative is 0 wherever it exists"
    ),
    ("", "differentiable", "zero"): "tagged differentiable, but its derivative is 0 wherever it exists",
    ("", "differentiable", "no float"): "tagged differentiable, but it is not a float tensor",
    ("", "non-differentiable", "gradient"): "tagged non-differentiable, but it has a derivative",
}
"""(Operator or "" for any, tag, state) -> why the tag contradicts onnxgrad."""


@dataclass(frozen=True)
class OperandCoverage:
    """One input or output of an operator.

    Attributes:
        name: its name in the schema.
        state: 'gradient' (an input has one, or an output passes one on), 'zero', 'refused', 'no float' (it carries no
            derivative), 'as defined' (its gradient follows from the operator's definition), or 'unproven'.
        tag: the standard's 'differentiable' or 'non-differentiable'; "" if the standard has no tag.
        word: an explanation if tag and state differ, or the reason why the operand is refused; otherwise "".
        rows: the number of rows of the test table that test its gradient.
    """

    name: str
    state: str
    tag: str = ""
    word: str = ""
    rows: int = 0

    @property
    def agrees(self) -> bool | None:
        """True if the standard's tag matches the state; None if there is no tag or the state is unproven."""
        if not self.tag or self.state == "unproven":
            return None
        return (self.tag == "differentiable") == (self.state == "gradient")


@dataclass(frozen=True)
class Coverage:
    """One operator and the state of its derivative.

    The values of `kind` are:

    - 'rule': onnxgrad has a rule.
    - 'definition': it is replaced by operators that have rules.
    - 'function': the function body in the standard replaces it.
    - 'converted': it is deprecated and replaced by another operator.
    - 'straight-through': it works on integers, and is refused unless `--quantization ste` replaces it by float
      operators between quantizers.
    - 'zero': its derivative is mathematically zero.
    - 'no float': no derivative can flow through it.
    - 'refused': onnxgrad has no gradient for it.

    Attributes:
        op_type, domain: the operator.
        kind: see above.
        versions: version of the operator's schema -> its kind, or 'converted' if the model is converted to a newer one.
        operands: its inputs.
        outputs: its outputs; empty if there is no schema.
        kink: the value that onnxgrad uses at points where the derivative does not exist.
        needs_opset: the opset to which a model of an older opset is converted.
        source: the module and function that contain the rule or definition.
        page: the operator's page in the standard.
        reason: why it is refused; for a 'straight-through' operator, why it is refused without `--quantization ste`.
        rows: the number of rows of the test table that test its gradients.
        files: the test files that contain these rows, the tests of a definition, or those of a 'straight-through'
            operator.
        cases: result of the published node tests (right, refused, not evaluable or wrong) -> number of tests.
        refusals: reason why node tests are refused -> number of tests.
    """

    op_type: str
    domain: str
    kind: str
    versions: Mapping[int, str]
    operands: tuple[OperandCoverage, ...]
    outputs: tuple[OperandCoverage, ...]
    kink: str
    needs_opset: int | None
    source: str
    page: str
    reason: str
    rows: int
    files: tuple[str, ...]
    cases: Mapping[str, int]
    refusals: Mapping[str, int]


def coverage() -> Iterator[Coverage]:
    """Yield the coverage of every operator of the default domain and every other registered operator, sorted."""
    registered = {(rule.domain, rule.op_type) for rule in registry.all_rules()}
    registered |= {(definition.domain, definition.op_type) for definition in registry.all_definitions()}
    for domain, op_type in sorted(registered | {key for key in _schemas() if not key[0]}):
        yield _coverage(domain, op_type)


def output_names(op_type: str, domain: str, version: int) -> list[str]:
    """Return the names of an operator's outputs in its schema, or [] if onnx has no schema.

    The last name may stand for a variable number of outputs.
    """
    schema = schema_of(op_type, version, domain)
    return [parameter.name for parameter in schema.outputs] if schema is not None else []


def operand_names(op_type: str, domain: str, version: int) -> list[str]:
    """Return the names of an operator's inputs in its schema or, without a schema, in its rule or definition.

    The last name of a schema may stand for a variable number of inputs.
    """
    schema = schema_of(op_type, version, domain)
    if schema is not None:
        return [parameter.name for parameter in schema.inputs]
    rule = registry.lookup(op_type, domain, version)
    definition = registry.lookup_definition(op_type, domain, version)
    function, leading = (rule.function, 3) if rule else (definition.function, 1) if definition else (None, 0)
    given = list(inspect.signature(function).parameters.values())[leading:] if function else []
    return [parameter.name for parameter in given if parameter.kind is not parameter.KEYWORD_ONLY]


@cache
def _schemas() -> dict[tuple[str, str], list[OpSchema]]:
    found: dict[tuple[str, str], list[OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        found.setdefault((schema.domain, schema.name), []).append(schema)
    return {key: sorted(each, key=lambda schema: schema.since_version) for key, each in found.items()}


@cache
def proofs() -> dict[str, dict[str, Any]]:
    """Return the stored test results: 'rows' of the test table and 'published' node tests, each by operator."""
    return json.loads(PROOFS.read_text()) if PROOFS.exists() else {"rows": {}, "published": {}}


def _coverage(domain: str, op_type: str) -> Coverage:
    """Return the coverage of one operator, joined from the registry, the schemas and the stored test results."""
    at, kind, kinds = _kinds(domain, op_type)
    schema = next((s for s in _schemas().get((domain, op_type), []) if s.since_version == at), None)
    rule, definition = registry.lookup(op_type, domain, at), registry.lookup_definition(op_type, domain, at)
    used = (rule or definition) if kind in ("rule", "definition") else None
    name = full_name(op_type, domain)
    rows, published = proofs()["rows"].get(name, {}), proofs()["published"].get(name, {})
    counts = rows.get("proven", {})
    known = {**published.get("operands", {}), **rows.get("operands", {})}  # if both have an operand, the rows count
    known_outputs = {**published.get("outputs", {}), **rows.get("outputs", {})}
    if rule and rule.integers:
        known = {name: "refused: without --quantization ste" for name in operand_names(op_type, domain, at)} | known
    operands = tuple(_operands(schema, op_type, domain, kind, known, counts.get("operands", {})))
    results = schema.outputs if schema is not None else ()
    without = _state_of_result(results, operands)
    return Coverage(
        op_type,
        domain,
        kind,
        kinds,
        operands,
        outputs=tuple(_stated(op_type, results, kind, known_outputs, without, counts.get("outputs", {}))),
        kink=rule.kink if rule else "",
        needs_opset=used.needs_opset if used else None,
        source=used.source if used else write_out_quantized.__module__ if kind == STRAIGHT_THROUGH else "",
        page=f"https://onnx.ai/onnx/operators/onnx__{op_type}.html" if not domain else "",
        reason=(rule.refusal if rule else "no rule for it has been proven") if kind in UNTAKEN else "",
        rows=rows.get("rows", 0),
        files=tuple(rows.get("files", ())),
        cases=published.get("cases", {}),
        refusals=published.get("refusals", {}),
    )


def _kinds(domain: str, op_type: str) -> tuple[int, str, dict[int, str]]:
    """Return an operator's newest schema version that onnxgrad supports, its kind there, and version -> kind."""
    schemas = _schemas().get((domain, op_type), [])
    kinds = {schema.since_version: _kind(domain, op_type, schema.since_version, schema) for schema in schemas}
    if not kinds:
        return 1, _kind(domain, op_type, 1, None), {}
    at = ([version for version in kinds if version <= NEWEST_OPSET] or list(kinds))[-1]
    kind = kinds[at]
    if not domain:
        first = max((version for version in kinds if version <= OLDEST_OPSET), default=0)
        kinds |= {version: "converted" for version in kinds if version < first}
    return at, kind, kinds


def _kind(domain: str, op_type: str, version: int, schema: OpSchema | None) -> str:
    rule = registry.lookup(op_type, domain, version)
    if rule is not None:
        refused = STRAIGHT_THROUGH if full_name(op_type, domain) in MEANINGS else "refused"
        return refused if rule.refusal else "zero" if rule.is_zero else "rule"
    if registry.lookup_definition(op_type, domain, version) is not None:
        return "definition"
    if schema is None:
        return "refused"
    if schema.deprecated:
        return "converted"
    if not any(map(_carries, schema.inputs)) or not any(map(_carries, schema.outputs)):
        return "no float"
    body: Any = schema
    return "function" if body.has_function or body.has_context_dependent_function else "refused"


def _carries(parameter: OpSchema.FormalParameter) -> bool:
    """Return True if a value may hold floats that have a derivative: a tensor, or a sequence or optional of tensors."""
    return any(carrier in kind for kind in parameter.types for carrier in CARRIERS)


def _operands(
    schema: OpSchema | None, op_type: str, domain: str, kind: str, known: Mapping[str, str], rows: Mapping[str, int]
) -> Iterator[OperandCoverage]:
    """Yield the coverage of each input.

    Without a schema, the inputs are those that the definition or the stored test results name.
    """
    if schema is not None:
        without = "as defined" if kind == "definition" and domain else "unproven"
        yield from _stated(op_type, schema.inputs, kind, known, without, rows)
        return
    for name in operand_names(op_type, domain, 1) if kind == "definition" else known:
        yield _operand(op_type, name, "", known.get(name, "as defined"), rows)


def _stated(
    op_type: str, parameters: Sequence[OpSchema.FormalParameter], kind: str, known: Mapping[str, str], without: str,
    rows: Mapping[str, int],
) -> Iterator[OperandCoverage]:  # fmt: skip
    """Yield the coverage of parameters of a schema. Those without a test result have the state `without`."""
    for parameter in parameters:
        said = _certain(parameter, kind) or known.get(parameter.name) or without
        yield _operand(op_type, parameter.name, TAGS[parameter.differentiation_category], said, rows)


def _state_of_result(outputs: Sequence[OpSchema.FormalParameter], operands: Sequence[OperandCoverage]) -> str:
    """Return the state (see `OperandCoverage`) of outputs without a test result.

    It follows from the states of the inputs if only one output can have a derivative.
    """
    states = {operand.state for operand in operands}
    if sum(map(_carries, outputs)) != 1:
        return "unproven"
    likely = next((state for state in ("gradient", "as defined") if state in states), "")
    return likely or ("zero" if states <= {"zero", "no float"} else "unproven")


def _certain(parameter: OpSchema.FormalParameter, kind: str) -> str:
    """Return an operand's state (see `OperandCoverage`) if its type or the operator's kind determines it, else ""."""
    if not _carries(parameter):
        return "no float"
    return {"zero": "zero", "no float": "zero", **dict.fromkeys(UNTAKEN, "refused")}.get(kind, "")


def _operand(op_type: str, name: str, tag: str, said: str, rows: Mapping[str, int]) -> OperandCoverage:
    state, _, reason = said.partition(": ")
    reason = reason or DISAGREEMENTS.get((op_type, tag, state)) or DISAGREEMENTS.get(("", tag, state), "")
    return OperandCoverage(name, state, tag, reason, rows.get(name, 0))
