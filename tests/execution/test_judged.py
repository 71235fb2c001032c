"""What a job does not expect is told as the model's fault where others have something against the model."""

from __future__ import annotations

import onnx.parser
import pytest
from onnx import ModelProto

from onnxgrad_cli.errors import InternalError, OnnxgradError
from onnxgrad_cli.execution.judged import judged


def model_of(body: str) -> ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4] x) => (float[k, m] y) <int64[2] s = {{5, 7}}> {{ {body} }}""")


@judged
def stumbles(model: ModelProto) -> None:
    """Raise what a job of ours raises."""
    raise InternalError(f"internal: {model.graph.name}")


@judged
def divides(model: ModelProto) -> float:
    """Divide by nothing."""
    return 1 / len(model.functions)


def test_a_model_that_no_data_fit_is_at_fault() -> None:
    """No multiple of 4 is 35, but neither onnx nor onnxruntime says so before it runs."""
    model = model_of("y = Reshape(x, s)")
    for job in (stumbles, divides):
        with pytest.raises(OnnxgradError, match=r"runs on no data that are drawn for it: .*Reshape") as raised:
            job(model)
        assert raised.value.hint == "export it again, or fix sizes that it takes for free by mistake with `dims`: n"


def test_a_fault_of_a_job_stays_its_own() -> None:
    """So it does where onnxruntime has no kernel for the model."""
    with pytest.raises(InternalError, match="internal: g"):
        stumbles(model_of("d = Cast<to = 11>(x) e = LRN<size = 3>(d) y = Cast<to = 1>(e)"))
    model = model_of("y = Tanh(x)")
    with pytest.raises(InternalError, match="internal: g"):
        stumbles(model)
    with pytest.raises(ZeroDivisionError):
        divides(model)
