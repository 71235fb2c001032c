"""Low-rank adapters beside PyTorch: what they compute, their gradients, what they cost, and where they may stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from torch.nn import functional

from onnxgrad_cli.adapters.merge import merge, merged
from onnxgrad_cli.adapters.own_file import adapter_bytes, load_adapter
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import Adapter, describe
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.passes.adapters import parse_lora
from onnxgrad_cli.passes.parameters.select import FROZEN
from onnxgrad_cli.verification.proof import prove
from tests.cli_harness import WEIGHT, Shell, save_external
from tests.facts import raises

ROOT = Path(__file__).parents[2]
TRANSFORMER = ROOT / "sample_models" / "tiny_transformer.onnx"
BERT = ROOT.parent / "shared" / "zoo" / "bert"
ort.set_default_logger_severity(3)
Tensor = torch.Tensor
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """A model that reads the matrix `w`: its nodes, the shapes of `x`, `w` and others, and what it is in torch."""

    nodes: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    torch: Callable[..., Tensor]
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "double"
    a: tuple[int, ...] = ()


FORMS = {
    "matmul": Form("y = MatMul(x, w)", (2, 3, 6), (6, 5), lambda x, w: x @ w, a=(6, 2)),
    "matmul of a vector": Form("y = MatMul(x, w)", (6,), (6, 5), lambda x, w: x @ w, a=(6, 2)),
    "on the left": Form("y = MatMul(w, x)", (2, 6, 3), (5, 6), lambda x, w: w @ x, a=(2, 6)),
    "gemm": Form("y = Gemm(x, w)", (4, 6), (6, 5), lambda x, w: x @ w, a=(6, 2)),
    "gemm with all": Form(
        "y = Gemm<alpha = 0.5, beta = 2.0, transA = 1, transB = 1>(x, w, c)", (6, 4), (5, 6),
        lambda x, w, c: 0.5 * x.T @ w.T + 2 * c, {"c": (5,)}, a=(2, 6)
    ),
    "gemm on the left": Form(
        "y = Gemm<alpha = 0.5, transB = 1>(w, x)", (4, 6), (5, 6), lambda x, w: 0.5 * w @ x.T, a=(2, 6)
    ),
    "gemm turned on the left": Form("y = Gemm<transA = 1>(w, x)", (6, 4), (6, 5), lambda x, w: w.T @ x, a=(6, 2)),
    "transposed": Form(
        "t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)", (2, 3, 6), (5, 6), lambda x, w: x @ w.T, a=(2, 6)
    ),
    "transposed twice": Form(
        "t = Transpose(w) i = Identity(t) y = Gemm<transB = 1>(x, i)", (4, 6), (6, 5), lambda x, w: x @ w, a=(6, 2)
    ),
    "tied": Form(
        "h = MatMul(x, w) s = Tanh(h) t = Transpose(w) u = MatMul(s, t) y = Gemm<transB = 1>(s, w)", (4, 6), (6, 6),
        lambda x, w: torch.tanh(x @ w) @ w.T, a=(6, 2)
    ),
    "tied, of two sides": Form(
        "h = MatMul(x, w) s = Tanh(h) t = Transpose(w) y = MatMul(s, t)", (4, 6), (6, 5),
        lambda x, w: torch.tanh(x @ w) @ w.T, a=(6, 2)
    ),
    "conv": Form(
        "y = Conv<strides = [2, 1], pads = [1, 0, 0, 1], kernel_shape = [1, 1]>(x, w, c)", (2, 6, 5, 4), (5, 6, 1, 1),
        lambda x, w, c: functional.conv2d(functional.pad(x, (0, 1, 1, 0)), w, c, stride=(2, 1)), {"c": (5,)}, "float",
        (2, 6, 1, 1),
    ),
    "conv of one axis": Form(
        "y = Conv(x, w)", (2, 6, 7), (5, 6, 1), lambda x, w: functional.conv1d(x, w), {}, "float", (2, 6, 1)
    ),
}  # fmt: skip


def model_of(form: Form) -> tuple[ModelProto, Arrays]:
    """The model of a form and the values of x and its weights; every axis of x but the contracted one is symbolic."""
    rng = np.random.default_rng(5)
    kind = np.float64 if form.dtype == "double" else np.float32
    shapes = {"x": form.x, "w": form.w, **form.others}
    values = {name: np.asarray(rng.standard_normal(shape), kind) for name, shape in shapes.items()}
    head = f'<ir_version: 10, opset_import: ["" : 18]> g ({form.dtype}[{",".join(map(str, form.x))}] x)'
    model = parser.parse_model(f"{head} => ({form.dtype} y) {{ {form.nodes} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        if form.x[axis] != 6 and len(form.x) > 1:
            dim.dim_param = f"s{axis}"
    weights = [name for name in shapes if name != "x"]
    model.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in weights)
    return model, values


def copied(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def run(model: ModelProto, feeds: Arrays, names: list[str] | None = None) -> Arrays:
    session = ort.InferenceSession(model.SerializeToString())
    names = names or [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def factors(built: TrainingModel, seed: int = 1) -> Arrays:
    """Random values for all factors."""
    rng = np.random.default_rng(seed)
    stored = {name: built.graph.initializers[name] for each in built.training.adapters for name in (each.a, each.b)}
    return {
        name: np.asarray(rng.standard_normal(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
        for name, tensor in stored.items()
    }


def stored(model: ModelProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


LORA = Options(lora=LoraSpec(2, 3.0), lora_target=("w",), keep_outputs=True)


@pytest.mark.parametrize("name", FORMS)
def test_a_form(name: str) -> None:
    """At first the model is what it was; loss and gradients are PyTorch's; merged it computes what it did."""
    form = FORMS[name]
    model, values = model_of(form)
    built = build(copied(model), LORA)
    (adapter,) = built.training.adapters
    assert adapter == Adapter("w", "w_lora_A", "w_lora_B", 2, 3.0)
    assert built.training.trained == ["w_lora_A", "w_lora_B"]
    assert tuple(stored(built.model)["w_lora_A"].shape) == form.a
    label = np.ones_like(run(model, {"x": values["x"]})["y"])
    feeds = {"x": values["x"], "label": label}
    assert np.array_equal(run(built.model, feeds)["y"], run(model, {"x": values["x"]})["y"])

    given = factors(built)
    found = run(built.model, {**feeds, **given})
    torched = {key: torch.tensor(value, dtype=torch.float64) for key, value in {**values, **given}.items()}
    a, b = torched["w_lora_A"].requires_grad_(), torched["w_lora_B"].requires_grad_()
    left, right = (a, b) if a.shape[0] == form.w[0] else (b, a)
    whole = torched["w"] + 1.5 * (left.flatten(1) @ right.flatten(1)).reshape(form.w)
    y = form.torch(torched["x"], whole, *(torched[key] for key in form.others))
    loss = functional.mse_loss(y, torch.tensor(label, dtype=torch.float64))
    loss.backward()
    bound = 1e-12 if form.dtype == "double" else 2e-5
    for key, expected in (("y", y), ("loss", loss), ("w_lora_A_grad", a.grad), ("w_lora_B_grad", b.grad)):
        expected = expected.detach().numpy()
        np.testing.assert_allclose(found[key], expected, rtol=bound, atol=bound * np.abs(expected).max(), err_msg=key)

    after = run(merge(model, [adapter], given), {"x": values["x"]})["y"]
    np.testing.assert_allclose(after, found["y"], rtol=bound, atol=bound * np.abs(found["y"]).max())


class Lora(torch.nn.Module):
    """A linear layer as the paper has it, written without the tool: W x + b + alpha / rank B A x."""

    def __init__(self, linear: torch.nn.Linear, a: np.ndarray, b: np.ndarray, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.a, self.b = (torch.nn.Parameter(torch.tensor(value)) for value in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * functional.linear(functional.linear(x, self.a), self.b)


def network() -> tuple[torch.nn.Sequential, ModelProto]:
    """A network of two layers and its model, in float64."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)).double()
    text = """
    <ir_version: 10, opset_import: ["" : 17]> net (double[batch, 6] x) => (double[batch, 5] y) {
        h = Gemm<transB = 1>(x, first.weight, first.bias) t = Tanh(h)
        y = Gemm<transB = 1>(t, last.weight, last.bias) }
    """
    model = parser.parse_model(text.replace("first.", "first_").replace("last.", "last_"))
    for node in model.graph.node:
        node.input[:] = [name.replace("first_", "first.").replace("last_", "last.") for name in node.input]
    for layer, part in (("first", net[0]), ("last", net[2])):
        for kind in ("weight", "bias"):
            value = getattr(part, kind).detach().numpy().copy()
            model.graph.initializer.append(numpy_helper.from_array(value, f"{layer}.{kind}"))
    return net, model


@pytest.mark.parametrize("head", [False, True])
def test_a_network_beside_one_written_by_hand(head: bool) -> None:
    """20 steps of AdamW end at the weights of a LoRA network in PyTorch, with a head in full or without."""
    net, model = network()
    chosen = ("last.*",) if head else ()
    asked = Options(
        lora=LoraSpec(2, 4.0), train=chosen, optimizer="adamw", losses=(LossSpec("cross-entropy"),), label="c", seed=3
    )
    built = build(copied(model), asked)
    assert [each.weight for each in built.training.adapters] == ["first.weight"] + ["last.weight"] * (not head)
    begun = stored(built.model)
    if head:
        adapted = torch.nn.Sequential(
            Lora(net[0], begun["first.weight_lora_A"], begun["first.weight_lora_B"], 2.0), net[1], net[2]
        )
    else:
        layers = (Lora(net[at], begun[f"{n}.weight_lora_A"], begun[f"{n}.weight_lora_B"], 2.0)
                  for at, n in ((0, "first"), (2, "last")))  # fmt: skip
        adapted = torch.nn.Sequential(next(layers), net[1], next(layers))
    theirs = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
    rng = np.random.default_rng(1)
    data = [(rng.standard_normal((16, 6)), rng.integers(0, 5, 16)) for _ in range(20)]
    held = stepped(built.model, [{"x": x, "c": c} for x, c in data], 0.02)[0]
    for x, c in data:
        theirs.zero_grad()
        functional.cross_entropy(adapted(torch.tensor(x)), torch.tensor(c)).backward()
        theirs.step()
    np.testing.assert_allclose(held["first.weight_lora_A"], adapted[0].a.detach(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(held["first.weight_lora_B"], adapted[0].b.detach(), rtol=1e-9, atol=1e-12)
    x = rng.standard_normal((4, 6))
    weights = {name: held[name] for name, role in describe(built.model).inputs.items() if role == "weight"}
    after = run(merge(model, describe(built.model).adapters, weights), {"x": x})["y"]
    np.testing.assert_allclose(after, adapted(torch.tensor(x)).detach(), rtol=1e-9, atol=1e-12)


def stepped(model: ModelProto, batches: list[Arrays], rate: float) -> tuple[Arrays, list[float]]:
    """Weights and state after a step on each batch, and the losses, by a host that knows what the model says."""
    roles = describe(model)
    session = ort.InferenceSession(model.SerializeToString())
    held = {name: value for name, value in stored(model).items() if roles.inputs.get(name) in ("weight", "state")}
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    (name,) = [name for name, role in roles.inputs.items() if role == "learning rate"]
    fed = {name: np.array(rate, helper.tensor_dtype_to_np_dtype(kinds[name]))}
    losses = []
    for batch in batches:
        results = dict(zip(roles.outputs, session.run(list(roles.outputs), {**batch, **held, **fed}), strict=True))
        held.update({role.of: results[out] for out, role in roles.outputs.items() if role.role == "next state"})
        losses.append(float(results[roles.loss]))
    return held, losses


def test_rank_stabilized_scaling() -> None:
    """Outputs and gradients are those of W x + alpha / sqrt(rank) B A x."""
    net, model = network()
    built = build(copied(model), replace(LORA, lora=LoraSpec(2, 3.0), lora_target=("*.weight",), lora_scaling="rslora"))
    assert {adapter.scaling for adapter in built.training.adapters} == {"rslora"}
    given = factors(built)
    layers = [
        Lora(net[at], given[f"{name}.weight_lora_A"], given[f"{name}.weight_lora_B"], 3 / 2**0.5)
        for at, name in ((0, "first"), (2, "last"))
    ]
    x = np.random.default_rng(0).standard_normal((4, 6))
    y = torch.nn.Sequential(layers[0], net[1], layers[1])(torch.tensor(x))
    functional.mse_loss(y, torch.ones_like(y)).backward()
    found = run(built.model, {"x": x, "label": np.ones((4, 5)), **given})
    np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-12)
    np.testing.assert_allclose(found["first.weight_lora_A_grad"], layers[0].a.grad, rtol=1e-9)
    assert describe(built.model).adapters == tuple(built.training.adapters)


def test_dropout_is_before_adapters_alone() -> None:
    """What goes into an adapter is dropped with the mask that its gradient has; what goes into the matrix is not."""
    _, model = network()
    asked = Options(lora=LoraSpec(2), lora_target=("first.weight",), lora_dropout=0.5, keep_outputs=True)
    built = build(copied(model), asked)
    given, x = factors(built), np.random.default_rng(0).standard_normal((64, 6))
    feeds = {"x": x, "label": np.ones((64, 5))}
    still = run(built.model, {**feeds, "first.weight_lora_B": np.zeros((8, 2))})
    np.testing.assert_allclose(still["y"], run(model, {"x": x})["y"], rtol=1e-12)
    (node,) = [node for node in built.model.graph.node if node.op_type == "Dropout"]
    seen = copied(built.model)
    seen.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.DOUBLE, None))
    found = run(seen, {**feeds, **given})
    dropped = found[node.output[0]]
    assert set(np.round(np.unique(dropped / x), 6)) == {0.0, 2.0}
    weights = {name: torch.tensor(value) for name, value in stored(model).items()}
    a, b = (torch.tensor(given[f"first.weight_lora_{kind}"], requires_grad=True) for kind in "AB")
    h = torch.tanh(functional.linear(torch.tensor(x), weights["first.weight"], weights["first.bias"])
                   + functional.linear(functional.linear(torch.tensor(dropped), a), b))  # fmt: skip
    y = functional.linear(h, weights["last.weight"], weights["last.bias"])
    loss = functional.mse_loss(y, torch.ones_like(y))
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.detach(), rtol=1e-9)
    np.testing.assert_allclose(found["first.weight_lora_A_grad"], a.grad, rtol=1e-9)
    np.testing.assert_allclose(found["first.weight_lora_B_grad"], b.grad, rtol=1e-9)


# -- transformers -----------------------------------------------------------------------------------------------------


def backward_values(built: TrainingModel) -> set[str]:
    return {name for node in built.graph.nodes for name in node.output}


def test_only_adapters_have_a_gradient() -> None:
    """No value of the backward part is the gradient of a frozen weight; the factors' are there, and nothing else's."""
    options = Options(losses=(LossSpec("cross-entropy"),))
    whole = build(onnx.load(TRANSFORMER), options)
    lean = build(onnx.load(TRANSFORMER), replace(options, lora=LoraSpec(4)))
    frozen = [name for name in whole.training.trained]
    made = backward_values(lean)
    assert all(f"{name}_grad" in backward_values(whole) for name in frozen)
    assert not [name for name in frozen if f"{name}_grad" in made]
    names = [name for each in lean.training.adapters for name in (each.a, each.b)]
    assert len(names) == 24
    assert lean.training.trained == names
    assert [value.name for value in lean.model.graph.output] == ["loss", *(f"{name}_grad" for name in names)]
    wide = {tuple(whole.graph.initializers[each.weight].dims) for each in lean.training.adapters}
    shapes = {tuple(d.dim_value for d in lean.graph.types[name].tensor_type.shape.dim) for name in made
              if name in lean.graph.types and name.endswith("_grad")}  # fmt: skip
    assert not shapes & wide
    assert sum(int(np.prod(lean.graph.initializers[name].dims)) for name in names) == 3584
    assert {"classifier.weight", "norm.weight"} <= lean.training.not_trained.keys()
    assert "classifier.weight" in [caution.subject for caution in lean.training.cautions]


@pytest.mark.slow
def test_a_transformer_learns_by_its_adapters() -> None:
    data = np.load(TRANSFORMER.with_suffix(".npz"))
    model = onnx.load(TRANSFORMER)
    inputs = [value.name for value in model.graph.input]
    x, y = (data[name] for name in data.files if name.startswith("train"))
    options = Options(losses=(LossSpec("cross-entropy"),), label="c", lora=LoraSpec(4, 8.0), preset=("head",),
                      optimizer="adamw", lora_target=("*_proj.weight", "*.fc?.weight"))  # fmt: skip
    built = build(copied(model), options)
    batches = [{inputs[0]: x[:64], "c": y[:64]}] * 30
    before = stored(built.model)
    held, losses = stepped(built.model, batches, 0.01)
    assert losses[-1] < 0.7 * losses[0]
    changed = {name for name, role in describe(built.model).inputs.items() if role == "weight"}
    assert changed == {"classifier.weight", "classifier.bias", *(n for n in before if "_lora_" in n)} - {
        name for name in before if name.endswith(("_m", "_v"))
    }
    assert all(not np.array_equal(before[name], held[name]) for name in changed)
    weights = {name: held[name] for name in changed}
    after = merge(model, built.training.adapters, weights)
    assert [node.SerializeToString() for node in after.graph.node] == [
        node.SerializeToString() for node in model.graph.node
    ]
    assert [tensor.name for tensor in after.graph.initializer] == [tensor.name for tensor in model.graph.initializer]
    feeds = {inputs[0]: x[:16]}
    adapted = build(copied(model), replace(options, keep_outputs=True)).model
    rate = {"learning_rate": np.zeros((), np.float32)}
    expected = run(adapted, {**feeds, "c": y[:16], **weights, **rate}, ["logits"])["logits"]
    np.testing.assert_allclose(run(after, feeds)["logits"], expected, rtol=1e-4, atol=1e-5)
    untouched = set(stored(model)) - changed - {each.weight for each in built.training.adapters}
    assert all(np.array_equal(stored(after)[name], stored(model)[name]) for name in untouched)


@pytest.mark.skipif(not BERT.is_dir(), reason="the real models lie in ../shared/zoo, which is not there")
def test_a_real_transformer() -> None:
    """Every matrix of a BERT gets an adapter; the proof holds away from B = 0; a few steps lower the loss."""
    model = onnx.load(BERT / "model.onnx")
    feed = np.load(BERT / "feed.npz")
    batch = {name.removeprefix("in/"): feed[name] for name in feed.files if name != "target"}
    batch["label"] = feed["target"]
    options = Options(lora=LoraSpec(4, 8.0), optimizer="adam")
    built = build(copied(model), options)
    assert len(built.training.adapters) == 18
    proof = prove(built.model, describe(built.model), data=batch, original=model)
    assert {step.status for step in proof.steps} == {"passed"}
    held, losses = stepped(built.model, [batch] * 6, 0.01)
    assert losses[-1] < losses[0]
    adapted = build(copied(model), replace(options, keep_outputs=True, optimizer="")).model
    names = [value.name for value in model.graph.output if any(value.name in n.output for n in adapted.graph.node)]
    weights = {name: held[name] for each in built.training.adapters for name in (each.a, each.b)}
    inputs = {name: batch[name] for name in batch if name != "label"}
    expected = run(adapted, {**batch, **weights}, names[:1])
    after = run(merge(model, built.training.adapters, weights), inputs, names[:1])
    np.testing.assert_allclose(after[names[0]], expected[names[0]], rtol=1e-4, atol=1e-5)


# -- types, sizes, files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_weights_of_16_bits(kind: int) -> None:
    weight = helper.make_tensor("w", kind, [4, 3], np.linspace(-1, 1, 12).tolist())
    x, y = (helper.make_tensor_value_info(name, kind, ["batch", size]) for name, size in (("x", 4), ("y", 3)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "half", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    built = build(copied(model), Options(lora=LoraSpec(2, 4.0), optimizer="adam", keep_outputs=True))
    onnx.checker.check_model(built.model, full_check=True)
    assert {t.data_type for t in built.model.graph.initializer if t.name.endswith(("_A", "_B"))} == {kind}
    given = factors(built)
    after = merge(model, built.training.adapters, given)
    exact = stored(model)["w"].astype(np.float64)
    exact += 2 * given["w_lora_A"].astype(np.float64) @ given["w_lora_B"].astype(np.float64)
    np.testing.assert_array_equal(stored(after)["w"], exact.astype(stored(model)["w"].dtype))
    if kind == TensorProto.FLOAT16:  # onnxruntime has no bfloat16 MatMul on the CPU
        x16 = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float16)
        fed = {"x": x16, "label": np.ones((5, 3), np.float16), "learning_rate": np.array(0.1, np.float32), **given}
        np.testing.assert_allclose(run(built.model, fed, ["y"])["y"], run(after, {"x": x16})["y"], rtol=2e-2, atol=2e-2)


def test_external_weights_are_not_loaded_but_where_adapters_are_merged(tmp_path: Path) -> None:
    path = save_external(tmp_path / "model.onnx")
    built = build(onnx.load(path, load_external_data=False), Options(lora=LoraSpec(2)), path=path)
    (weight,) = [tensor for tensor in built.model.graph.initializer if tensor.name == "w"]
    assert weight.data_location == TensorProto.EXTERNAL
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    given = factors(built)
    model = onnx.load(path, load_external_data=False)
    after = stored(merge(model, built.training.adapters, given, path))["w"]
    expected = WEIGHT.reshape(8, 3) + given["w_lora_A"] @ given["w_lora_B"]
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    assert model.graph.initializer[0].data_location == TensorProto.EXTERNAL


def test_how_factors_begin() -> None:
    """A is uniform within one over the root of the fan in, as PyTorch draws it; the seed decides it; B is zero."""
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[n, 400] x) => (float[n, 300] y) { y = MatMul(x, w) }'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((400, 300), np.float32), "w"))

    def begun(seed: int | None) -> np.ndarray:
        values = stored(build(copied(model), Options(lora=LoraSpec(16), seed=seed)).model)
        assert not values["w_lora_B"].any()
        return values["w_lora_A"]

    twin = torch.nn.Linear(400, 16).weight.detach().numpy()
    a = begun(1)
    assert np.abs(a).max() <= 1 / 20
    np.testing.assert_allclose(a.std(), twin.std(), rtol=0.05)
    assert np.array_equal(a, begun(1))
    assert not np.array_equal(a, begun(2))
    assert np.array_equal(begun(None), begun(0))


def test_alpha_is_the_rank_where_none_is_given() -> None:
    built = build(model_of(FORMS["matmul"])[0], Options(lora=LoraSpec(2)))
    assert built.training.adapters[0].scale == 1.0
    assert [node.op_type for node in built.graph.nodes[:4]] == ["MatMul", "MatMul", "MatMul", "Add"]
    assert (parse_lora("8"), parse_lora("8:16")) == (LoraSpec(8), LoraSpec(8, 16.0))


# -- adapter files ----------------------------------------------------------------------------------------------------


def test_an_adapter_in_a_file(tmp_path: Path) -> None:
    model, _ = model_of(FORMS["conv"])
    built = build(copied(model), replace(LORA, train=("c",)))
    values = {**factors(built), "c": np.arange(5, dtype=np.float32)}
    (tmp_path / "adapter.safetensors").write_bytes(adapter_bytes(built.training.adapters, values))
    adapters, loaded = load_adapter(tmp_path / "adapter.safetensors")
    assert adapters == built.training.adapters == list(describe(built.model).adapters)
    assert loaded.keys() == values.keys()
    assert all(np.array_equal(loaded[name], values[name]) for name in values)
    assert merge(model, adapters, loaded) == merge(model, built.training.adapters, values)
    assert np.array_equal(stored(merge(model, adapters, loaded))["c"], values["c"])

    from safetensors import safe_open

    with safe_open(tmp_path / "adapter.safetensors", "np") as file:
        assert '"rank": 2' in file.metadata()["onnxgrad.adapters"]
        assert set(file.keys()) == {"c", "w_lora_A", "w_lora_B"}

    with raises(OnnxgradError, "unreadable_file", "w", "w_lora_B"):
        (tmp_path / "other.safetensors").write_bytes(adapter_bytes(adapters, {"w_lora_A": values["w_lora_A"]}))
    assert not (tmp_path / "other.safetensors").exists()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="the extra [train] is not installed")
    library.save_file({"x": np.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(OnnxgradError, match="holds no adapters of onnxgrad"):
        load_adapter(tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "other.safetensors").read_bytes()[:30])
    with pytest.raises(OnnxgradError, match="cut"):
        load_adapter(tmp_path / "cut.safetensors")
    with pytest.raises(OnnxgradError, match="none"):
        load_adapter(tmp_path / "none.safetensors")


def test_what_can_not_be_merged() -> None:
    model, _ = model_of(FORMS["matmul"])
    adapter = Adapter("w", "a", "b", 2, 2.0)
    good = {"a": np.zeros((6, 2)), "b": np.zeros((2, 5))}
    assert merged(model, [adapter], good).keys() == {"w"}
    with raises(OnnxgradError, "unreadable_file", "w", "b"):
        merge(model, [adapter], {"a": good["a"]})
    with raises(OnnxgradError, "mismatch", "w", "6", "5", "LoRA", "6", "2", "2", "4"):
        merge(model, [adapter], {"a": good["a"], "b": np.zeros((2, 4))})
    with pytest.raises(OnnxgradError, match="no weight 'v' to merge"):
        merge(model, [replace(adapter, weight="v")], good)
    with pytest.raises(OnnxgradError, match="no weight 'z' for the trained values"):
        merge(model, [adapter], {**good, "z": np.zeros(2)})


# -- what is refused --------------------------------------------------------------------------------------------------

VARIED = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[n, 6] x, int64[n] i) => (float[n, 6] y, float[6, 6] out) {
  a = MatMul(x, square) b = MatMul(a, out) t = MatMul(square, other) c = MatMul(b, t) d = Add(c, vector)
  e = Gather(table, i) f = Add(d, e) lt = Transpose(low) l = MatMul(f, lt) m = MatMul(l, low) y = Mul(m, e)
}
"""
"""Where matrices may stand that can have no adapter."""

MATRICES = {"square": (6, 6), "other": (6, 6), "out": (6, 6), "table": (20, 6), "vector": (6,), "low": (2, 6)}


def varied() -> ModelProto:
    model = parser.parse_model(VARIED)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in MATRICES.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


@pytest.mark.parametrize(
    ("options", "facts", "barred"),
    [
        ({"lora_target": ("sqare",)}, ("unknown_name", "lora_target", "sqare"), {}),
        ({"lora_target": ("vector",)}, ("unknown_name", "lora_target", "vector"), {}),
        ({"lora_target": ("table",)}, ("wrong_value", "lora_target", "2"), {"table": "(Gather)"}),
        ({"lora_target": ("low",)}, ("wrong_value", "lora_target", "2"), {"low": ", 2"}),
        ({"lora_target": ("out",)}, ("wrong_value", "lora_target", "2"), {"out": "output"}),
        (
            {"lora_target": ("square", "other")},
            ("wrong_value", "lora_target", "2"),
            {"square": "(MatMul)", "other": "(MatMul)"},
        ),
        (
            {"lora_target": ("square",), "lora": LoraSpec(6)},
            ("wrong_value", "lora_target", "6"),
            {"square": ", 6"},
        ),
        ({"lora_target": ("square",), "freeze": ("square",)}, ("wrong_value", "lora_target", "2"), {}),
        (
            {"lora": LoraSpec(40)},
            ("wrong_value", "lora", "40"),
            {"square": ", 6", "other": ", 6", "out": ", 6", "low": ", 2"},
        ),
        ({"lora": None, "lora_target": ("square",)}, ("missing_value", "lora_target"), {}),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], facts: tuple[str, ...], barred: dict[str, str]) -> None:
    """`barred`: weight -> a part of the reason why it can't have an adapter."""
    asked = Options(**{"output": "y", "lora": LoraSpec(2), **options})
    with raises(UsageError, *facts) as refused:
        build(varied(), asked)
    found = dict(detail.split(": ", 1) for detail in refused.value.details)
    assert found.keys() == barred.keys() and all(barred[name] in reason for name, reason in found.items())


def test_a_stack_of_matrices_has_no_adapter() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float[3, n, 4] x) => (float[3, n, 1] y) { y = MatMul(x, stack) }""")
    stack = np.random.default_rng(0).standard_normal((3, 4, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(stack, "stack"))
    with pytest.raises(UsageError, match="stack"):
        build(model, Options(lora=LoraSpec(2), lora_target=("stack",)))


@pytest.mark.parametrize(
    ("rank", "alpha", "words"),
    [
        (0, None, "rank of 0 "),
        (2, 0.0, "alpha .* 0"),
        (2, float("nan"), "alpha .* nan"),
    ],
)
def test_what_is_no_adapter_is_refused(rank: int, alpha: float | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LoraSpec(rank, alpha)


def test_by_default_what_can_not_have_one_stays_frozen() -> None:
    built = build(varied(), Options(output="y", lora=LoraSpec(2), freeze=("other",)))
    assert [each.weight for each in built.training.adapters] == ["square"]
    reasons = built.training.not_trained
    assert reasons.keys() == {"square", "other", "out", "low", "table", "vector"} and reasons["other"] == FROZEN
    assert {caution.subject for caution in built.training.cautions} >= {"out", "low"}
    assert "output" in reasons["out"] and reasons["low"].endswith(", 2") and reasons["table"] == reasons["vector"]
    proof = prove(built.model, describe(built.model))
    assert proof.status == "passed"


@pytest.mark.parametrize(
    ("nodes", "w", "words"),
    [
        ("y = Conv<group = 2>(x, w)", (4, 2, 1, 1), "(Conv)"),
        ("y = Conv(x, w)", (4, 4, 3, 3), "[4, 4, 3, 3]"),
        ("y = MatMul(x, w)", (4, 4, 5, 5), "[4, 4, 5, 5]"),
    ],
)
def test_convolutions_that_are_no_product(nodes: str, w: tuple[int, ...], words: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float[4, 4, 5, 5] x) => (float y) {{ {nodes} }}'
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(w, np.float32), "w"))
    with raises(UsageError, "wrong_value", "lora_target", "1") as refused:
        build(model, Options(lora=LoraSpec(1), lora_target=("w",)))
    (detail,) = refused.value.details
    assert detail.startswith("w: ") and words in detail


def test_what_was_computed_at_build_is_no_weight() -> None:
    """Zeros to add to, as in a graph network, are stored where preparation has folded them."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 3] x) => (float[2, 4] y) <int64[2] sizes = {2, 4}> {
            h = MatMul(x, w) zeros = ConstantOfShape(sizes) y = Sub(zeros, h)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 4), "f"), "w"))
    built = build(model, Options(lora=LoraSpec(1), lora_target=("*",)))
    assert [adapter.weight for adapter in describe(built.model).adapters] == ["w"]


def test_a_weight_in_a_body_is_refused() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]> g (float[n, 4] x, bool c) => (float[n, 4] y) {
        y = If (c) <then_branch = t () => (float[n, 4] a) { a = MatMul(x, w) },
                    else_branch = e () => (float[n, 4] b) { b = Identity(x) }>
    }"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    with raises(UsageError, "wrong_value", "lora_target", "1") as refused:
        build(model, Options(lora=LoraSpec(1), lora_target=("w",)))
    (detail,) = refused.value.details
    assert detail.startswith("w: ") and "(If)" in detail and "subgraph" in detail


# -- presets ----------------------------------------------------------------------------------------------------------


def chosen(path: Path, **options: Any) -> list[str]:
    asked = Options(losses=(LossSpec("cross-entropy"),), **options)
    return build(onnx.load(path), asked, stop_after="adapters").training.trained


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def test_the_command(shell: Shell) -> None:
    asked = ["--loss", "cross-entropy", "--lora", "4:8", "--lora-target", "*_proj.weight", "--train", "classifier.*"]
    result = shell("build", TRANSFORMER, *asked, "--seed", "7", "-o", "out.onnx", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert len(report["adapters"]) == 8
    assert report["adapters"][0] == {
        "weight": "layers.0.q_proj.weight", "a": "layers.0.q_proj.weight_lora_A", "b": "layers.0.q_proj.weight_lora_B",
        "rank": 4, "alpha": 8.0, "scaling": "lora", "magnitude": "",
    }  # fmt: skip
    assert {step["status"] for step in report["proof"]["steps"]} == {"passed"}
    assert report["asked"]["options"]["--lora"] == "4:8"
    assert sum(weight["count"] for weight in report["weights"]) == 8 * 2 * 4 * 32 + 4 * 32 + 4
    text = Path("out.onnx.report.md").read_text()
    assert "8 of rank 4: 2,048 parameters instead of 8,192 (25.0 %)" in text and ", times 2," in text
    checked = shell("check", "out.onnx", "--json")
    assert checked.code == 0, checked.err
    assert "relative error" in checked.out


def test_factors_with_names_that_are_identifiers() -> None:
    options = Options(losses=(LossSpec("cross-entropy"),), lora=LoraSpec(4), identifiers=True, optimizer="adam")
    built = build(onnx.load(TRANSFORMER), options)
    adapter = describe(built.model).adapters[0]
    assert (adapter.weight, adapter.a) == ("layers.0.q_proj.weight", "layers_0_q_proj_weight_lora_A")
    assert set(describe(built.model).gradients) == {
        name for each in built.training.adapters for name in (each.a, each.b)
    }
    assert prove(built.model, describe(built.model)).status == "passed"


@pytest.mark.slow
def test_on_a_model_with_adapters() -> None:
    """A training model can be built on: its adapters are then weights like others."""
    first = build(onnx.load(TRANSFORMER), Options(losses=(LossSpec("cross-entropy"),), lora=LoraSpec(4)))
    again = build(first.model, Options(losses=(LossSpec("identity", "loss"),), lora=LoraSpec(2)))
    assert not {each.a for each in first.training.adapters} & {each.a for each in again.training.adapters}
    assert prove(again.model, describe(again.model)).status == "passed"


def test_the_command_refuses(shell: Shell) -> None:
    for arguments, words in (
        (["--lora", "4:x"], "not of the form RANK[:ALPHA]"),
        (["--lora-target", "x"], "requires adapters"),
        (["--lora", "4", "--training-info", "--optimizer", "sgd"], "--lora can't be combined with --training-info"),
        (["--seed", "4"], "--seed"),
        (["--preset", "norms"], "'norms' is not one of"),
        (["--train-last", "0"], "--train-last"),
    ):
        result = shell("build", TRANSFORMER, *arguments, "-o", "out.onnx")
        assert result.code == 2, (arguments, result.err)
        assert words in result.err
        assert not shell.files()


@pytest.mark.slow
def test_the_proof_sees_the_gradient_of_a() -> None:
    """B is away from zero in the proof, so a wrong gradient of A is found."""
    built = build(onnx.load(TRANSFORMER), Options(losses=(LossSpec("cross-entropy"),), lora=LoraSpec(4)))
    model = copied(built.model)
    name = describe(model).gradients["layers.0.fc1.weight_lora_A"]
    (node,) = [node for node in model.graph.node if name in node.output]
    node.output[0] = "hidden"
    model.graph.node.append(helper.make_node("Neg", ["hidden"], [name], name="wrong"))
    assert Graph(model).opset() == 18
    assert prove(built.model, describe(model)).status == "passed"
    assert prove(model, describe(model)).status == "failed"
