"""A training model is a model: built again on its own gradients, it has their gradients, for every operator.

Here the whole pipeline runs twice, on what it has written itself; the measure is central differences of the first
training model's gradients. Each of these is judged by its squared distance from random numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import NodeProto

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.autodiff.reverse import differentiate
from onnxgrad_cli.builder import TrainingModel, build
from onnxgrad_cli.emission.emitter import Op
from onnxgrad_cli.errors import UnsupportedError
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.ir.graph import Graph
from onnxgrad_cli.ir.node import FORWARD, ROLE
from onnxgrad_cli.ir.node_values import with_bodies
from onnxgrad_cli.ir.type_inference import Contradiction
from onnxgrad_cli.ir.types import Arrays, is_float
from onnxgrad_cli.losses.spec import LossSpec
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.options import Options
from onnxgrad_cli.passes.prepare import prepare
from onnxgrad_cli.record import Training
from onnxgrad_cli.verification.gradients.gradcheck import directional
from tests.autodiff.definitions.test_attention import one_node
from tests.autodiff.rows import ROWS, by_operator, few, others
from tests.cli_harness import MLP, Shell, save
from tests.conftest import Each
from tests.facts import raises
from tests.harness import Case, Const, fed, forward_model, sample, wanted_inputs

SEQUENCES = {"SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceAt", "ConcatFromSequence",
             "SplitToSequence", "SequenceEmpty"}  # fmt: skip

SMOOTH = [row for row in ROWS if row.second_order or row.op in SEQUENCES or row.opset < 16]
"""The rows with a second derivative: the pipeline unpacks sequences and raises opsets, as the harness does not."""

REFUSED = {"SequenceEmpty": "requires the value of the sequence '.*' in each iteration"}
"""What has a gradient but not that of its gradient, and why."""

SINGLE = 1e-5
"""Rows with a step above it know float32 only."""

FLOATS = (np.float16, np.float32, np.float64)


def first_of_each(rows: list[Case]) -> list[Case]:
    return list({(row.domain, row.op): row for row in reversed(rows)}.values())[::-1]


SYMBOLIC = [row for row in SMOOTH if row.symbolic]
FIRST, FIRST_SYMBOLIC = first_of_each(SMOOTH), first_of_each(SYMBOLIC)
OTHERS, OTHERS_SYMBOLIC = (
    others(by_operator(rows), by_operator(first)) for rows, first in ((SMOOTH, FIRST), (SYMBOLIC, FIRST_SYMBOLIC))
)


@dataclass
class Twice:
    """A training model, the one built on its gradients, and what both are fed."""

    first: onnx.ModelProto
    second: TrainingModel
    feeds: Arrays
    wanted: list[str]
    targets: Arrays
    executor: str = "onnxruntime"

    def check(self, tolerance: float, step: float = 1e-6, floor: float = 1e-3) -> Arrays:
        """Compare with differences of the first model's gradients; returns the second model's, by input."""
        rng = np.random.default_rng(3)
        run = Executor(self.first, self.executor)

        def loss(point: Arrays) -> float:
            outputs = run(fed(self.first, point))
            return float(sum(np.sum(np.square(outputs[name] - target)) for name, target in self.targets.items()))

        labels = {f"u_{name}": target for name, target in self.targets.items()}
        model = self.second.model
        onnx.checker.check_model(model, full_check=self.executor == "onnxruntime")  # the others may know no float64
        found = Executor(model, self.executor)(fed(model, {**self.feeds, **labels}))
        size = loss(self.feeds)
        np.testing.assert_allclose(found[self.second.training.loss], size, rtol=1e-9 if step < SINGLE else 1e-4)
        gradients = {name: found[self.second.training.gradients[name]] for name in self.wanted}
        for name, gradient in gradients.items():
            assert gradient.shape == self.feeds[name].shape, f"{name}: {gradient.shape}"
        for _ in range(2):
            difference = directional(loss, self.feeds, gradients, rng, step, floor * size)
            assert difference.error <= tolerance, difference
        return gradients


def twice(
    model: onnx.ModelProto, feeds: Arrays, names: list[str], losses: tuple[LossSpec, ...], *,
    freeze: tuple[str, ...] = (), executor: str = "onnxruntime",
) -> Twice:  # fmt: skip
    """Build, and build again on all gradients of the first; the inputs `names` and the labels are differentiated."""
    rng = np.random.default_rng(7)
    built = build(model, Options(losses=losses, reduction="sum", grad_of_input=tuple(names), freeze=freeze))
    first = onnx.ModelProto()
    first.CopyFrom(built.model)
    gradients = list(built.training.gradients.values())
    labels = [spec.label for spec in losses if spec.label in feeds]
    values = Executor(first, executor)(fed(first, feeds))
    targets = {}
    for name in gradients:
        size = max(1.0, np.max(np.abs(values[name]), initial=0.0))
        targets[name] = np.asarray(rng.standard_normal(values[name].shape) * size, values[name].dtype)
    judged = tuple(LossSpec("mse", name, f"u_{name}") for name in gradients)
    wanted = [*names, *labels]
    left = {tensor.name for tensor in first.graph.initializer}
    options = Options(
        losses=judged, reduction="sum", grad_of_input=tuple(wanted), freeze=tuple(n for n in freeze if n in left)
    )
    return Twice(first, build(built.model, options), feeds, wanted, targets, executor)


def twice_of(case: Case, loss: str, symbolic: bool = False) -> Twice:
    model, feeds = forward_model(case, symbolic), sample(case)
    floats = [output.name for output in model.graph.output if is_float(output.type)]
    losses = tuple(LossSpec(loss, name, f"t_{name}") for name in floats)
    if loss == "mse":
        rng = np.random.default_rng(5)
        values = Executor(model, case.executor)(fed(model, feeds))
        feeds |= {f"t_{n}": np.asarray(rng.standard_normal(values[n].shape), values[n].dtype) for n in floats}
    constants = enumerate(case.inputs)
    freeze = tuple(f"x{i}" for i, x in constants if isinstance(x, Const) and x.array.dtype in FLOATS)
    return twice(model, feeds, wanted_inputs(case), losses, freeze=freeze, executor=case.executor)


def check(case: Case, symbolic: bool = False) -> None:
    if case.op in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[case.op]):
            twice_of(case, "mse", symbolic)
        return
    twice_of(case, "mse", symbolic).check(factor(case) * case.tolerance, case.step, case.floor)


def factor(case: Case) -> int:
    """How much larger an error may be in the second order: more where float32 gives the differences."""
    return 10 if case.step < SINGLE else 30


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.thinned(4, 2)
def test_every_operator(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", FIRST_SYMBOLIC, ids=str)
@pytest.mark.thinned(5, 4)
def test_every_operator_with_symbolic_axes(case: Case) -> None:
    check(case, symbolic=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("operator", OTHERS)
def test_the_other_rows(operator: str, each: Each) -> None:
    each(OTHERS[operator], check)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("operator", OTHERS_SYMBOLIC)
def test_the_other_rows_with_symbolic_axes(operator: str, each: Each) -> None:
    each(OTHERS_SYMBOLIC[operator], partial(check, symbolic=True))


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.thinned(3, 3)
def test_what_is_linear_has_a_second_gradient_of_zero(case: Case) -> None:
    """The sum of an output that is linear in x has a gradient that does not depend on x: that is said, and is zero."""
    if case.op in REFUSED:
        pytest.skip("refused, as above")
    found = twice_of(case, "identity")
    gradients = found.check(factor(case) * case.tolerance, case.step, case.floor)
    said = {caution.subject for caution in found.second.training.cautions if caution.kind == "zero gradient"}
    assert not any(np.any(gradients[name]) for name in said & gradients.keys())
    assert case.op not in LINEAR or set(found.wanted) <= said


LINEAR = set(
    "Add Sub Neg Sum Mean Identity Transpose Reshape Concat Split Slice Gather Pad ReduceSum ReduceMean Expand Squeeze "
    "Unsqueeze Flatten Tile Trilu CumSum AveragePool GlobalAveragePool Resize Upsample Cast".split()
)


# -- definitions ----------------------------------------------------------------------------------------------------


def heads(*shape: int) -> np.ndarray:
    return np.random.default_rng([9, *shape]).standard_normal(shape)


MS = "com.microsoft"
HIDDEN = {"x": heads(2, 4, 6), "gamma": heads(6), "beta": heads(6)}
QKV = {"q": heads(2, 2, 4, 3), "k": heads(2, 2, 5, 3), "v": heads(2, 2, 5, 3)}

DEFINED = [
    ("Attention", "", QKV, {}),
    ("Attention", "", {**QKV, "k": heads(2, 2, 4, 3), "v": heads(2, 2, 4, 3)}, {"is_causal": 1, "softcap": 2.0}),
    ("Attention", "", {**QKV, "q": heads(2, 4, 4, 3), "mask": heads(4, 5)}, {"scale": 0.3}),
    ("LayerNormalization", "", HIDDEN, {}),
    ("LayerNormalization", "", {"x": HIDDEN["x"], "gamma": heads(4, 6), "beta": None}, {"axis": 1, "epsilon": 0.1}),
    ("Swish", "", {"x": heads(2, 3)}, {"alpha": 1.5}),
    ("BiasGelu", MS, {"x": heads(2, 6), "bias": heads(6)}, {}),
    ("FastGelu", MS, {"x": heads(2, 6), "bias": heads(6)}, {}),
    ("Gelu", MS, {"x": heads(2, 6)}, {}),
    ("QuickGelu", MS, {"x": heads(2, 6)}, {"alpha": 1.2}),
    ("FusedMatMul", MS, {"a": heads(3, 2), "b": heads(3, 4)}, {"transA": 1, "alpha": 0.5}),
    ("FusedGemm", MS, {"a": heads(3, 2), "b": heads(2, 4), "c": heads(4)}, {"activation": "Tanh"}),
    (
        "FusedConv",
        MS,
        {"x": heads(1, 2, 5, 5), "w": heads(3, 2, 2, 2), "b": heads(3)},
        {"activation": "Sigmoid", "kernel_shape": [2, 2]},
    ),
    ("SkipLayerNormalization", MS, {"x": HIDDEN["x"], "skip": heads(2, 4, 6), "gamma": heads(6)}, {}),
    ("SkipSimplifiedLayerNormalization", MS, {"x": HIDDEN["x"], "skip": heads(2, 4, 6), "gamma": heads(6)}, {}),
    ("SimplifiedLayerNormalization", "", {"x": HIDDEN["x"], "gamma": heads(6)}, {"axis": -1}),
    ("MultiHeadAttention", MS, {"q": heads(2, 4, 6), "k": heads(2, 5, 6), "v": heads(2, 5, 6)}, {"num_heads": 2}),
    ("Attention", MS, {"x": HIDDEN["x"], "w": heads(6, 18), "b": heads(18)}, {"num_heads": 2}),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("op", "domain", "inputs", "attributes"), DEFINED, ids=[f"{d}:{op}" for op, d, *_ in DEFINED])
@pytest.mark.thinned(3)
def test_what_is_defined_by_other_operators(op, domain, inputs, attributes, symbolic) -> None:
    if symbolic and (op, domain) == ("Attention", MS):
        pytest.skip("the sizes of its heads come from the shape of its weights")
    model, feeds = one_node(op, inputs, ("y",), attributes, opset=24, domain=domain, symbolic=symbolic)
    twice(model, feeds, list(feeds), (LossSpec("identity"),)).check(1e-5)


# -- types that onnx infers wrongly or not at all, and that a second build has to find again ---------------------------


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_an_ellipsis_may_broadcast_at_run_time(sizes: tuple[int, int]) -> None:
    """onnx says that the product has the first operand's symbol: `b` would then not be summed over what it spans."""
    text = """
<ir_version: 10, opset_import: ["": 18]>
g (double[n, 2, 3] x, double[p, 2, 3] z, double[n, 2] b) => (double[q, r] y)
{
  e = Einsum<equation = "...i,...i">(x, z)
  y = Mul(e, b)
}
"""
    (n, p), rng = sizes, np.random.default_rng(1)
    feeds = {name: rng.standard_normal(shape) for name, shape in {"x": (n, 2, 3), "z": (p, 2, 3), "b": (n, 2)}.items()}
    twice(onnx.parser.parse_model(text), feeds, list(feeds), (LossSpec("identity"),)).check(1e-5)


def test_what_follows_a_group_normalization_is_typed() -> None:
    """onnx infers no type for it, and then takes whatever reads it for a contradiction."""
    text = """
<ir_version: 10, opset_import: ["": 21]>
g (double[n, 4, 3] x, double[4] s, double[4] b) => (double[n, 4, 3] y)
{
  g1 = GroupNormalization<num_groups = 2, stash_type = 11>(x, s, b)
  a = Tanh(g1)
  g2 = GroupNormalization<num_groups = 4, stash_type = 11>(a, s, b)
  y = Mul(g2, g2)
}
"""
    rng = np.random.default_rng(2)
    feeds = {name: rng.standard_normal(shape) for name, shape in {"x": (2, 4, 3), "s": (4,), "b": (4,)}.items()}
    twice(onnx.parser.parse_model(text), feeds, list(feeds), (LossSpec("identity"),)).check(1e-5)


def test_a_contradiction_is_still_one() -> None:
    text = """
<ir_version: 10, opset_import: ["": 21]>
g (float[2, 4, 3] x, float[4] s, float[5] w) => (float[n] y)
{
  g1 = GroupNormalization<num_groups = 2>(x, s, s)
  y = Add(g1, w)
}
"""
    with raises(Contradiction, "failed", "Add_y"):
        build(onnx.parser.parse_model(text), Options(grad_of_input=("x",)))


# -- closure --------------------------------------------------------------------------------------------------------


def emitted(case: Case, symbolic: bool) -> Iterator[tuple[NodeProto, int]]:
    """Every node that the rules write for a row, those of bodies included, and the opset it is written at."""
    graph = Graph(forward_model(case, symbolic))
    prepare.normalise(graph)
    prepare.infer_and_lower(graph, Training())
    op = Op(graph)
    floats = [name for name in graph.output_names if is_float(graph.types[name])]
    for name in floats:
        graph.add_input(f"g_{name}", graph.types[name])
    differentiate(graph, {name: op.val(f"g_{name}") for name in floats}, wanted_inputs(case), op)
    for node in with_bodies(op.nodes):
        yield node, graph.opset(node.domain) or 1


EVERY_ROW = (
    pytest.param(symbolic, len(ROWS), marks=[pytest.mark.slow, pytest.mark.long]) for symbolic in (False, True)
)


@pytest.mark.parametrize(("symbolic", "most"), [(False, 3), *EVERY_ROW])
def test_rules_write_only_what_has_a_rule(symbolic: bool, most: int) -> None:
    rows = [row for each in few(by_operator(ROWS), most).values() for row in each if row.symbolic or not symbolic]
    kinds = {(node.op_type, node.domain, opset) for row in rows for node, opset in emitted(row, symbolic)}
    assert len({kind[0] for kind in kinds}) > 80
    assert {domain for _, domain, _ in kinds} == {""}
    unknown = [kind for kind in kinds if (rule := registry.lookup(*kind)) is None or rule.refusal]
    assert [kind for kind in unknown if registry.lookup_definition(*kind) is None and not has_body(*kind)] == []


def has_body(op_type: str, domain: str, opset: int) -> bool:
    """Whether the standard itself writes the operator in others, as which it is differentiated."""
    schema = onnx.defs.get_schema(op_type, opset, domain)
    return schema.has_function or schema.has_context_dependent_function


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONNXGRAD_")]:
        monkeypatch.delenv(name)
    save(MLP, tmp_path / "m.onnx")
    return Shell(tmp_path, capsys)


def test_three_orders_from_the_command_line(shell: Shell) -> None:
    """Every build proves its gradients, in float64, against differences of its loss."""
    steps = [
        ("m.onnx", "a.onnx", "y", "label", "loss", "x_grad"),
        ("a.onnx", "b.onnx", "x_grad", "second", "loss_1", "x_grad_1"),
        ("b.onnx", "c.onnx", "x_grad_1", "third", "loss", "x_grad_2"),  # nobody reads the first: its name is free
    ]
    weights = ["w1", "b1", "w2"]
    for source, target, judged, label, loss, gradient in steps:
        made = shell("build", source, "--output", judged, "--label", label, "--grad-of-input", "*", "-o", target)
        assert made.code == 0, made.err
        assert shell("check", target).code == 0
        model = onnx.load(target)
        onnx.checker.check_model(model, full_check=True)
        roles = describe(model)
        assert roles.loss == loss
        assert roles.gradients["x"] == gradient
        assert set(roles.gradients) >= {"x", "w1", "b1", "w2"}
        assert [name for name, role in roles.inputs.items() if role == "weight"] == weights
    assert [value.name for value in model.graph.input] == ["x", "label", "second", "third", *weights]


def test_the_label_of_the_first_build_keeps_its_name(shell: Shell) -> None:
    assert shell("build", "m.onnx", "--grad-of-input", "*", "-o", "a.onnx").code == 0
    made = shell("build", "a.onnx", "--output", "x_grad", "--grad-of-input", "*", "-o", "b.onnx")
    assert made.code == 0, made.err
    assert list(describe(onnx.load("b.onnx")).inputs)[:3] == ["x", "label", "label_1"]
    named = shell("build", "a.onnx", "--output", "x_grad", "--label", "x", "-o", "c.onnx")
    assert named.code == 2
    assert named.facts == ("wrong_value", "label", "x")
    assert "--label" in named.err
    assert not Path("c.onnx").exists()


def test_parts_are_those_of_the_last_build(shell: Shell) -> None:
    """What an earlier build wrote belongs to the model: no node of it is still called loss or backward."""
    assert shell("build", "m.onnx", "--grad-of-input", "*", "-o", "a.onnx").code == 0
    assert shell("build", "a.onnx", "--output", "x_grad", "--loss", "identity", "--grad-of-input", "*").code == 0
    known = {node.name for node in onnx.load("a.onnx").graph.node}
    for node in onnx.load("a.train.onnx").graph.node:
        tagged = {entry.key for entry in node.metadata_props} & {ROLE, FORWARD}
        assert not tagged if node.name in known else ROLE in tagged or node.op_type in ("Shape", "ConstantOfShape")
