"""The opsets and types for which onnxruntime has kernels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import onnx
import pytest

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.execution.kernels import ASSURED, newest_loaded
from onnxgrad_cli.passes.prepare import opset as opsets
from tests.autodiff.rows import ROWS
from tests.harness import forward_model
from tests.passes.prepare.test_opset import opens, settled

NEWEST = onnx.defs.onnx_opset_version()


LOADED = newest_loaded(NEWEST)


CHANGED = {
    schema.name
    for schema in onnx.defs.get_all_schemas_with_history()
    if not schema.domain and ASSURED < schema.since_version <= registry.NEWEST_OPSET
}


def test_what_onnxruntime_says_of_an_opset_is_so():
    for opset in range(ASSURED, NEWEST + 1):
        graph, _ = settled("g (float[2] x) => (float[2] y) { y = Neg(x) }", opset)
        assert graph.opset() == min(opset, LOADED) and opens(graph)
    assert newest_loaded(13) == 13
    assert newest_loaded(NEWEST) == LOADED


@pytest.mark.slow
def test_up_to_the_opset_that_every_onnxruntime_loads_nothing_is_asked():
    code = (
        "import sys, onnx; from onnxgrad_cli.builder import build; "
        'build(onnx.parser.parse_model(\'<ir_version: 8, opset_import: ["": %d]> g (float[2] x) => (float[2] y) '
        "<float[2] w = {1, 2}> { y = Mul(x, w) }')); print('onnxruntime' in sys.modules)"
    )
    for opset, asked in ((ASSURED, "False"), (ASSURED + 1, "True")):
        found = subprocess.run([sys.executable, "-c", code % opset], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == asked


LATE = "a = QuantizeLinear(x, s, z) y = DequantizeLinear(a, s, z)"


@pytest.mark.parametrize(
    ("nodes", "opset"),
    [
        (LATE, 27),
        (f"{LATE} k = Constant<value = float {{2.5}}>() r = Mod(y, k)", 27),
        (f"{LATE} d = Cast<to = 11>(y) r = Celu(d)", 28),
    ],
    ids=["quantized", "with what is written out", "with what opset 28 alone takes"],
)
def test_operators_that_have_older_kernels_only(nodes, opset, monkeypatch):
    """onnxruntime 1.32 loads opset 28, without kernels for these: they run at the opset before."""
    monkeypatch.setattr(opsets, "newest_loaded", lambda limit: limit)
    graph, training = settled(f"g (float[2, 4] x, float s, int8 z) => (float[2, 4] y) {{ {nodes} }}", 28)
    assert graph.opset() == opset
    cautions = [(caution.kind, caution.text.rpartition(" for ")[2]) for caution in training.cautions]
    assert cautions == [("opset change", "DequantizeLinear, QuantizeLinear")] * (opset < 28)
    if opset <= LOADED:
        assert opens(graph) == (opset == 27)


@pytest.mark.skipif(LOADED == ASSURED, reason="this onnxruntime loads no newer opset")
def test_what_does_not_lag_has_kernels_in_its_newest_form():
    """Where onnxruntime runs a row of the table at opset 26, it runs it at the newest that it loads."""
    rows = [row for row in ROWS if row.op in CHANGED - opsets.LAGGING and 18 <= row.opset <= ASSURED]
    assert {row.op for row in rows} >= CHANGED & {"Cast", "Celu", "DepthToSpace", "Einsum", "Mod", "OneHot", "Range"}
    for row in rows:
        before, now = (Executor(forward_model(replace(row, opset=n), False)).name for n in (ASSURED, LOADED))
        assert now == before, row


def test_the_lists_are_reviewed():
    """What changed since is on a list, has a definition, or is refused; what lags has kernels for its older form."""
    assert opsets.WIDENED <= CHANGED and opsets.LAGGING <= opsets.WIDENED
    others = {name for name in CHANGED - opsets.WIDENED if registry.lookup_definition(name, "", NEWEST) is None}
    assert not others
