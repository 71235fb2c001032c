"""What a job does not expect is told as the model's fault where others have something against the model."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest
from onnx import ModelProto

from onnxgrad_cli.errors import InternalError, OnnxgradError
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from tests.cli_harness import Shell, save


def model_of(body: str) -> ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4] x) => (float[k, m] y) <int64[2] s = {{5, 7}}> {{ {body} }}""")


@attribute_failures
def stumbles(model: ModelProto) -> None:
    """Raise what a job of ours raises."""
    raise InternalError(f"internal: {model.graph.name}")


@attribute_failures
def divides(model: ModelProto) -> float:
    """Divide by nothing."""
    return 1 / len(model.functions)


def test_a_model_that_no_data_fit_is_at_fault() -> None:
    """No multiple of 4 is 35, but neither onnx nor onnxruntime says so before it runs."""
    model = model_of("y = Reshape(x, s)")
    for job in (stumbles, divides):
        with pytest.raises(OnnxgradError, match=r"random data: .*Reshape") as raised:
            job(model)
        assert not isinstance(raised.value, InternalError)
        assert "`dims`" in str(raised.value.hint) and str(raised.value.hint).endswith(": n")


def test_a_fault_of_a_job_stays_its_own() -> None:
    """So it does where onnxruntime has no kernel for the model."""
    with pytest.raises(InternalError, match="internal: g"):
        stumbles(model_of("d = Cast<to = 11>(x) e = LRN<size = 3>(d) y = Cast<to = 1>(e)"))
    model = model_of("y = Tanh(x)")
    with pytest.raises(InternalError, match="internal: g"):
        stumbles(model)
    with pytest.raises(ZeroDivisionError):
        divides(model)


@pytest.mark.parametrize(
    ("declared", "node"),
    [
        ("float[3, 4] x, float[3, 2147483648] w) => (float[3, 4] y", "LayerNormalization<axis = 0>(x, w)"),
        ("float[2, 2, 3, 4] x, float[2, 2, 5, 2147483648] w) => (float[2, 2, 3, 4] y", "Attention(x, w, x)"),
    ],
)
def test_a_size_that_does_not_fit_and_is_too_large_to_be_run_is_the_fault_of_the_model(
    declared: str, node: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'<ir_version: 10, opset_import: ["": 23]> g ({declared}) {{ y = {node} }}'
    shell = Shell(tmp_path, capsys)
    result = shell("derive", save(text, tmp_path / "model.onnx"), "-o", tmp_path / "derived.onnx")
    assert (result.code, result.facts[0]) == (1, "failed") and "random data" in result.err, result.err
