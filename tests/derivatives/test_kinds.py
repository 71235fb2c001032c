"""`derive`: every kind of derivative against torch.func, on five nets that PyTorch has exported, and on small models.

Jacobians and Hessians are computed in all forms: all rows at once, in blocks of rows and row by row."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, parser
from torch import Tensor, nn
from torch.nn import functional as F

from onnxgrad_cli.derivatives import jacobian
from onnxgrad_cli.derivatives.kinds import KINDS, derive
from onnxgrad_cli.emission import node_emitter
from onnxgrad_cli.errors import UnsupportedError, UsageError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.renaming import rename
from onnxgrad_cli.metadata import read_derived
from onnxgrad_cli.options import Options
from onnxgrad_cli.verification.derivative_proof import prove_derived
from tests.autodiff.rows import ROWS as OPERATORS
from tests.facts import raises
from tests.harness import Case, fed, forward_model, sample

ROWS = ("jacobian", "hessian")
DIAGONALS = ("hessian-diagonal", "laplacian")
FORMS = {"at once": jacobian.MAX_VECTORIZED_ELEMENTS, "in blocks": 200, "row by row": -1}

Arrays = dict[str, np.ndarray]


# -- the nets -------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Two inputs, log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.log_softmax(self.c(torch.tanh(self.a(x) + torch.sigmoid(self.b(z)))), -1)


class Convolutional(nn.Module):
    """Strided and grouped convolutions, both poolings, both normalizations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 2, stride=2, groups=2)
        self.layer, self.c = nn.LayerNorm(4), nn.Linear(4, 3)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(torch.sigmoid(self.norm(self.a(x))), 2)
        y = F.avg_pool2d(torch.tanh(self.b(F.pad(y, (2, 2, 0, 0)))), (1, 2), (1, 1))
        return self.c(self.layer(torch.flatten(y[..., :2], 1)[:, ::2]))


class Transformer(nn.Module):
    """One block: attention of two heads, GELU, LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).reshape(x.shape[0], 3, 3, 2, 2)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attention = torch.softmax(q @ k.transpose(-1, -2) / 2**0.5, -1) @ v
        x = x + self.out(attention.transpose(1, 2).reshape(x.shape[0], 3, 4))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Recurrent(nn.Module):
    """An LSTM over three steps, and its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.c = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, cell) = self.lstm(x)
        return self.c(y), cell[0]


class Elementwise(nn.Module):
    """Broadcasting, gathering, choosing, cumulating; three outputs, one of which does not depend on z."""

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        taken = x[:, torch.tensor([2, 0, 0, 1])] * z
        chosen = torch.where(taken > 0, torch.exp(taken), taken**3) / (1 + z * z)
        gathered = torch.gather(chosen, 1, torch.tensor([[0, 3]]).expand(x.shape[0], 2))
        return (
            torch.cat([gathered.cumsum(1), torch.sin(x)], 1),
            torch.einsum("bi,bj->bij", chosen, x).mean((1, 2)),
            x.prod(1) + x.amax(1),
        )


@dataclass(frozen=True)
class Net:
    """A module, and what it is exported with.

    Attributes:
        module: in evaluation mode.
        inputs: by name; the first axis is the batch.
        outputs: the names of its outputs.
        model: the exported model with a batch of fixed size, and with any.
        tolerance: the largest error, relative to the largest entry.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: Sequence[str]
    model: dict[str, ModelProto]
    tolerance: float

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters, in the order in which the model has them."""
        found = dict(self.module.named_parameters())
        names = [tensor.name for tensor in self.model["fixed"].graph.initializer if tensor.name in found]
        assert len(names) == len(found)
        return {name: found[name].detach() for name in names}

    @property
    def values(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.weights}

    @property
    def feeds(self) -> Arrays:
        return {name: value.numpy() for name, value in self.inputs.items()}

    def function(self, wrt: Sequence[str], of: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
        """The outputs `of`, as a function of `wrt`."""

        def call(*given: Tensor) -> tuple[Tensor, ...]:
            values = {**self.values, **dict(zip(wrt, given, strict=True))}
            weights = {name: values[name] for name in self.weights}
            found = torch.func.functional_call(self.module, weights, tuple(values[name] for name in self.inputs))
            outputs = found if isinstance(found, tuple) else (found,)
            return tuple(y for name, y in zip(self.outputs, outputs, strict=True) if name in of)

        return call


def _export(module: nn.Module, inputs: dict[str, Tensor], outputs: Sequence[str], dynamic: bool) -> ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(inputs.values()), file, dynamo=False, opset_version=17, do_constant_folding=False,
            input_names=list(inputs), output_names=list(outputs), training=torch.onnx.TrainingMode.PRESERVE,
            dynamic_axes={name: {0: "batch"} for name in inputs} if dynamic else None,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


NETS = {
    # onnxruntime has no kernels in float64 for Conv, Erf and LSTM
    "perceptron": (Perceptron, {"x": (2, 4), "z": (2, 3)}, ["y"], torch.float64),
    "convolutional": (Convolutional, {"x": (2, 2, 4, 4)}, ["y"], torch.float32),
    "transformer": (Transformer, {"x": (2, 3, 4)}, ["y"], torch.float32),
    "recurrent": (Recurrent, {"x": (2, 3, 2)}, ["y", "cell"], torch.float32),
    "elementwise": (Elementwise, {"x": (2, 3), "z": (2, 4)}, ["u", "v", "w"], torch.float64),
}


@cache
def net(name: str) -> Net:
    kind, shapes, outputs, dtype = NETS[name]
    torch.manual_seed(0)
    module = kind().to(dtype).eval()
    with torch.no_grad():
        for weight in module.parameters():  # the exporter makes one of two that are equal, as ones are
            weight += 0.3 * torch.randn_like(weight)
    inputs = {key: torch.randn(shape, dtype=dtype) for key, shape in shapes.items()}
    model = {sizes: _export(module, inputs, outputs, sizes == "any") for sizes in ("fixed", "any")}
    return Net(module, inputs, outputs, model, 1e-9 if dtype == torch.float64 else 5e-5)


# -- what PyTorch says ----------------------------------------------------------------------------------------------


def added(kind: str, net: Net, wrt: Sequence[str], of: Sequence[str]) -> Arrays:
    """Values of the inputs that a kind of derivative adds, by name."""
    rng = np.random.default_rng(1)
    if kind == "vjp":
        outputs = net.function([], net.outputs)()
        like = {f"{n}_grad": y for n, y in zip(net.outputs, outputs, strict=True) if n in of}
    else:
        suffix = {"jvp": "tangent", "hvp": "vector", "gnvp": "vector"}.get(kind)
        like = {f"{name}_{suffix}": net.values[name] for name in wrt} if suffix else {}
    return {name: rng.standard_normal(x.shape).astype(x.detach().numpy().dtype) for name, x in like.items()}


def expected(kind: str, net: Net, wrt: Sequence[str], of: Sequence[str], given: Arrays) -> Arrays:
    """The derivative by torch.func, by the names that `derive` gives."""
    function = net.function(wrt, of)
    of = [name for name in net.outputs if name in of]
    at = tuple(net.values[name] for name in wrt)
    vectors = tuple(torch.from_numpy(value) for value in given.values())
    every = tuple(range(len(wrt)))

    def total(*values: Tensor) -> Tensor:
        return sum((y.sum() for y in function(*values)), torch.zeros((), dtype=at[0].dtype))

    if kind == "vjp":
        found = dict(zip([f"{x}_grad" for x in wrt], torch.func.vjp(function, *at)[1](vectors), strict=True))
    elif kind == "jvp":
        found = dict(zip([f"{y}_tangent" for y in of], torch.func.jvp(function, at, vectors)[1], strict=True))
    elif kind == "hvp":
        gradient = torch.func.grad(total, argnums=every)
        found = dict(zip([f"{x}_hvp" for x in wrt], torch.func.jvp(gradient, at, vectors)[1], strict=True))
    elif kind == "jacobian":
        jacobian = torch.func.jacrev(function, argnums=every)(*at)
        found = {f"{y}_jacobian_{x}": jacobian[i][j] for i, y in enumerate(of) for j, x in enumerate(wrt)}
    elif kind == "gnvp":
        products = torch.func.vjp(function, *at)[1](torch.func.jvp(function, at, vectors)[1])
        found = dict(zip([f"{x}_gnvp" for x in wrt], products, strict=True))
    else:
        hessian = torch.func.hessian(total, argnums=every)(*at)
        found = {f"{x}_hessian_{z}": hessian[i][j] for i, x in enumerate(wrt) for j, z in enumerate(wrt)}
    if kind in DIAGONALS:
        whole = {x: found[f"{x}_hessian_{x}"] for x in wrt}
        diagonals = {x: torch.diagonal(h.reshape(2 * [net.values[x].numel()])) for x, h in whole.items()}
        found = {f"{x}_hessian_diagonal": diagonals[x].reshape(net.values[x].shape) for x in wrt}
        if kind == "laplacian":
            found = {f"{x}_laplacian": diagonals[x].sum() for x in wrt}
    return {name: value.detach().numpy() for name, value in found.items()}


# -- and what ours say ----------------------------------------------------------------------------------------------


def run(model: ModelProto, feeds: Arrays) -> Arrays:
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def compare(found: Arrays, wanted: Arrays, tolerance: float) -> None:
    """Same names in the same order, same shapes, same numbers."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        error = np.abs(found[name] - value).max(initial=0) / max(np.abs(value).max(initial=0), 1e-3)
        assert error <= tolerance, f"{name}: {error:.1e}"


def against_torch(kind: str, name: str, sizes: str, wrt: Sequence[str] = (), of: Sequence[str] = ()) -> ModelProto:
    """Derive, run and compare; returns the model. `wrt` and `of` are names."""
    subject = net(name)
    chosen, ends = wrt or list(subject.inputs), of or subject.outputs
    given = added(kind, subject, chosen, ends)
    model = derive(subject.model[sizes], kind, of=of, wrt=chosen)
    assert [value.name for value in model.graph.input] == [
        *subject.inputs, *(x for x in chosen if x not in subject.inputs), *given
    ]  # fmt: skip
    found = run(model, {**subject.feeds, **given})
    with torch.backends.mkldnn.flags(enabled=False):  # whose LSTM has no forward mode
        wanted = expected(kind, subject, chosen, ends, given)
    compare(found, wanted, subject.tolerance)
    return model


def scans(model: ModelProto) -> int:
    return sum(node.op_type == "Scan" for node in model.graph.node)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(jacobian, "MAX_VECTORIZED_ELEMENTS", FORMS[request.param])
    yield request.param


@pytest.mark.parametrize("sizes", ["fixed", "any"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ROWS + DIAGONALS])
@pytest.mark.thinned(8, 3)
def test_products_agree_with_torch(kind: str, name: str, sizes: str) -> None:
    against_torch(kind, name, sizes)


@pytest.mark.parametrize("sizes", ["fixed", "any"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", ROWS + DIAGONALS)
@pytest.mark.thinned(12, 4)
def test_rows_agree_with_torch(kind: str, name: str, sizes: str, form: str) -> None:
    model = against_torch(kind, name, sizes)
    if form == "row by row":
        assert scans(model)
    elif form == "at once" and name != "recurrent":  # whose steps are a Scan themselves
        assert scans(model) == (len(net(name).inputs) if kind in DIAGONALS and sizes == "any" else 0)


@pytest.mark.parametrize("sizes", ["fixed", "any"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "wrt"),
    [
        ("perceptron", ["z", "a.weight", "c.bias"]),
        ("convolutional", ["x", "a.weight", "norm.bias", "b.weight"]),
        ("transformer", ["second.weight", "up.bias", "down.weight"]),
        ("recurrent", ["x", "lstm.bias_ih_l0", "c.weight"]),
    ],
)
@pytest.mark.thinned(8, 4)
def test_with_respect_to_weights(kind: str, name: str, wrt: list[str], sizes: str) -> None:
    against_torch(kind, name, sizes, wrt)


@pytest.mark.parametrize("of", [["u"], ["w"], ["u", "v"]], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(4)
def test_some_of_several_outputs(kind: str, of: list[str]) -> None:
    against_torch(kind, "elementwise", "any", of=of)


def test_patterns_choose_weights_and_outputs() -> None:
    model = derive(net("perceptron").model["fixed"], "jacobian", wrt=["?.bias"])
    assert [value.name for value in model.graph.input] == ["x", "z", "a.bias", "b.bias", "c.bias"]
    assert [value.name for value in model.graph.output] == [f"y_jacobian_{w}.bias" for w in "abc"]
    model = derive(net("elementwise").model["fixed"], "jvp", of=["[uw]"], wrt=["x"])
    assert [value.name for value in model.graph.output] == ["u_tangent", "w_tangent"]


def test_weights_by_default_for_vjp_alone() -> None:
    subject = net("perceptron")
    for kind in KINDS:
        made = [value.name for value in derive(subject.model["fixed"], kind).graph.input]
        assert set(subject.weights).issubset(made) == (kind == "vjp"), kind


FIRST = {(case.op, case.domain): case for case in reversed(OPERATORS)}


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "any"])
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
@pytest.mark.thinned(10, 4)
def test_both_forms_agree_for_each_operator(case: Case, symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of each operator in the table; the loop is what the tests above and those of the rules prove."""
    if symbolic and not case.symbolic:
        pytest.skip("the row says that it does not run with symbolic axes")
    model = forward_model(case, symbolic)
    at_once = derive(model, "jacobian")
    if scans(at_once):
        pytest.skip("its backward part is written row by row in any case")
    monkeypatch.setattr(jacobian, "MAX_VECTORIZED_ELEMENTS", FORMS["row by row"])
    feeds = fed(model, sample(case))
    found, wanted = (Executor(m, case.executor)(feeds) for m in (at_once, derive(model, "jacobian")))
    compare(found, wanted, 1e-6)


# -- forward mode is reverse mode twice, of which the first is gone -------------------------------------------------


def test_forward_mode_has_nothing_of_the_first_walk() -> None:
    """A tangent through each layer, in the order of the layers, and no second product for a weight."""
    model = derive(net("perceptron").model["fixed"], "jvp")
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Gemm") == 6
    assert operators[:7] == ["Gemm", "Gemm", "Sigmoid", "Add", "Tanh", "Gemm", "LogSoftmax"]
    assert len(operators) <= 22
    assert "ConstantOfShape" not in operators


@pytest.mark.parametrize("name", NETS)
def test_forward_mode_is_fed_tangents_alone_and_all_is_read(name: str) -> None:
    subject = net(name)
    model = derive(subject.model["any"], "jvp")
    assert [i.name for i in model.graph.input] == [*subject.inputs, *(f"{x}_tangent" for x in subject.inputs)]
    needed = {value.name for value in model.graph.output}
    for node in reversed(model.graph.node):
        assert needed.intersection(node.output), node.name
        needed.update(node.input)
        for attribute in node.attribute:
            needed.update(n for inner in attribute.g.node for n in inner.input)
    assert {tensor.name for tensor in model.graph.initializer} <= needed
    if name != "recurrent":  # whose loop back hands out what only the other walk reads
        assert not [name for name in needed if name.endswith("_free")]


# -- corners --------------------------------------------------------------------------------------------------------


def small(body: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{body}')


LINEAR = small("""two (double[2,3] x, double[2] z) => (double[2,3] a, double[2,3] b, double[2] c)
    { a = Add (x, x)  b = Identity (x)  c = Mul (z, z) }""")
X, Z = np.arange(6.0).reshape(2, 3) + 1, np.array([3.0, -2.0])
EYE = np.eye(6).reshape(2, 3, 2, 3)


def test_jacobian_of_what_does_not_depend_and_of_the_input_itself(form: str) -> None:
    compare(
        run(derive(LINEAR, "jacobian"), {"x": X, "z": Z}),
        {
            "a_jacobian_x": 2 * EYE, "a_jacobian_z": np.zeros((2, 3, 2)),
            "b_jacobian_x": EYE, "b_jacobian_z": np.zeros((2, 3, 2)),
            "c_jacobian_x": np.zeros((2, 2, 3)), "c_jacobian_z": np.diag(2 * Z),
        },
        0,
    )  # fmt: skip


def test_hessian_of_what_is_linear(form: str) -> None:
    compare(
        run(derive(LINEAR, "hessian"), {"x": X, "z": Z}),
        {
            "x_hessian_x": np.zeros((2, 3, 2, 3)), "x_hessian_z": np.zeros((2, 3, 2)),
            "z_hessian_x": np.zeros((2, 2, 3)), "z_hessian_z": 2 * np.eye(2),
        },
        0,
    )  # fmt: skip


def test_products_of_what_does_not_depend_and_of_the_input_itself() -> None:
    rng = np.random.default_rng(0)
    u, v = rng.standard_normal((2, 3)), rng.standard_normal(2)
    point = {"x": X, "z": Z}
    compare(
        run(derive(LINEAR, "jvp"), {**point, "x_tangent": u, "z_tangent": v}),
        {"a_tangent": 2 * u, "b_tangent": u, "c_tangent": 2 * Z * v},
        0,
    )
    compare(
        run(derive(LINEAR, "hvp"), {**point, "x_vector": u, "z_vector": v}),
        {"x_hvp": np.zeros((2, 3)), "z_hvp": 2 * v},
        0,
    )
    compare(
        run(derive(LINEAR, "vjp", of=["b", "c"]), {**point, "b_grad": u, "c_grad": v}),
        {"x_grad": u, "z_grad": 2 * Z * v},
        0,
    )
    compare(run(derive(LINEAR, "jvp", of="c", wrt="x"), {**point, "x_tangent": u}), {"c_tangent": np.zeros(2)}, 0)


def test_output_that_is_an_input() -> None:
    """The graph's output and its input are one value: there is no node between them."""
    model = small("same (double[2] x) => (double[2] y) { y = Mul (x, x) }")
    model.graph.output.append(model.graph.input[0])
    compare(
        run(derive(model, "jacobian"), {"x": Z}), {"y_jacobian_x": np.diag(2 * Z), "x_jacobian_x": np.eye(2)}, 0
    )  # fmt: skip
    compare(
        run(derive(model, "jvp"), {"x": Z, "x_tangent": Z}), {"y_tangent": 2 * Z * Z, "x_tangent_1": Z}, 0
    )  # fmt: skip
    compare(run(derive(model), {"x": Z, "y_grad": Z, "x_grad_external": Z}), {"x_grad": 2 * Z * Z + Z}, 0)
    compare(run(derive(model, of="x"), {"x": Z, "x_grad_external": Z}), {"x_grad": Z}, 0)
    compare(run(derive(model, of="x", cotangents="ones"), {"x": Z}), {"x_grad": np.ones(2)}, 0)


def test_one_pattern_is_one_name_not_its_letters() -> None:
    model = small("three (double[2] x, double[2] z, double[2] xz) => (double[2] y) { y = Sum (x, z, xz) }")
    assert [value.name for value in derive(model, wrt="xz", of="y").graph.output] == ["xz_grad"]


@pytest.mark.parametrize("shapes", [((0,), (2, 0)), ((1,), (2, 0)), ((0,), (2, 1)), ((0,), (0, 0)), ((1,), (3, 4))])
def test_sums_decided_at_run_time(shapes: tuple[tuple[int, ...], ...], form: str) -> None:
    """Which axes are broadcast, none of them perhaps of any elements, is known at run time only."""
    model = small("any (double[a] x, double[b, c] z) => (double[d, e] y) { y = Mul (x, z) }")
    x, z = (np.arange(1.0, 1 + np.prod(shape)).reshape(shape) for shape in shapes)
    y, point = x * z, {"x": x, "z": z}
    ways = [np.broadcast_to(w, shape) for w, shape in zip((2.0, 3.0), shapes, strict=True)]
    tangents = dict(zip(("x_tangent", "z_tangent"), ways, strict=True))
    compare(run(derive(model, "jvp"), point | tangents), {"y_tangent": ways[0] * z + x * ways[1]}, 1e-12)
    products = run(derive(model, "hvp"), point | {"x_vector": ways[0], "z_vector": ways[1]})
    assert [products["x_hvp"].shape, products["z_hvp"].shape] == list(shapes)
    jacobian = run(derive(model, "jacobian"), point)
    assert jacobian["y_jacobian_x"].shape == (*y.shape, *x.shape)
    assert jacobian["y_jacobian_z"].shape == (*y.shape, *z.shape)


@pytest.mark.parametrize("shapes", [((5, 1), (5,)), ((5, 3), (1,)), ((5, 3), (3,))])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_one_symbol_has_must_be_equal(kind: str, shapes: tuple[tuple[int, ...], ...], form: str) -> None:
    """PyTorch's exporter gives axes of sizes 5 and 1 one symbol; then no derivative of a wrong shape is computed."""
    model = small("one (double[b, n] x, double[n] z) => (double[b, n] y) { p = Mul (x, z)  y = Tanh (p) }")
    sizes = dict(zip("xz", shapes, strict=True))
    sizes["y"] = np.broadcast_shapes(*shapes)
    derivative = derive(model, kind)
    rng = np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal(sizes[value.name[0]]) for value in derivative.graph.input}
    if shapes[0][1] == shapes[1][0]:
        assert run(derivative, feeds)
    elif kind == "jvp":  # has the right values and shape even so
        assert run(derivative, feeds)["y_tangent"].shape == sizes["y"]
    else:
        with pytest.raises(Exception, match="Reshape"):
            run(derivative, feeds)


def test_every_output_has_a_shape_though_sums_are_decided_at_run_time() -> None:
    model = small("""norm (double[1, 2, 1] x, double[n] s) => (double[a, b, c] y)
        <double half = {0.5}> { q = Mul (s, s)  v = Add (q, half)  y = BatchNormalization (x, s, s, s, v) }""")
    for kind in KINDS:
        onnx.checker.check_model(derive(model, kind), full_check=True)


def test_inputs_with_one_cotangent(form: str) -> None:
    """Both summands get the same value; each tangent and each block of the Hessian counts all the same."""
    model = small("sum (double[2] x, double[2] z) => (double[2] y) { s = Add (x, z)  y = Mul (s, s) }")
    point, s, block = {"x": Z, "z": Z + 1}, 2 * Z + 1, 2 * np.eye(2)
    found = run(derive(model, "jvp"), {**point, "x_tangent": np.array([1.0, 0]), "z_tangent": np.array([5.0, 7])})
    compare(found, {"y_tangent": 2 * s * np.array([6.0, 7])}, 0)
    found = run(derive(model, "hvp"), {**point, "x_vector": np.array([1.0, 0]), "z_vector": np.array([5.0, 7])})
    compare(found, dict.fromkeys(("x_hvp", "z_hvp"), np.array([12.0, 14])), 0)
    compare(run(derive(model, "jacobian"), point), {f"y_jacobian_{x}": np.diag(2 * s) for x in "xz"}, 0)
    compare(run(derive(model, "hessian"), point), {f"{x}_hessian_{z}": block for x in "xz" for z in "xz"}, 0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)], ids=str)
def test_output_of_one_element(shape: tuple[int, ...], form: str) -> None:
    """Its one row is its gradient; of three axes, so that nothing may be lost of the shape [*y, *x]."""
    sizes = ",".join(map(str, shape))
    model = small(f"""one (double[2,3] x) => (double{f"[{sizes}]" if shape else ""} y)
        <int64[{len(shape)}] shape = {{{sizes}}}>
        {{ q = Mul (x, x)  e = Exp (x)  d = Div (q, e)  s = ReduceSum <keepdims = 0> (d)  y = Reshape (s, shape) }}""")
    gradient = ((2 * X - X * X) * np.exp(-X)).reshape(*shape, 2, 3)
    compare(run(derive(model, "jacobian"), {"x": X}), {"y_jacobian_x": gradient}, 1e-12)
    hessian = np.diag(((2 - 4 * X + X * X) * np.exp(-X)).ravel()).reshape(2, 3, 2, 3)
    compare(run(derive(model, "hessian"), {"x": X}), {"x_hessian_x": hessian}, 1e-12)


def test_input_of_one_element(form: str) -> None:
    """One row, whose unit vector is a constant that onnxruntime folds into what it is multiplied with."""
    model = small("one (double[1] x, double[2,3] z) => (double[2,3] y) { y = Div (x, z) }")
    found = run(derive(model, "hessian"), {"x": np.array([3.0]), "z": X})
    second = np.diag((2 * 3.0 / X**3).ravel()).reshape(2, 3, 2, 3)
    mixed = -1 / X**2
    wanted = {
        "x_hessian_x": np.zeros((1, 1)), "x_hessian_z": mixed[None], "z_hessian_x": mixed[..., None],
        "z_hessian_z": second,
    }  # fmt: skip
    compare(found, wanted, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_kept_after_the_derivatives(kind: str) -> None:
    subject = net("elementwise")
    given = added(kind, subject, list(subject.inputs), ["u"])
    plain = derive(subject.model["fixed"], kind, of=["u"])
    kept = derive(subject.model["fixed"], kind, of=["u"], keep_outputs=True)
    own = dict(zip(subject.outputs, (y.numpy() for y in subject.function([], subject.outputs)()), strict=True))
    compare(run(kept, {**subject.feeds, **given}), {**run(plain, {**subject.feeds, **given}), **own}, 1e-12)


@pytest.mark.parametrize("name", ["perceptron", "transformer"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(4)
def test_empty_batch(kind: str, name: str, form: str) -> None:
    """All that has the batch among its axes is empty, and the derivatives with respect to weights are zero.

    Not tried is what onnxruntime itself can't: an LSTM, and Einsum of "bj,bij->bi", end the process, a constant matrix
    can't be multiplied with no matrices, which is how an AveragePool is walked back, and the product of a transposed
    matrix without rows, the second derivative with respect to a weight, is what stood in memory.
    """
    subject = net(name)
    weights = {} if kind in ("hessian", *DIAGONALS) else dict(list(subject.weights.items())[:1])
    model = derive(subject.model["any"], kind, wrt=[*subject.inputs, *weights])

    def emptied(value: Tensor) -> np.ndarray:
        return value.numpy()[:0]

    given = {
        key: emptied(torch.from_numpy(value))
        for key, value in added(kind, subject, list(subject.inputs), subject.outputs).items()
    }
    given |= added(kind, subject, list(weights), []) if kind in ("jvp", "hvp", "gnvp") else {}
    inputs = {key: emptied(value) for key, value in subject.inputs.items()}
    found = run(model, {**inputs, **given})
    outputs = dict(zip(subject.outputs, subject.function([], subject.outputs)(), strict=True))
    shapes = {key: value.shape for key, value in {**inputs, **weights}.items()}
    shapes |= {key: (0, *value.shape[1:]) for key, value in outputs.items()}
    patterns = {"vjp": "{x}_grad", "jvp": "{y}_tangent", "hvp": "{x}_hvp", "jacobian": "{y}_jacobian_{x}"}
    patterns |= {"gnvp": "{x}_gnvp", "hessian-diagonal": "{x}_hessian_diagonal", "laplacian": "{x}_laplacian"}
    pattern, ends = patterns.get(kind, "{y}_hessian_{x}"), subject.inputs if kind == "hessian" else outputs
    wanted = {
        pattern.format(x=x, y=y): (*(shapes[y] if kind in ROWS else ()), *shapes[y if kind == "jvp" else x])
        for y in ends
        for x in [*inputs, *weights]
    }
    wanted = dict.fromkeys(wanted, ()) if kind == "laplacian" else wanted
    assert {key: value.shape for key, value in found.items()} == wanted
    assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_size_of_the_batch_is_found_at_run_time(size: int, form: str) -> None:
    subject = net("elementwise")
    model = derive(subject.model["any"], "jacobian", of=["u"], wrt=["z"])
    values = [torch.randn((size, *value.shape[1:]), dtype=value.dtype) for value in subject.inputs.values()]
    found = run(model, dict(zip(subject.inputs, (value.numpy() for value in values), strict=True)))
    wanted = torch.zeros(size, 5, size, 4, dtype=torch.float64)
    if size:
        wanted = torch.func.jacrev(lambda z: subject.module(values[0], z)[0])(values[1])
    compare(found, {"u_jacobian_z": wanted.numpy()}, 1e-9)


def test_static_size_of_zero() -> None:
    model = small("none (double[0,3] x) => (double[0,3] y) { y = Mul (x, x) }")
    for kind in ROWS:
        (value,) = run(derive(model, kind), {"x": np.zeros((0, 3))}).values()
        assert value.shape == (0, 3, 0, 3)


def test_static_size_of_zero_before_reshape_could_say_it() -> None:
    """From opset 14 on Reshape has `allowzero`; fuzzing has found that the rules took it for granted."""
    model = parser.parse_model("""<ir_version: 7, opset_import: ["": 13]>
        none (float[2,0,4] x) => (float[2,1,4] y) <int64[1] axes = {1}> { y = ReduceSum <keepdims = 1> (x, axes) }""")
    (value,) = run(derive(model, "jacobian"), {"x": np.zeros((2, 0, 4), np.float32)}).values()
    assert value.shape == (2, 1, 4, 2, 0, 4)


def test_derivative_of_a_derivative(form: str) -> None:
    """The Jacobian of the product with the Hessian, both derived, is the third derivative times the vector."""
    model = small("cube (double[2] x) => (double[2] y) { q = Mul (x, x)  y = Mul (q, x) }")
    twice = derive(derive(model, "hvp"), "jacobian", wrt=["x"])
    found = run(twice, {"x": Z, "x_vector": np.array([2.0, 5.0])})
    compare(found, {"x_hvp_jacobian_x": np.diag(6 * np.array([2.0, 5.0]))}, 1e-12)
    again = derive(derive(model, "jacobian"), "jacobian", wrt=["x"])
    third = np.zeros((2, 2, 2))
    third[[0, 1], [0, 1], [0, 1]] = 6 * Z
    compare(run(again, {"x": Z}), {"y_jacobian_x_jacobian_x": third}, 1e-12)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"kind": "jacobain"}, "there is no derivative 'jacobain'", "jacobian"),
        ({"kind": "jvp", "of": ["yy"]}, "'yy'", "y"),
        ({"kind": "jvp", "wrt": ["a.wieght"]}, "'a.wieght'", "a.weight"),
        ({"kind": "vjp", "wrt": ["yy"]}, "'yy'", "y"),
    ],
    ids=str,
)
def test_a_misspelt_name_is_refused(arguments: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        derive(net("perceptron").model["fixed"], **arguments)
    assert message in str(raised.value)
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(("kind", "cotangents"), [("vjp", "one"), ("jvp", "ones"), ("hessian", "keep")])
def test_cotangents_that_mean_nothing_are_refused(kind: str, cotangents: str) -> None:
    with pytest.raises(UsageError, match=f"cotangents.*'{cotangents}'"):
        derive(LINEAR, kind, cotangents=cotangents)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_differentiate_is_refused(kind: str) -> None:
    whole = small("whole (int64[2] i) => (int64[2] y) { y = Mul (i, i) }")
    with raises(UsageError, "no_data"):
        derive(whole, kind)
    no_output = small("count (double[2] x) => (int64[1] y) { y = Shape (x) }")
    with raises(UnsupportedError, "refused"):
        derive(no_output, kind)


def test_the_model_that_is_given_stays_as_it_was() -> None:
    model = net("elementwise").model["any"]
    before = model.SerializeToString()
    for kind in KINDS:
        derive(model, kind, keep_outputs=True)
    assert model.SerializeToString() == before


def test_results_are_named_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk for each of them made a Hessian by many weights take a time that was quadratic in their number."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2] a, float[2] b, float[2] c, float[2] d) => (float[2] y) {
            ab = Mul(a, b) cd = Mul(c, d) p = Mul(ab, cd) y = Tanh(p)
        }""")
    walks = []
    monkeypatch.setattr(node_emitter, "rename", lambda *given: walks.append(given) or rename(*given))
    derive(model, "hessian", wrt="a")
    few = len(walks)
    walks.clear()
    derive(model, "hessian", wrt="*")
    assert len(walks) - few <= 3, "one for each further row that is written in a loop"


@pytest.mark.parametrize(("kind", "value"), [("jacobian", "y"), ("hessian", "Add_out")])
def test_an_input_of_unknown_rank_is_told(kind: str, value: str) -> None:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2] x) => (float[2] y) { s = Sigmoid(x) y = Mul(s, x) }""")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with raises(UnsupportedError, "refused", value):
        derive(model, kind)  # type: ignore[arg-type]
    assert derive(model, kind, options=Options(shapes={"x": [2]})).graph.output  # type: ignore[arg-type]


def test_a_float_that_is_a_size_leaves_a_derivative_unproved() -> None:
    """Its last digits decide how many there are, where it is turned into a whole number."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        g (float[3] x, int64[3] i) => (float[3, 10] y) <float depth = {10}, float[2] values = {1, 3}> {
            h = OneHot(i, depth, values) one = Unsqueeze(x, axis) y = Mul(h, one)
        }"""
    model = parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64([1]), "axis"))
    derived = derive(model, "hessian", wrt="*")
    said = read_derived(derived)
    assert said is not None
    data = {"x": np.ones(3, np.float32), "i": np.arange(3)}
    proof = prove_derived(derived, said, original=model, data=data, seed=1)
    assert proof.verdict != "failed"


@pytest.mark.parametrize("op", ["Gelu", "FastGelu"])
def test_an_output_without_a_type_needs_an_opset_too(op: str) -> None:
    """What stands for an operator may be newer than the model, whatever its outputs are declared as."""
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[2, 3] x) => (float[2, 3] y) {{ y = com.microsoft.{op}(x) }}"""
    model = parser.parse_model(text)
    model.graph.output[0].ClearField("type")
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    found = Executor(derive(model, "vjp", wrt=["x"]), fallback=False)({"x": x, "y_grad": np.ones_like(x)})["x_grad"]
    t = torch.tensor(x, requires_grad=True)
    F.gelu(t, approximate="tanh" if op == "FastGelu" else "none").sum().backward()
    np.testing.assert_allclose(found, t.grad, rtol=1e-4, atol=1e-5)
