"""The loss of a language model by chunks of its tokens: the same gradients, and never the logits of all."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from benchmarks.models.few_bits import decoder
from onnxgrad_cli import LoraSpec, LossSpec, Options, RecomputeSpec, UsageError, build
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.proof import prove
from onnxgrad_cli.verification.verdict import PROVED
from tests.facts import raises

WORDS = 96
AUTO = RecomputeSpec("block", "auto")


@cache
def small() -> ModelProto:
    """Two layers of a decoder whose matrices, the head's too, have 4 bits."""
    return decoder(layers=2, width=32, heads=1, groups=1, hidden=32, vocabulary=WORDS)


def float_head(softcap: float = 0.0) -> ModelProto:
    """x (batch, places, 8) -> logits by a float matrix, a bias and a cap, as some models have it."""
    rng = np.random.default_rng(0)
    nodes = [helper.make_node("MatMul", ["x", "v"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["product"])]
    nodes.append(helper.make_node("Add", ["product", "b"], ["sum"]))
    nodes.append(helper.make_node("Tanh", ["sum"], ["y"]) if softcap else helper.make_node("Identity", ["sum"], ["y"]))
    stored = {"v": (8, 8), "w": (8, WORDS), "b": (WORDS,)}
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in stored.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "places", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "places", WORDS])
    graph = helper.make_graph(nodes, "head", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, shape)


def trained(model: ModelProto, **options: object) -> ModelProto:
    """A training model by causal-lm, whose adapters' second factors are off zero."""
    made = build(model, Options(losses=(LossSpec("causal-lm"),), **options)).model  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    for tensor in made.graph.initializer:
        if tensor.name.endswith("lora_B"):
            values = rng.standard_normal(tuple(tensor.dims)).astype(np.float32) / 10
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return made


def results(model: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def check_same(one: ModelProto, other: ModelProto, feeds: dict[str, np.ndarray]) -> None:
    expected, got = results(one, feeds), results(other, feeds)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=2e-5 * np.abs(array).max(), err_msg=name)


def shapes_of_logits(model: ModelProto, feeds: dict[str, np.ndarray]) -> set[int]:
    """How many tokens the values have that are as wide as the vocabulary."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = [name for node in copy.graph.node for name in node.output if name and node.op_type == "LogSoftmax"]
    copy.graph.output.extend(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return {int(np.prod(found.shape[:-1])) for name, found in results(copy, feeds).items() if name in names}


@pytest.mark.parametrize(("recompute", "reduction"), [(None, "sum"), (AUTO, "mean")])
@pytest.mark.thinned(2)
def test_chunks_have_the_gradients_of_the_whole(recompute: RecomputeSpec | None, reduction: str) -> None:
    options = {"lora": LoraSpec(4), "reduction": reduction}
    whole = trained(small(), loss_chunks=1, **options)
    parted = trained(small(), loss_chunks=3, recompute=recompute, **options)
    tokens = ids(2, 7)
    labels = np.where(np.arange(7) == 3, -100, tokens)
    check_same(whole, parted, {"ids": tokens, "label": labels})
    assert shapes_of_logits(parted, {"ids": tokens, "label": labels}) == {5, 4}
    few = {"ids": tokens[:1, :2], "label": tokens[:1, :2]}  # fewer tokens than chunks
    check_same(whole, parted, few)


def test_a_chunk_begins_when_the_gradients_of_the_one_before_are_there() -> None:
    nodes = trained(small(), lora=LoraSpec(4), loss_chunks=3).graph.node
    reads = [i for i, node in enumerate(nodes) if "lm_head.quant.weight" in node.input]
    heads = [i for i in reads if nodes[i].op_type == "MatMulNBits"]
    scattered = [i for i, node in enumerate(nodes) if node.op_type == "ScatterElements"]
    assert heads[0] < scattered[0] < heads[1] < scattered[1] < heads[2] < scattered[2]
    made = {name: node for node in nodes for name in node.output}
    waiting, behind = [*nodes[heads[1]].input], set[str]()
    while waiting:
        name = waiting.pop()
        if name in made and name not in behind:
            behind.add(name)
            waiting += made[name].input
    assert set(nodes[scattered[0]].output) <= behind


@pytest.mark.parametrize("softcap", [0.0, 1.0])
def test_a_float_head_with_bias_and_cap_is_taken_apart_where_it_is_frozen(softcap: float) -> None:
    model, tokens = float_head(softcap), ids(2, 5)
    feeds = {"x": np.random.default_rng(2).standard_normal((2, 5, 8)).astype(np.float32), "label": tokens}
    whole, parted = (trained(model, freeze=("w",), loss_chunks=n) for n in (1, 2))
    assert shapes_of_logits(parted, feeds) == {5}
    check_same(whole, parted, feeds)


@pytest.mark.parametrize(
    "options", [{}, {"freeze": ("w",), "keep_outputs": True}, {"freeze": ("w",), "sample_weight": "weights"}]
)
def test_what_is_wanted_as_a_whole_stays_whole(options: dict[str, object]) -> None:
    """A dense gradient of the head's matrix, which each chunk would have, the logits themselves, weights of samples."""
    from onnxgrad_cli.passes.loss import chunks

    thin, chunks.MAX_THIN_COLUMNS = chunks.MAX_THIN_COLUMNS, 4
    try:
        made = trained(float_head(), loss_chunks=2, **options)
    finally:
        chunks.MAX_THIN_COLUMNS = thin
    assert [node.op_type for node in made.graph.node].count("LogSoftmax") == 1


def test_what_is_done_is_told() -> None:
    causal = (LossSpec("causal-lm"),)

    def told(**options: object) -> str:
        found = build(float_head(), Options(losses=causal, **options)).training.cautions  # type: ignore[arg-type]
        return " ".join(caution.text for caution in found)

    assert " 3 chunks of tokens; 'y'" in told(freeze=("w",), loss_chunks=3)
    assert "`loss_chunks=3`" in told(freeze=("w",), keep_outputs=True, loss_chunks=3)
    assert "chunks" not in told() and "whole" not in told(loss_chunks=1)
    with raises(UsageError, "conflict", "loss_chunks"):
        build(float_head(), Options(loss_chunks=2))


def test_the_proof_compares_the_chunks_with_the_original() -> None:
    made = build(small(), Options(losses=(LossSpec("causal-lm"),), lora=LoraSpec(4), loss_chunks=2)).model
    roles = describe(made)
    assert len(roles.losses[0].chunks) == 2
    proof = prove(made, roles, None, small(), {}, {}, force=True)
    steps = {step.name: step.status for step in proof.steps}
    assert steps["computes what the original computes"] == "passed"
    assert proof.verdict == PROVED
