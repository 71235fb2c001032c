"""The differentiability tags of the standard against what is proven, and the page about them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx.defs import OpSchema

from onnxgrad_cli.autodiff.registry import NEWEST_OPSET
from onnxgrad_cli.verification.coverage import Coverage, OperandCoverage, coverage
from tools.differentiability import document
from tools.tags import VERDICTS, Tag, tags
from tools.verify_op.verification import run_verify_op

DOCUMENT = Path(__file__).parents[2] / "docs" / "differentiability.md"

WRONG = {
    "AffineGrid theta",
    "CausalConvWithState past_state",
    "Clip min",
    "Clip max",
    "DFT input",
    "GRU initial_h",
    "GridSample grid",
    "LSTM initial_h",
    "LSTM initial_c",
    "LinearAttention past_state",
    "Mod B",
    "NegativeLogLikelihoodLoss weight",
    "OneHot values",
    "Pad constant_value",
    "RNN initial_h",
    "STFT signal",
    "STFT window",
    "SoftmaxCrossEntropyLoss weights",
    "Unique X",
}
"""Inputs that the standard tags as non-differentiable, though their derivative is not zero."""


@pytest.fixture(scope="module")
def table() -> list[Coverage]:
    return list(coverage())


@pytest.fixture(scope="module")
def found(table: list[Coverage]) -> list[Tag]:
    return list(tags(table))


def test_the_page_is_up_to_date(found: list[Tag]) -> None:
    assert document(found) == DOCUMENT.read_text(), "run `make docs`"


def test_every_operand_of_the_standard_stands_once(found: list[Tag]) -> None:
    places = [(tag.op_type, tag.side, tag.operand) for tag in found if not tag.domain]
    assert len(set(places)) == len(places)
    names = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    for name in names:
        schema = onnx.defs.get_schema(name, NEWEST_OPSET) if _known(name) else onnx.defs.get_schema(name)
        for side, parameters in (("input", schema.inputs), ("output", schema.outputs)):
            assert {(name, side, parameter.name) for parameter in parameters} <= set(places)


def _known(name: str) -> bool:
    try:
        return bool(onnx.defs.get_schema(name, NEWEST_OPSET))
    except onnx.defs.SchemaError:
        return False


def test_tags_are_those_of_the_standard(found: list[Tag]) -> None:
    categories = OpSchema.DifferentiationCategory
    told = {"differentiable": categories.Differentiable, "non-differentiable": categories.NonDifferentiable}
    for tag in found:
        if not tag.domain and _known(tag.op_type):
            schema = onnx.defs.get_schema(tag.op_type, NEWEST_OPSET)
            parameters = schema.inputs if tag.side == "input" else schema.outputs
            (parameter,) = [p for p in parameters if p.name == tag.operand]
            assert parameter.differentiation_category == told.get(tag.tag, categories.Unknown)


def test_reshape_agrees(found: list[Tag]) -> None:
    rows = [(t.side, t.operand, t.tag, t.found, t.verdict) for t in found if t.op_type == "Reshape"]
    assert rows == [
        ("input", "data", "differentiable", "gradient", "agree"),
        ("input", "shape", "non-differentiable", "no float", "agree"),
        ("output", "reshaped", "differentiable", "gradient", "agree"),
    ]


def test_wrong_tags(found: list[Tag]) -> None:
    wrong = {f"{t.op_type} {t.operand}": t for t in found if t.verdict == "tag wrong" and t.side == "input"}
    assert set(wrong) == WRONG | {"Hardmax input"}
    for name, tag in wrong.items():
        assert tag.should_be == ("differentiable" if name in WRONG else "non-differentiable")
    assert re.fullmatch(r"a gradient in \d+ rows; \d+ published cases right", wrong["DFT input"].evidence)


@pytest.mark.parametrize(
    ("op", "operand", "state"),
    [
        ("Clip", "min", "gradient"),
        ("DFT", "input", "gradient"),
        ("GridSample", "grid", "gradient"),
        ("Mod", "B", "gradient"),
        ("OneHot", "values", "gradient"),
        ("Pad", "constant_value", "gradient"),
        ("STFT", "signal", "gradient"),
        ("Unique", "X", "gradient"),
        ("Hardmax", "input", "zero"),
    ],
)
@pytest.mark.thinned(3)
def test_a_jacobian_shows_that_the_tag_is_wrong(op: str, operand: str, state: str) -> None:
    result = run_verify_op(op)
    assert result.passed and result.states[operand] == state


def test_missing_tags(found: list[Tag]) -> None:
    missing = {(t.op_type, t.side, t.operand): t.should_be for t in found if t.verdict == "tag missing"}
    assert missing["LayerNormalization", "input", "X"] == "differentiable"
    assert missing["RotaryEmbedding", "input", "position_ids"] == "non-differentiable"
    assert missing["RandomNormalLike", "input", "input"] == "non-differentiable"
    assert missing["DFT", "output", "output"] == "differentiable"


def test_evidence_is_given(found: list[Tag]) -> None:
    assert {tag.verdict for tag in found} == set(VERDICTS)
    assert all(tag.evidence for tag in found)
    assert all(not tag.should_be for tag in found if tag.verdict == "unproven")
    assert all(
        "row" in t.evidence or "case" in t.evidence for t in found if t.verdict == "tag wrong" and t.found == "gradient"
    )


def test_verdicts(table: list[Coverage]) -> None:
    (reshape,) = [covered for covered in table if covered.op_type == "Reshape"]

    def verdict(tag: str, state: str) -> str:
        (found, *_) = tags([replace(reshape, operands=(OperandCoverage("data", state, tag),))])
        return found.verdict

    expected = {
        ("differentiable", "gradient"): "agree",
        ("differentiable", "zero"): "tag wrong",
        ("differentiable", "no float"): "tag wrong",
        ("differentiable", "refused"): "unproven",
        ("non-differentiable", "gradient"): "tag wrong",
        ("non-differentiable", "zero"): "agree",
        ("non-differentiable", "no float"): "agree",
        ("non-differentiable", "unproven"): "unproven",
        ("", "gradient"): "tag missing",
        ("", "zero"): "tag missing",
        ("", "refused"): "unproven",
    }
    assert {pair: verdict(*pair) for pair in expected} == expected
