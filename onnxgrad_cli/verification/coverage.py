"""What is covered: every operator once, and what is known of its derivative.

Joined from three sources that can contradict each other, which is the point: the registry (what we do), the schemas
of the standard (what is tagged differentiable), and the proofs that the tests have left in the package.
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
from onnxgrad_cli.passes.prepare.quantized_operators import MEANINGS, write_out_quantized

PROOFS = Path(__file__).with_name("proofs.json")
"""What the tests have found: written by tests/proofs.py and tests/conformance.py, read only here."""

OLDEST_OPSET = 13
"""Below it an operator has no rule of its own: the model is converted first."""

TAGS = {
    OpSchema.DifferentiationCategory.Differentiable: "differentiable",
    OpSchema.DifferentiationCategory.NonDifferentiable: "non-differentiable",
    OpSchema.DifferentiationCategory.Unknown: "",
}

STRAIGHT_THROUGH = "straight-through"

UNTAKEN = ("refused", STRAIGHT_THROUGH)
"""Kinds of operators that are refused as a build is by default."""

CARRIERS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")

WORDS = {
    "Hardmax": "tagged differentiable, but it is a step: its derivative is 0 wherever it has one",
}
"""Operators whose tag differs from what we do in a way that wants more than the general word."""


@dataclass(frozen=True)
class Operand:
    """One input or output of an operator.

    Attributes:
        name: its name in the schema.
        state: 'gradient' (to it, or through it), 'zero', 'refused', 'no float' (it carries no derivative), 'as defined'
            (it has the gradient that follows from its definition), or 'unproven'.
        tag: the standard's 'differentiable' or 'non-differentiable'; "" where it says nothing.
        word: where tag and state differ, how; or why the operand is refused.
        rows: how many rows of the table of tests have proven a gradient of it.
    """

    name: str
    state: str
    tag: str = ""
    word: str = ""
    rows: int = 0

    @property
    def agrees(self) -> bool | None:
        """Whether the standard's tag says what we do; None where it says nothing, or we don't know."""
        if not self.tag or self.state == "unproven":
            return None
        return (self.tag == "differentiable") == (self.state == "gradient")


@dataclass(frozen=True)
class Coverage:
    """One operator, and what is known of its derivative.

    Attributes:
        op_type, domain: the operator.
        kind: 'rule', 'definition' (replaced by operators that have rules), 'function' (the standard's own body is
            taken), 'converted' (deprecated: written as another one), 'straight-through' (on integers: with
            `--quantization ste` written as float operators between quantizers), 'zero' (by mathematics), 'no float' (no
            derivative can flow through it), or 'refused'.
        versions: version of the operator's schema -> its kind, or 'converted' where the model is raised to another.
        operands: its inputs.
        outputs: its outputs, as far as there is a schema.
        kink: the convention where the derivative does not exist.
        needs_opset: the opset that a model is raised to, if it is below.
        source: module and function of the rule or definition.
        page: the operator's page in the standard.
        reason: why it is refused; of a 'straight-through' one, without `--quantization ste`.
        rows: how many rows of the table of tests prove it.
        files: where they stand; and the tests of a definition, and of what is 'straight-through'.
        cases: what became of the published node tests: right, refused, not evaluable, wrong.
        refusals: why forms of them are refused, and how many.
    """

    op_type: str
    domain: str
    kind: str
    versions: Mapping[int, str]
    operands: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
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
    """Every operator of the default domain, and every other one that is registered, each once, in order."""
    registered = {(rule.domain, rule.op_type) for rule in registry.all_rules()}
    registered |= {(definition.domain, definition.op_type) for definition in registry.all_definitions()}
    for domain, op_type in sorted(registered | {key for key in _schemas() if not key[0]}):
        yield _coverage(domain, op_type)


def output_names(op_type: str, domain: str, version: int) -> list[str]:
    """What the schema calls the outputs; a last one may stand for any number; none where onnx has no schema."""
    try:
        return [parameter.name for parameter in onnx.defs.get_schema(op_type, version, domain).outputs]
    except onnx.defs.SchemaError:
        return []


def operand_names(op_type: str, domain: str, version: int) -> list[str]:
    """What the schema calls the inputs, or where onnx has none the rule; a last one may stand for any number."""
    try:
        return [parameter.name for parameter in onnx.defs.get_schema(op_type, version, domain).inputs]
    except onnx.defs.SchemaError:
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
    """The file of proofs: what came of the table of rows and of the published node tests, by operator."""
    return json.loads(PROOFS.read_text()) if PROOFS.exists() else {"rows": {}, "published": {}}


def _coverage(domain: str, op_type: str) -> Coverage:
    """What is known of one operator: the registry, the schemas and the proofs joined."""
    at, kind, kinds = _kinds(domain, op_type)
    schema = next((s for s in _schemas().get((domain, op_type), []) if s.since_version == at), None)
    rule, definition = registry.lookup(op_type, domain, at), registry.lookup_definition(op_type, domain, at)
    used = (rule or definition) if kind in ("rule", "definition") else None
    proven = _proven(domain, op_type)
    known = proven.operands
    if rule and rule.integers:
        known = {name: "refused: without --quantization ste" for name in operand_names(op_type, domain, at)} | known
    operands = tuple(_operands(schema, op_type, domain, kind, known, proven.operand_rows))
    return Coverage(
        op_type,
        domain,
        kind,
        kinds,
        operands,
        outputs=tuple(_outputs(schema, op_type, kind, operands, proven.outputs, proven.output_rows)),
        kink=rule.kink if rule else "",
        needs_opset=used.needs_opset if used else None,
        source=used.source if used else write_out_quantized.__module__ if kind == STRAIGHT_THROUGH else "",
        page=f"https://onnx.ai/onnx/operators/onnx__{op_type}.html" if not domain else "",
        reason=(rule.refusal if rule else "no rule of it has been proven") if kind in UNTAKEN else "",
        rows=proven.rows,
        files=proven.files,
        cases=proven.cases,
        refusals=proven.refusals,
    )


@dataclass(frozen=True)
class _Proven:
    """What the file of proofs says of one operator.

    Attributes:
        operands, outputs: name -> state, as the table of rows and the published node tests have found it.
        operand_rows, output_rows: name -> how many rows of the table have proven a gradient.
        rows, files, cases, refusals: see `Coverage`.
    """

    operands: dict[str, str]
    outputs: dict[str, str]
    operand_rows: Mapping[str, int]
    output_rows: Mapping[str, int]
    rows: int
    files: tuple[str, ...]
    cases: Mapping[str, int]
    refusals: Mapping[str, int]


def _proven(domain: str, op_type: str) -> _Proven:
    """The proofs of an operator; where both sources speak of an operand, the table of rows counts."""
    name = full_name(op_type, domain)
    rows, published = proofs()["rows"].get(name, {}), proofs()["published"].get(name, {})
    counts = rows.get("proven", {})
    return _Proven(
        operands={**published.get("operands", {}), **rows.get("operands", {})},
        outputs={**published.get("outputs", {}), **rows.get("outputs", {})},
        operand_rows=counts.get("operands", {}),
        output_rows=counts.get("outputs", {}),
        rows=rows.get("rows", 0),
        files=tuple(rows.get("files", ())),
        cases=published.get("cases", {}),
        refusals=published.get("refusals", {}),
    )


def _kinds(domain: str, op_type: str) -> tuple[int, str, dict[int, str]]:
    """The newest usable version of an operator, its kind there, and its kind at every version."""
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
    """Whether a value here may hold what carries a derivative, alone or in a sequence or an optional."""
    return any(carrier in kind for kind in parameter.types for carrier in CARRIERS)


def _operands(
    schema: OpSchema | None,
    op_type: str,
    domain: str,
    kind: str,
    known: Mapping[str, str],
    rows: Mapping[str, int],
) -> Iterator[Operand]:
    """What is known of each input; where there is no schema, of those that the definition or the proofs name."""
    if schema is None:
        names = operand_names(op_type, domain, 1) if kind == "definition" else known
        for name in names:
            yield _operand(op_type, name, "", known.get(name, "as defined"), rows)
        return
    without = "as defined" if kind == "definition" and domain else "unproven"
    for parameter in schema.inputs:
        said = _certain(parameter, kind) or known.get(parameter.name) or without
        yield _operand(op_type, parameter.name, TAGS[parameter.differentiation_category], said, rows)


def _outputs(
    schema: OpSchema | None,
    op_type: str,
    kind: str,
    operands: Sequence[Operand],
    known: Mapping[str, str],
    rows: Mapping[str, int],
) -> Iterator[Operand]:
    """What is known of each output: of the only one that carries a derivative, it follows from the inputs."""
    parameters = schema.outputs if schema is not None else ()
    states = {operand.state for operand in operands}
    likely = [state for state in ("gradient", "as defined") if state in states]
    alone = likely[0] if likely else "zero" if states <= {"zero", "no float"} else "unproven"
    one = sum(map(_carries, parameters)) == 1
    for parameter in parameters:
        said = _certain(parameter, kind) or known.get(parameter.name) or (alone if one else "unproven")
        yield _operand(op_type, parameter.name, TAGS[parameter.differentiation_category], said, rows)


def _certain(parameter: OpSchema.FormalParameter, kind: str) -> str:
    """What is known of an operand without a proof of its own; "" where that is nothing."""
    if not _carries(parameter):
        return "no float"
    return {"zero": "zero", "no float": "zero", **dict.fromkeys(UNTAKEN, "refused")}.get(kind, "")


def _operand(op_type: str, name: str, tag: str, said: str, rows: Mapping[str, int]) -> Operand:
    state, _, reason = said.partition(": ")
    if not reason and tag == "differentiable" and state == "zero":
        reason = WORDS.get(op_type, "tagged differentiable, but its derivative is 0 wherever it has one")
    if not reason and tag == "differentiable" and state == "no float":
        reason = "tagged differentiable, but it is no float"
    if not reason and tag == "non-differentiable" and state == "gradient":
        reason = "tagged non-differentiable, but it has a derivative"
    return Operand(name, state, tag, reason, rows.get(name, 0))
