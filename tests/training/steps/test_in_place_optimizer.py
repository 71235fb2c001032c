"""Updates of weights in place by numpy: their terms, and the memory between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper

from onnxgrad_cli.passes.optimizer.slices import Update
from onnxgrad_cli.training.steps.compiled import OPERANDS, CompiledUpdate, is_covered
from onnxgrad_cli.training.steps.in_place_optimizer import InPlace, Scratch
from tests.passes.optimizer.test_slices import TAKEN, operands


@pytest.mark.parametrize(("op_type", "kinds"), [*[(op_type, "") for op_type in sorted(OPERANDS)], ("Equal", "bb")])
def test_terms_are_the_functions(op_type: str, kinds: str) -> None:
    """To the bit, also of what is not finite and of zeros with a sign, but for which of two zeros is the larger."""
    pytest.importorskip("llvmlite")
    count = OPERANDS[op_type]
    _, arrays = operands(kinds or TAKEN.get(op_type, "f" * count)[:count])
    given = dict(zip("abc", arrays, strict=False))
    kind = np.dtype(bool if op_type in TRUTHS else np.float32)
    nodes = (helper.make_node(op_type, list(given), ["t"]), helper.make_node("Where", ["t", "one", "zero"], ["new"]))
    nodes = nodes if op_type in TRUTHS else (helper.make_node(op_type, list(given), ["new"]),)
    constants = {"one": np.float32(1).reshape(1), "zero": np.float32(0).reshape(1)} if op_type in TRUTHS else {}
    dtypes = {name: array.dtype for name, array in given.items()} | {"t": kind, "new": np.dtype("f")}
    update = Update("w", nodes, dtypes, tuple(given), (), constants, {"new": "w"})
    assert is_covered(update)
    found, wanted = ({**given, "w": np.empty(64, "f")} for _ in range(2))
    CompiledUpdate(update).run({name: array.ctypes.data for name, array in found.items()}, 0, 64, Scratch(64))
    with np.errstate(all="ignore"):
        InPlace(update).run(wanted, 0, 64, Scratch(64))
    np.testing.assert_array_equal(found["w"].view(np.int32) << 1, wanted["w"].view(np.int32) << 1)
    signs = np.signbit(found["w"]) == np.signbit(wanted["w"])
    assert op_type in ("Clip", "Max", "Min") or np.all(signs | np.isnan(wanted["w"]))


def test_memory_between_is_taken_again_once_nobody_reads_it() -> None:
    """A chain needs one slice; two results that are read together need two."""
    g = np.linspace(1, 2, 8, dtype=np.float32)
    chain = [helper.make_node("Neg", [a], [b]) for a, b in itertools.pairwise(["g", "t0", "t1", "t2"])]
    for last, count, expected in ((("Neg", ["t2"]), 1, g), (("Mul", ["t2", "t1"]), 2, -g * g)):
        nodes = (*chain, helper.make_node(*last, ["new"]))
        dtypes = {name: g.dtype for name in ("g", "t0", "t1", "t2", "new")}
        update, scratch, w = Update("w", nodes, dtypes, ("g",), (), {}, {"new": "w"}), Scratch(8), np.empty(8, "f")
        InPlace(update).run({"g": g, "w": w}, 0, 8, scratch)
        assert len(scratch) == count
        np.testing.assert_array_equal(w, expected)


TRUTHS = frozenset("And Equal Greater GreaterOrEqual Less LessOrEqual Not Or".split())


@pytest.mark.parametrize(("bounds", "expected"), [(["low"], [0, 0, 2]), (["", "high"], [-1, 0, 1])])
def test_clip_has_one_or_two_bounds(bounds: list[str], expected: list[float]) -> None:
    g, w = np.float32([-1, 0, 2]), np.empty(3, "f")
    node = helper.make_node("Clip", ["g", *bounds], ["new"])
    constants = {"low": np.float32(0).reshape(1), "high": np.float32(1).reshape(1)}
    dtypes = {"g": g.dtype, "new": g.dtype}
    update = Update("w", (node,), dtypes, ("g",), (), constants, {"new": "w"})
    InPlace(update).run({"g": g, "w": w}, 0, 3, Scratch(3))
    assert w.tolist() == expected
