"""docs/adding-an-operator.md is run, every block and every command of it, and its exercises are proved."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onnxgrad_cli.autodiff import registry
from onnxgrad_cli.execution.executor import Executor
from onnxgrad_cli.verification.gradients.gradcheck import gradcheck
from tests.autodiff.rows import ROWS
from tests.harness import Case, check_case, with_gradient

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-an-operator.md").read_text()
EXERCISES = ("Sqrt", "Dropout", "Add", "Sub", "Mul", "MatMul", "Gemm", "Tile")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def run(*arguments: str, folder: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}
    command = [sys.executable, "-m", "onnxgrad_cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    with registry.scoped():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my_rules.py and net.onnx, made as the page makes them."""
    folder = tmp_path_factory.mktemp("page")
    (rules,) = (block for block in blocks("python") if block.startswith("# my_rules.py"))
    (folder / "my_rules.py").write_text(rules)
    (text,) = re.findall(r'NET = onnx.parser.parse_model\("""\n(.*?)"""\)', PAGE, re.DOTALL)
    onnx.save(onnx.parser.parse_model(text), folder / "net.onnx")
    return folder


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "docs/adding-an-operator.md", "exec"), {"__name__": "page"})


@pytest.mark.slow
def test_every_command_runs(folder: Path) -> None:
    for line in blocks("sh")[0].splitlines():
        program, *arguments = shlex.split(line)
        assert program == "onnxgrad"
        done = run(*arguments, folder=folder)
        assert done.returncode == 0, done.stderr
    text = (folder / "net.train.onnx.report.md").read_text()
    assert "gradients against differences of the loss" in text and "failed" not in text


@pytest.fixture
def site(tmp_path: Path, folder: Path) -> Path:
    """A folder of installed packages, with one that has the page's entry point."""
    (tmp_path / "my_rules.py").write_text((folder / "my_rules.py").read_text())
    entry_points = tomllib.loads(blocks("toml")[0])["project"]["entry-points"]
    info = tmp_path / "my_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rules\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_an_installed_package_gives_its_rules(folder: Path, site: Path, tmp_path: Path) -> None:
    def built(path: Path) -> set[str]:
        out = tmp_path / "plugin.onnx"
        done = run("build", "net.onnx", "-o", str(out), "--force", "--no-report", folder=folder, path=path)
        assert done.returncode == 0, done.stderr
        return {node.op_type for node in onnx.load(out).graph.node}

    assert "my_rules.squareplus" in run("list", "operators", "Squareplus", "--json", folder=site, path=site).stdout
    other = tmp_path / "other"
    other.mkdir()
    assert "Squareplus" in built(site)
    assert "Squareplus" not in built(other), "without the package the function is written out"


def test_a_broken_package_is_named(folder: Path, site: Path) -> None:
    (site / "my_rules.py").write_text("import nothing_of_this_name\n")
    done = run("build", str(folder / "net.onnx"), "-o", "out.onnx", folder=site, path=site)
    assert done.returncode == 1
    assert "installed package 'my-rules'" in done.stderr and "nothing_of_this_name" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (site / "out.onnx").exists()


# -- what the page teaches, proved ------------------------------------------------------------------------------------


def taught(word: str) -> None:
    """Register what the block with `word` registers."""
    (block,) = (block for block in blocks("python") if word in block)
    exec(compile(block, "docs/adding-an-operator.md", "exec"), {"__name__": "page"})


def test_the_ramp_is_right_and_its_width_is_refused() -> None:
    taught('@rule("Ramp"')
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "my.ops": 1]>
        g (float[N] x, float[1] width) => (float[N] y) { y = my.ops.Ramp(x, width) }
        <domain: "my.ops", opset_import: ["": 18]> Ramp (x, width) => (y) {
          zero = Constant<value = float {0}>()  one = Constant<value = float {1}>()
          part = Div(x, width)  low = Max(part, zero)  y = Min(low, one) }
    """)
    point = {"x": np.array([-1.0, 0.4, 1.3, 5.0]), "width": np.array([2.0])}
    assert gradcheck(model, point, wrt=["x"], order=2) < 1e-6
    with pytest.raises(Exception, match="the width of a Ramp"):
        gradcheck(model, point)


def test_the_definition_is_right() -> None:
    taught('@definition("ScaledTanh"')
    text = """<ir_version: 10, opset_import: ["": 18, "my.ops": 1]>
        g (float[N] x) => (float[N] y) { y = my.ops.ScaledTanh<alpha = 1.5, beta = 0.5>(x) }"""
    backward = with_gradient(onnx.parser.parse_model(text), ["x"], ["y"], "g_")
    x, g = np.array([-1.0, 0.3], np.float32), np.array([1.0, 2.0], np.float32)
    (found,) = Executor(backward)({"x": x, "g_y": g}).keys() - {"y"}
    expected = g * 0.75 * (1 - np.tanh(0.5 * x) ** 2)
    np.testing.assert_allclose(Executor(backward)({"x": x, "g_y": g})[found], expected, 1e-5)


def test_the_list_of_nodes_is_right() -> None:
    taught('@gradient_definition("my.ops", "Cube")')
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18, "my.ops": 1]> g (float[N] x) => (float[N] y) { y = my.ops.Cube(x) }
        <domain: "my.ops", opset_import: ["": 18]> Cube (x) => (y) { s = Mul(x, x) y = Mul(s, x) }
    """)
    assert gradcheck(model, {"x": np.array([-1.0, 0.4, 2.0])}, order=2) < 1e-6


EXERCISE_ROWS = [row for row in ROWS if row.op in EXERCISES and not row.domain]


def test_every_exercise_has_rows() -> None:
    assert {row.op for row in EXERCISE_ROWS} == set(EXERCISES)


@pytest.mark.parametrize("case", EXERCISE_ROWS, ids=str)
@pytest.mark.thinned(3)
def test_exercise(case: Case) -> None:
    """The rows that prove the built-in rules prove those of the page."""
    taught('@rule("Sqrt", override=True)')
    rule = registry.lookup(case.op)
    assert rule is not None and rule.source.startswith("page.")
    if case.opset < rule.needs_opset:
        pytest.skip(f"the rule of the page needs opset {rule.needs_opset}; a build raises the model to it")
    check_case(case)
    if case.symbolic:
        check_case(case, symbolic=True)


@pytest.mark.parametrize(
    "name, text, function",
    [
        ("Sqrt", "y = Sqrt(a)", lambda a, b: torch.sqrt(a)),
        ("Add", "y = Add(a, b)", lambda a, b: a + b),
        ("Sub", "y = Sub(a, b)", lambda a, b: a - b),
        ("Mul", "y = Mul(a, b)", lambda a, b: a * b),
        ("MatMul", "bt = Transpose<perm = [1, 0]>(b) y = MatMul(a, bt)", lambda a, b: a @ b.T),
        ("Gemm", "y = Gemm<alpha = 0.5, beta = 2.0, transB = 1>(a, b, c)", lambda a, b: 0.5 * a @ b.T + 2 * C),
        ("Tile", "y = Tile(a, r)", lambda a, b: a.tile(2, 3)),
        ("Dropout", "y, m = Dropout<seed = 1>(a, p, t)", None),
    ],
)
def test_exercise_against_pytorch(name: str, text: str, function: object) -> None:
    taught('@rule("Sqrt", override=True)')
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]> g (double[N, 4] a, double[M, 4] b) => (y)
        <double[3] c = {{1, 2, 3}}, int64[2] r = {{2, 3}}, double p = {{0.25}}, bool t = {{1}}>
        {{ {text} zero = Sub(b, b) s = ReduceSum(zero) z = Add(y, s) }}
    """)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.DOUBLE, ["P", "Q"]))
    rng = np.random.default_rng(0)
    feeds = {"a": rng.uniform(0.5, 2, (2, 4)), "b": rng.uniform(0.5, 2, (3 if name in ("MatMul", "Gemm") else 2, 4))}
    forward = Executor(model)(feeds)["z"]
    seed = rng.standard_normal(forward.shape)
    backward = with_gradient(model, ["a", "b"], ["z"], "g_")
    found = Executor(backward)({**feeds, "g_z": seed})
    if function is None:  # the mask is the node's own: the values say which were kept
        expected = [np.where(forward != 0, seed / 0.75, 0), np.zeros((2, 4))]
    else:
        tensors = [torch.tensor(feeds[key], requires_grad=True) for key in "ab"]
        outcome = function(*tensors) + 0 * tensors[1].sum()  # type: ignore[operator]
        np.testing.assert_allclose(forward, outcome.detach().numpy(), 1e-12)
        outcome.backward(torch.tensor(seed))
        expected = [tensor.grad.numpy() for tensor in tensors]
    for key, value in zip("ab", expected, strict=True):
        np.testing.assert_allclose(found[f"g_grad_{key}"], value, 1e-10, 1e-12)


C = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def test_the_vocabulary_is_complete() -> None:
    words = (
        "I(i) O(i) GO(i) GI(i) IA ArgDef NodeDef OpDef AttributeProto ConstantScalarNode ConstantVectorNode "
        "ZeroConstantNode HalfConstantNode OneConstantNode HandleBroadcasting ComputeBroadcastBackwardAxes GetShape "
        "AddReduceSumNode IsGradientRequiredForSrcNodeInput IsGradientAvailableForSrcNodeOutput SrcNodeAttributes "
        "SrcNodeOpsetVersion IElemType OElemType RecordStashedTensor REGISTER_ DECLARE_ IMPLEMENT_GRADIENT_BUILDER "
        "NO_GRADIENT SHOULD_NOT_DO_GRADIENT GraphAugmenter"
    )
    table = PAGE[PAGE.index("## The vocabulary") :]
    assert [word for word in words.split() if word not in table] == []


def test_every_name_is_public() -> None:
    import onnxgrad_cli

    names = {
        name.strip()
        for block in blocks("python")
        for names in re.findall(r"from onnxgrad_cli import (.+)", block)
        for name in names.split(",")
    }
    assert names <= set(onnxgrad_cli.__all__) and len(names) > 8
    assert all(callable(getattr(onnxgrad_cli, name)) for name in names)
