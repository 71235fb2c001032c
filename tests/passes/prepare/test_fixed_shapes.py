"""Sizes that the user fixes, those of an empty past among them."""

import numpy as np
import onnx
import pytest

from onnxgrad_cli.builder import build
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import Options
from tests.cli_harness import Shell
from tests.facts import raises
from tests.passes.test_pipeline import LINEAR, parse

DECODER = """
<ir_version: 8, opset_import: ["": 17]>
decoder (int64[batch, seq] ids, float[batch, total] mask, float[batch, PAST, 3] cache)
    => (float[batch, seq, 5] logits, float[batch, total, 3] present)
<float[5, 3] table = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6},
 float[3, 5] head = {0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, 0.1, -0.2, 0.3, -0.4, 0.5, -0.6},
 int64[1] one = {1}>
{
  keys = Gather(table, ids)
  present = Concat<axis = 1>(cache, keys)
  turned = Transpose<perm = [0, 2, 1]>(present)
  scores = MatMul(keys, turned)
  wide = Unsqueeze(mask, one)
  masked = Mul(scores, wide)
  found = MatMul(masked, present)
  logits = MatMul(found, head)
}
"""


def decoder(past: str = "past_len") -> onnx.ModelProto:
    """The mask is as long as the past and the sequence together, and its axis is called so."""
    model = onnx.parser.parse_model(DECODER.replace("PAST", past))
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.shape.dim[1].dim_param = f"{past} + seq"
    return model


@pytest.fixture
def shell(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    onnx.save(decoder(), "decoder.onnx")
    return Shell(tmp_path, capsys)


def dims(model: onnx.ModelProto) -> dict[str, list[int | str]]:
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    return {
        name: [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in shape]
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(("size", "mask"), [(0, "seq"), (3, "3 + seq")])
def test_what_a_past_has_is_taken_out_of_sums(shell: Shell, size: int, mask: str) -> None:
    """And the proof draws a mask that is as long as past and sequence together."""
    result = shell("build", "decoder.onnx", "--loss", "causal-lm", "--dim", f"past_len={size}", "-o", "t.onnx")
    assert result.code == 0 and "Built and proved" in result.out, result.err
    found = dims(onnx.load("t.onnx"))
    assert found["mask"] == ["batch", mask] and found["cache"] == ["batch", size, 3]
    assert found["label"] == ["batch", "seq"]


def test_data_need_not_have_an_empty_past(shell: Shell) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 5, (12, 6))
    np.savez("text.npz", ids=ids, label=ids, mask=np.ones((12, 6), np.float32))
    command = ("train", "decoder.onnx", "--loss", "causal-lm", "--data", "text.npz", "--epochs", "2")
    result = shell(*command, "--dim", "past_len=0", "-o", "one.onnx")
    assert result.code == 0, result.err
    refused = shell(*command, "--dim", "past_len=2", "-o", "two.onnx")
    assert refused.code == 2 and "cache" in refused.facts
    np.savez("text.npz", **np.load("text.npz"), cache=np.zeros((12, 0, 3), np.float32))
    assert shell(*command, "-o", "three.onnx").code == 0


@pytest.mark.parametrize("past", ["past_len", "s34"])
def test_a_past_is_known_by_its_name_or_its_use(past: str) -> None:
    options = Options(losses=(LossSpec("causal-lm"),), dims={past: 0})
    assert dims(build(decoder(past), options).model)["cache"] == ["batch", 0, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dims": {"batch": 0}}, ("wrong_value", "dims", "0", "ids")),
        ({"dims": {"seq": 0}}, ("wrong_value", "dims", "1", "ids")),
        ({"shapes": {"ids": ("batch", 0)}}, ("wrong_value", "shapes", "1", "ids")),
        ({"dims": {"past_len": -1}}, ("wrong_value", "dims", "past_len", "-1")),
    ],
)
def test_nothing_else_may_be_empty(options: dict, words: tuple[str, ...]) -> None:
    with raises(UsageError, *words):
        build(decoder(), Options(losses=(LossSpec("causal-lm"),), **options))


def test_a_past_whose_length_is_computed_may_be_empty() -> None:
    """A Shape that reads it does not keep it from being empty."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    decoder (float[batch, seq, 3] x, float[batch, s34, 3] cache) => (float[batch, seq, 3] y)
    <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64 one = {1}> {
      h = MatMul(x, w)
      c = Concat<axis = 1>(cache, h)
      sizes = Shape(cache)
      length = Gather(sizes, one)
      shift = Cast<to = 1>(length)
      s = ReduceSum<keepdims = 1>(c)
      t = Add(s, shift)
      y = Add(h, t)
    }"""
    model = build(onnx.parser.parse_model(text), Options(dims={"s34": 0})).model
    assert dims(model)["cache"] == ["batch", 0, 3]


def test_dims_and_shapes() -> None:
    graph = build(parse(LINEAR), Options(dims={"N": 4})).graph
    assert graph.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4
    graph = build(parse(LINEAR), Options(shapes={"x": (5, 3)})).graph
    assert graph.proto.graph.output[0].name == "loss"
    assert graph.proto.graph.input[1].type.tensor_type.shape.dim[0].dim_value == 5
    with raises(UsageError, "unknown_name", "dims", "batch") as refused:
        build(parse(LINEAR), Options(dims={"batch": 4}))
    assert " N" in (refused.value.hint or "")
    with raises(UsageError, "wrong_shape", "shapes", "1", "x", "3", "4"):
        build(parse(LINEAR), Options(shapes={"x": (5, 4)}))
