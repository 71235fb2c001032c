"""The parameters that a command trains, and its warnings about weights that it does not train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, numpy_helper, parser

from onnxgrad_cli.builder import build
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.options import LoraSpec, Options
from onnxgrad_cli.passes.parameters.untrained import UNTRAINED
from tests.cli_harness import Shell

RNG = np.random.default_rng(0)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def model(text: str, opset: int = 17, producer: str = "", **arrays: np.ndarray) -> ModelProto:
    """A model of these nodes with these initializers."""
    found = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}], producer_name: "{producer}"> {text}')
    found.graph.initializer.extend(numpy_helper.from_array(np.asarray(x), name) for name, x in arrays.items())
    onnx.checker.check_model(found, full_check=True)
    return found


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def trained(shell: Shell, name: str, *options: str) -> list[str]:
    """The weights that `inspect` would train."""
    result = shell("inspect", name, *options, "--json")
    assert result.code == 0, result.err
    return [weight["name"] for weight in result.json["weights"]]


def gradients(name: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The loss and the gradients of a training model."""
    session = onnxruntime.InferenceSession(name, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def rounded(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y, with the derivative of x."""
    return x + (y - x).detach()


# -- weights that are stored as integers ------------------------------------------------------------------------------

LEVELS = np.arange(-128, 128).astype(np.int8)
"""All values of int8: dequantized, they are evenly spaced."""


def of_all_levels(rows: int, columns: int) -> np.ndarray:
    return RNG.permutation(np.resize(LEVELS, rows * columns)).reshape(rows, columns)


QUANTIZED = {
    "DequantizeLinear": "w = DequantizeLinear(q, s, z) k = MatMul(x, w)",
    "views": "w = DequantizeLinear(q, s, z) t = Transpose(w) u = Transpose(t) k = MatMul(x, u)",
    "elementwise": "w = DequantizeLinear(q, s, z) k = Mul(x, w)",
    "Gather": "w = DequantizeLinear(q, s, z) g = Gather(w, i) k = Mul(x, g)",
    "QLinearMatMul": """a = QuantizeLinear(x, s, z) b = QLinearMatMul(a, s, z, q, s, z, s, z)
    k = DequantizeLinear(b, s, z)""",
    "MatMulInteger": """a, b, c = DynamicQuantizeLinear(x) d = MatMulInteger(a, q, c, z) e = Cast<to = 1>(d)
    f = Mul(b, s) k = Mul(e, f)""",
}


@pytest.mark.parametrize("form", QUANTIZED)
def test_integers_that_use_all_levels_are_trained(shell: Shell, form: str) -> None:
    text = f"g (float[64, 64] x, int64[64] i) => (float[64, 64] y) {{ {QUANTIZED[form]} y = Mul(k, gain) }}"
    onnx.save(model(text, q=of_all_levels(64, 64), s=np.float32(0.01), z=np.int8(0), gain=draw(64)), "m.onnx")
    result = shell("inspect", "m.onnx", "--quantization", "ste", "--json")
    assert result.code == 0 and sorted(weight["count"] for weight in result.json["weights"]) == [64, 64 * 64]
    assert not any("stay untrained" in text for text in result.document["warnings"])


def cast_weights(opset: int, per_axis: bool, zero: bool) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """A perceptron with int8 weights behind Cast, perhaps Sub, and Mul, as quantizers of 2020 have written it."""
    arrays: dict[str, np.ndarray] = {"b": draw(128)}
    nodes = ""
    for name, shape in (("w", (64, 128)), ("v", (128, 10))):
        floats = draw(*shape)
        scale = np.abs(floats).max(axis=0 if per_axis else None, keepdims=per_axis) / np.float32(100)
        arrays[f"{name}_q"] = (np.rint(floats / scale) + 3 * zero).astype(np.int8)
        arrays[f"{name}_s"] = np.asarray(scale, np.float32)
        shift = f"{name}_d = Sub({name}_c, {name}_z)" if zero else f"{name}_d = Identity({name}_c)"
        arrays |= {f"{name}_z": np.float32(3)} if zero else {}
        nodes += f"{name}_c = Cast<to = 1>({name}_q) {shift} {name} = Mul({name}_d, {name}_s) "
    net = "h = MatMul(x, w) k = Add(h, b) r = Relu(k) y = MatMul(r, v)"
    text = f"g (float[N, 64] x) => (float[N, 10] y) {{ {nodes} {net} }}"
    return model(text, opset, **arrays), arrays


@pytest.mark.parametrize(
    ("opset", "per_axis", "zero"), [(11, True, False), (13, False, True), (17, True, True), (17, False, False)]
)
def test_integers_behind_cast_and_mul_are_trained_straight_through(
    shell: Shell, opset: int, per_axis: bool, zero: bool
) -> None:
    file, arrays = cast_weights(opset, per_axis, zero)
    onnx.save(file, "m.onnx")
    assert trained(shell, "m.onnx") == ["b"]
    warning = "9,472 parameters are stored as integers and stay untrained: 'w_q', 'v_q'. --quantization ste trains them"
    for command in ("inspect", "build"):
        assert warning in " ".join(shell(command, "m.onnx").out.split())
    result = shell("build", "m.onnx", "--loss", "mse", "--quantization", "ste", "-o", "t.onnx", "--json")
    assert result.code == 0 and not any("stay untrained" in text for text in result.document["warnings"])
    counts = {weight["name"]: weight["count"] for weight in result.json["weights"]}
    assert sum(counts.values()) == 9472 + 128
    x, label = draw(5, 64), draw(5, 10)
    found = gradients("t.onnx", {"x": x, "label": label})
    leaves = {}
    for name in ("w", "v"):
        steps = torch.tensor(arrays[f"{name}_q"].astype(np.float32)) - float(arrays.get(f"{name}_z", 0))
        leaves[name] = (steps * torch.tensor(arrays[f"{name}_s"])).requires_grad_()
    bias = torch.tensor(arrays["b"]).requires_grad_()
    y = (torch.tensor(x) @ leaves["w"] + bias).relu() @ leaves["v"]
    loss = ((y - torch.tensor(label)) ** 2).mean()
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-5)
    (w, v) = (leaf.grad.numpy() for leaf in leaves.values())
    names = {tuple(np.shape(found[weight["gradient"]])): weight["gradient"] for weight in result.json["weights"]}
    for expected in (w, v, bias.grad.numpy()):
        np.testing.assert_allclose(
            found[names[expected.shape]], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
        )


def test_zero_points_are_no_weights(shell: Shell) -> None:
    shifts = np.arange(4, dtype=np.float32)
    text = "g (float[N, 8] x) => (float[N, 4] y) { c = Cast<to = 1>(q) d = Sub(c, z) w = Mul(d, s) y = MatMul(x, w) }"
    stored = np.arange(-16, 16, dtype=np.int8).reshape(8, 4)
    onnx.save(model(text, q=stored, z=shifts, s=np.abs(draw(4)) + 1), "m.onnx")
    result = shell("build", "m.onnx", "--loss", "mse", "--quantization", "ste", "-o", "t.onnx", "--json")
    assert result.code == 0 and not any("stay untrained" in text for text in result.document["warnings"])


def test_trained_integers_are_written_back_where_they_were_cast(shell: Shell) -> None:
    file, _ = cast_weights(13, True, True)
    onnx.save(file, "m.onnx")
    np.savez("d.npz", x=draw(32, 64), label=10 * draw(32, 10))
    result = shell("train", "m.onnx", "--data", "d.npz", "--loss", "mse", "--quantization", "ste", "--epochs", "2",
                   "--learning-rate", "0.1", "-o", "new.onnx")  # fmt: skip
    assert result.code == 0, result.err
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (file, onnx.load("new.onnx"))
    )
    assert after["w_q"].dtype == np.int8 and not np.array_equal(before["w_q"], after["w_q"])
    assert [node.op_type for node in onnx.load("new.onnx").graph.node] == [node.op_type for node in file.graph.node]


def old_convolution(opset: int) -> ModelProto:
    """A convolution of integers whose bias is rounded at run time, as onnx.quantize 0.1.0 has written it."""
    weight = draw(4, 3, 3, 3)
    scale = np.abs(weight).max() / np.float32(127)
    return model(
        """g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y) {
        q, s, z = DynamicQuantizeLinear(x) t = Mul(s, w_scale) d = Div(b, t) f = Floor(d) i = Cast<to = 6>(f)
        c = ConvInteger<pads = [1, 1, 1, 1]>(q, w_quantized, z, w_zero_point) r = Reshape(i, shape) a = Add(c, r)
        k = Cast<to = 1>(a) y = Mul(k, t) }""",
        opset, "onnx.quantize", w_quantized=np.rint(weight / scale).astype(np.int8), w_scale=np.float32([scale]),
        w_zero_point=np.int8([0]), b=draw(4), shape=np.int64([1, -1, 1, 1]),
    )  # fmt: skip


@pytest.mark.parametrize("opset", [11, 13])
def test_a_convolution_of_integers_with_a_bias_rounded_at_run_time_is_trained(shell: Shell, opset: int) -> None:
    file = old_convolution(opset)
    onnx.save(file, "m.onnx")
    result = shell("build", "m.onnx", "--loss", "mse", "--quantization", "ste", "-o", "t.onnx", "--json")
    assert result.code == 0, result.err
    assert sorted(weight["count"] for weight in result.json["weights"]) == [4, 108]
    x, label = draw(2, 3, 8, 8), draw(2, 4, 8, 8)
    found = gradients("t.onnx", {"x": x, "label": label})
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    scale = float(stored["w_scale"][0])
    w = (torch.tensor(stored["w_quantized"].astype(np.float32)) * scale).requires_grad_()
    b = torch.tensor(stored["b"]).requires_grad_()
    step = float(np.float32(max(0, x.max()) - min(0, x.min())) / np.float32(255))
    zero = np.rint(-min(0, x.min()) / step)
    steps = torch.tensor(np.clip(np.rint(x / np.float32(step)) + zero, 0, 255) - zero)
    exact = b / (step * scale)
    bias = rounded(exact.floor(), exact)
    y = (
        torch.nn.functional.conv2d(steps, rounded((w / scale).round(), w / scale), padding=1) + bias[:, None, None]
    ) * (step * scale)
    loss = ((y - torch.tensor(label)) ** 2).mean()
    loss.backward()
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-4)
    for weight, leaf in zip(sorted(result.json["weights"], key=lambda each: each["count"]), (b, w), strict=True):
        np.testing.assert_allclose(found[weight["gradient"]], leaf.grad.numpy(), rtol=1e-3, atol=1e-4)


# -- the choice by patterns -------------------------------------------------------------------------------------------

CUT = (
    "g (float[N, 4] x) => (float[N, 4] y) { h = Mul(x, w) k = Mul(x, cut) f = Floor(k) m = Add(f, mask) y = Add(h, m) }"
)


def test_a_glob_chooses_parameters_that_can_be_trained(shell: Shell) -> None:
    mask = np.triu(np.full((4, 4), -1e9, np.float32), 1)
    onnx.save(model(CUT, w=draw(4), cut=draw(4), mask=mask), "m.onnx")
    assert trained(shell, "m.onnx", "--train", "*") == ["w"]
    assert trained(shell, "m.onnx", "--train", "*", "--train", "mask") == ["w", "mask"]
    assert trained(shell, "m.onnx", "--train", "m*") == ["mask"]
    for pattern in ("cut", "c*"):
        result = shell("inspect", "m.onnx", "--train", pattern)
        assert result.code == 3 and result.facts == ("refused", "cut", "y", "Floor_f")


# -- warnings ---------------------------------------------------------------------------------------------------------


def test_floats_that_stay_untrained_are_counted(shell: Shell) -> None:
    text = "g (float[N, 8] x) => (float[N, 8] y) { h = MatMul(x, w) k = Add(h, grid) y = Relu(k) }"
    grid = np.float32(np.arange(16 * 8).reshape(16, 8) / 4)
    onnx.save(model(text.replace("[N, 8]", "[16, 8]"), w=draw(8, 8), grid=grid), "m.onnx")
    np.savez("d.npz", x=draw(16, 8), label=draw(16, 8))
    warning = "128 of 192 float parameters (67%) stay untrained; the largest tensor is 'grid' (128): "
    hint = "--train '*' together with --train grid trains it too"
    for command in ("inspect", "build"):
        said = " ".join(shell(command, "m.onnx").out.split())
        assert warning in said and hint in said
    assert trained(shell, "m.onnx", "--train", "*", "--train", "grid") == ["w", "grid"]
    result = shell("train", "m.onnx", "--data", "d.npz", "--loss", "mse", "--epochs", "1", "--batch-size", "16")
    assert warning in " ".join(result.err.split())
    for choice in (
        ("--train", "w"),
        ("--freeze", "grid"),
        ("--preset", "head"),
        ("--train-last", "1"),
        ("--lora", "2"),
    ):
        assert "stay untrained" not in shell("inspect", "m.onnx", *choice).out


def test_running_statistics_cause_no_warning(shell: Shell) -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = BatchNormalization(x, s, b, mean, var) }"
    onnx.save(model(text, s=draw(4), b=draw(4), mean=draw(4), var=np.ones(4, np.float32)), "m.onnx")
    for mode in ("keep", "train"):
        result = shell("inspect", "m.onnx", "--mode", mode)
        assert result.code == 0 and "stay untrained" not in result.out


def test_a_mask_of_bytes_is_no_stored_weight(shell: Shell) -> None:
    text = "g (float[4, 4] x) => (float[4, 4] y) { m = Cast<to = 1>(mask) h = MatMul(x, w) y = Mul(h, m) }"
    onnx.save(model(text, w=draw(4, 4), mask=np.tril(np.ones((4, 4), np.uint8))), "m.onnx")
    report = shell("inspect", "m.onnx", "--json").json
    assert UNTRAINED not in [caution["kind"] for caution in report["cautions"]]


# -- roles by values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [np.s_[3], np.s_[3, 1], np.s_[:, 0], np.s_[:5]])
@pytest.mark.parametrize("value", [-np.inf, np.finfo(np.float32).min])
def test_a_learned_table_with_extreme_values_is_trained(shell: Shell, entries: object, value: float) -> None:
    table = draw(13, 4)
    table[entries] = value
    text = """g (float[N, T, 4] x, int64[N, T] d) => (float[N, T, 4] y)
    { b = Gather(table, d) h = MatMul(x, w) s = Add(h, b) y = Softmax(s) }"""
    onnx.save(model(text, w=draw(4, 4), table=table), "m.onnx")
    assert trained(shell, "m.onnx") == ["w", "table"]


@pytest.mark.parametrize("seen", [0.0, 1.0, "distances"])
def test_masks_are_not_trained(shell: Shell, seen: float | str) -> None:
    far = np.float32(np.arange(12)[:, None] - np.arange(12))
    table = (
        -(2.0 ** -np.arange(2, 9, 2, dtype=np.float32))[:, None, None] * far
        if seen == "distances"
        else np.full((12, 12), seen)
    )
    mask = np.where(np.triu(np.ones((12, 12)), 1), -np.inf, table).astype(np.float32)
    text = "g (float[4, 12, 12] x) => (float[4, 12, 12] y) { h = MatMul(x, w) s = Add(h, mask) y = Softmax(s) }"
    onnx.save(model(text, w=draw(12, 12), mask=mask), "m.onnx")
    assert trained(shell, "m.onnx") == ["w"]


@pytest.mark.parametrize("levels", [3, 10, 26])
def test_a_learned_scale_of_few_bits_is_trained(shell: Shell, levels: int) -> None:
    """Numbers of bfloat16 between two powers of two lie on a grid: all levels of some range occur."""
    scale = RNG.permutation(np.resize(np.float32(128 + np.arange(levels)) / 512, 64))
    text = "g (float[N, 64] x) => (float[N, 64] y) { h = MatMul(x, w) n = Mul(h, s) y = Sigmoid(n) }"
    onnx.save(model(text, w=draw(64, 64), s=scale), "m.onnx")
    assert trained(shell, "m.onnx") == ["w", "s"]


def test_a_flattened_grid_is_not_trained(shell: Shell) -> None:
    cells = np.stack(np.meshgrid(np.arange(8) + 0.5, np.arange(8) + 0.5), -1).reshape(1, 64, 2).astype(np.float32)
    text = "g (float[N, 64, 2] x) => (float[N, 64, 2] y) { h = MatMul(x, w) y = Add(h, cells) }"
    onnx.save(model(text, w=draw(2, 2), cells=cells), "m.onnx")
    assert trained(shell, "m.onnx") == ["w"]


def test_the_bins_of_a_distribution_are_not_trained(shell: Shell) -> None:
    """Take the expectation of a softmax with a frozen convolution, as YOLO does; PyTorch's file does not say so."""
    pytest.importorskip("onnxscript", reason="PyTorch's newer exporter needs onnxscript")

    class Expectation(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Conv2d(4, 16, 1)
            self.bins = torch.nn.Conv2d(16, 1, 1, bias=False).requires_grad_(False)
            self.bins.weight.data = torch.arange(16.0).view(1, 16, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            expectation: torch.Tensor = self.bins(self.head(x).softmax(1))
            return expectation

    torch.onnx.export(Expectation().eval(), (torch.randn(1, 4, 2, 2),), "m.onnx", dynamo=True, verbose=False)
    assert trained(shell, "m.onnx") == ["head.weight", "head.bias"]


# -- normalizations ---------------------------------------------------------------------------------------------------

GROUPS = """r = Reshape(h, groups) i = InstanceNormalization(r, val_1, val_2) sh = Shape(h) g = Reshape(i, sh)
sc = CastLike(s, g) su = Unsqueeze(sc, axes) m = Mul(g, su) bc = CastLike(b, m)
bu = Unsqueeze(bc, axes) n = Add(m, bu)"""


@pytest.mark.parametrize("norm", [GROUPS, "n = BatchNormalization(h, s, b, val_3, val_4)"])
def test_the_preset_of_normalizations_takes_scales_and_shifts_alone(shell: Shell, norm: str) -> None:
    text = f"""g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y)
    {{ h = Conv<pads = [1, 1, 1, 1]>(x, w) {norm} p = PRelu(n, slope) y = Add(p, table) }}"""
    arrays = {"groups": np.int64([0, 2, -1]), "axes": np.int64([1, 2]), "val_1": np.ones(2, np.float32),
              "val_2": np.zeros(2, np.float32), "val_3": draw(4), "val_4": np.ones(4, np.float32)}  # fmt: skip
    used = {name: array for name, array in arrays.items() if name in norm}
    file = model(text, 18, w=draw(4, 4, 3, 3), s=draw(4), b=draw(4), slope=draw(4, 1, 1), table=draw(4, 5, 5), **used)
    onnx.save(file, "m.onnx")
    assert trained(shell, "m.onnx", "--preset", "norm") == ["s", "b"]


# -- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opset", "resize"),
    [
        (9, "y = Upsample(h, scales)"),
        (10, "y = Resize(h, scales)"),
        (13, "y = Resize(h, , scales)"),
        (13, "s = Concat<axis = 0>(ones, twos) y = Resize(h, , s)"),
        (13, "s = Cast<to = 1>(halves) y = Resize(h, , s)"),
    ],
)
def test_scales_are_not_differentiated_by(shell: Shell, opset: int, resize: str) -> None:
    text = f"g (float[N, 1, 4, 4] x) => (float[N, 2, 8, 8] y) {{ h = Conv<pads = [1, 1, 1, 1]>(x, w) {resize} }}"
    arrays = {"scales": np.float32([1, 1, 2, 2]), "ones": np.float32([1, 1]), "twos": np.float32([2, 2]),
              "halves": np.float16([1, 1, 2, 2])}  # fmt: skip
    used = {name: array for name, array in arrays.items() if name in resize}
    onnx.save(model(text, opset, w=draw(2, 1, 3, 3), **used), "m.onnx")
    result = shell("derive", "m.onnx", "-o", "d.onnx", "--no-verify")
    assert result.code == 0, result.err
    x, cotangent = draw(3, 1, 4, 4), draw(3, 2, 8, 8)
    found = gradients("d.onnx", {"x": x, "y_grad": cotangent})
    assert found.keys() == {"x_grad", "w_grad"}
    leaves = [
        torch.tensor(a).requires_grad_() for a in (x, numpy_helper.to_array(onnx.load("m.onnx").graph.initializer[0]))
    ]
    y = torch.nn.functional.interpolate(torch.nn.functional.conv2d(*leaves, padding=1), scale_factor=2, mode="nearest")
    y.backward(torch.tensor(cotangent))
    for name, leaf in zip(("x_grad", "w_grad"), leaves, strict=True):
        np.testing.assert_allclose(found[name], leaf.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_an_input_with_scales_is_left_out_by_the_hint(shell: Shell) -> None:
    text = "g (float[1, 1, 4, 4] x, float[4] s) => (float[1, 1, a, b] y) { h = Mul(x, w) y = Resize(h, , s) }"
    onnx.save(model(text, 13, w=draw(1, 1, 1, 1)), "m.onnx")
    result = shell("derive", "m.onnx", "-o", "d.onnx")
    assert result.code == 3 and result.problem is not None and "`wrt='x'`" in (result.problem.hint or "")
    assert shell("derive", "m.onnx", "-o", "d.onnx", "--wrt", "x").code == 0


@pytest.mark.parametrize(
    ("nodes", "stored", "option"),
    [
        ("t = Transpose (w) d = DequantizeLinear (t, s) m = MatMul (x, d)", (4, 8), "ste"),
        ("d = DequantizeLinear (w, s) m = MatMul (x, d)", (8, 4), "ste"),
        ("f = Cast <to = 1> (w) d = Mul (f, s) m = MatMul (x, d)", (8, 4), "ste"),
        ("f = Cast <to = 1> (w) p = MatMul (x, f) m = Mul (p, s)", (8, 4), "lora"),
        ("e = Exp (s) f = Cast <to = 1> (w) d = Mul (f, e) m = MatMul (x, d)", (8, 4), "lora"),
    ],
)
def test_the_warning_about_integers_names_an_option_that_trains_them(
    nodes: str, stored: tuple[int, int], option: str
) -> None:
    rng = np.random.default_rng(0)
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 8] x) => (float[2, 4] y) {{ {nodes} y = Add (m, b) }}""")
    arrays = {
        "w": rng.integers(-127, 127, stored).astype(np.int8),
        "s": np.float32(0.02),
        "b": rng.standard_normal(4).astype(np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(x), name) for name, x in arrays.items())
    losses = (LossSpec("mse"),)
    (caution,) = [each for each in build(model, Options(losses=losses)).training.cautions if each.kind == "untrained"]
    assert caution.text.startswith("32 ")
    assert ("quantization='ste'" in caution.text) == (option == "ste")
    assert ("lora=3" in caution.text) == (option == "lora")
    more = Options(losses=losses, quantization="ste") if option == "ste" else Options(losses=losses, lora=LoraSpec(3))
    built = build(model, more)
    assert not [each for each in built.training.cautions if each.kind == "untrained"]
    assert any({8, 3} & set(built.graph.initializers[name].dims) for name in built.training.trained)
