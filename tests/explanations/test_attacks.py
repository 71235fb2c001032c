"""FGSM and PGD against the same steps in PyTorch, and what is told of them against a run of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onnxgrad_cli.common.choices import Norm
from onnxgrad_cli.data import SampleOptions
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.attack import run_attack
from onnxgrad_cli.jobs.derive import run_derive
from onnxgrad_cli.jobs.explain import run_explain
from onnxgrad_cli.options.attack import Fooling
from tests.cli_harness import Shell
from tests.explanations import nets
from tests.facts import raises

X = nets.samples()
LABELS = np.array([3, 0, 4, 1, 1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.save(tmp_path_factory.mktemp("net"), y=LABELS)


def unit(change: torch.Tensor) -> torch.Tensor:
    return change / change.flatten(1).norm(dim=1)[:, None, None, None]


def by_pytorch(labels: np.ndarray, epsilon: float, steps: int, size: float, norm: str, sign: float = 1) -> np.ndarray:
    """PGD from the samples themselves; FGSM is one step of epsilon."""
    x, moved = torch.tensor(X), torch.tensor(X)
    for _ in range(steps):
        moved.requires_grad_()
        loss = torch.nn.functional.cross_entropy(nets.Twin()(moved), torch.tensor(labels), reduction="sum")
        (gradient,) = torch.autograd.grad(sign * loss, moved)
        change = moved.detach() + size * (gradient.sign() if norm == "inf" else unit(gradient)) - x
        if norm == "inf":
            change = change.clamp(-epsilon, epsilon)
        else:
            change = unit(change) * change.flatten(1).norm(dim=1).clamp(max=epsilon)[:, None, None, None]
        moved = (x + change).clamp(0, 1)
    return moved.numpy()


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize(("method", "steps", "size"), [("fgsm", 1, 0.1), ("pgd", 7, 0.03)])
@pytest.mark.parametrize("targeted", [None, 2])
def test_the_samples_are_those_of_pytorch(
    files: tuple[Path, Path], norm: Norm, method: Any, steps: int, size: float, targeted: int | None
) -> None:
    more: Any = {"steps": steps, "step_size": size} if method == "pgd" else {}
    fooling = Fooling(method, 0.1, norm=norm, targeted=targeted, clip=(0, 1), start=False, **more)
    found = run_attack(*files, fooling=fooling, label="y", verify=False)
    aim = LABELS if targeted is None else np.full(5, targeted)
    expected = by_pytorch(aim, 0.1, steps, size, norm, 1 if targeted is None else -1)
    np.testing.assert_allclose(found.inputs["x"], expected, rtol=1e-5, atol=1e-5)


def test_clip_takes_samples_that_rounding_leaves_outside(files: tuple[Path, Path], tmp_path: Path) -> None:
    x = X.copy()
    x[0, 0, 0, :2] = -1.9e-9, 1 + 1.2e-7
    np.savez(tmp_path / "rounded.npz", x=x)
    found = run_attack(files[0], tmp_path / "rounded.npz", fooling=Fooling(clip=(0, 1)), verify=False)
    assert found.inputs["x"].min() >= 0 and found.inputs["x"].max() <= 1
    x[0, 0, 0, 0] = -1e-4
    np.savez(tmp_path / "outside.npz", x=x)
    with pytest.raises(UsageError, match="outside 0 to 1"):
        run_attack(files[0], tmp_path / "outside.npz", fooling=Fooling(clip=(0, 1)), verify=False)


def test_what_is_told_is_what_the_model_says_of_what_is_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "adversarial.npz"
    found = run_attack(*files, out, Fooling("pgd", 0.3), verify=False)  # the labels are its own answers
    session = onnxruntime.InferenceSession(files[0])
    before, after = (session.run(None, {"x": x})[0].argmax(1) for x in (X, np.load(out)["x"]))
    assert found.accuracy_before == 1 and found.accuracy_after == (before == after).mean()
    assert found.success == (before != after).mean() > 0
    moved = np.abs(np.load(out)["x"] - X)
    assert 0.1 < moved.max() <= 0.3 + 1e-6 and found.distances.max() == pytest.approx(moved.max())
    again = run_attack(*files, out, Fooling("pgd", 0.3), sample=[2], verify=False)
    np.testing.assert_allclose(again.inputs["x"][0], found.inputs["x"][2], atol=1e-6)


def test_an_input_may_have_any_name(files: tuple[Path, Path], tmp_path: Path) -> None:
    """numpy.savez takes the file itself by this name."""
    model = nets.model()
    model.graph.input[0].name = model.graph.node[0].input[0] = "file"
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "file.npy", X)
    data, out = tmp_path / "data", tmp_path / "adversarial.npz"
    data.mkdir()
    (tmp_path / "file.npy").rename(data / "file.npy")
    for _ in range(2):  # what we have written may be replaced
        run_attack(tmp_path / "m.onnx", data, out, verify=False)
    plain = run_attack(*files, verify=False)
    with np.load(out) as found:
        np.testing.assert_allclose(found["file"], plain.inputs["x"], atol=1e-6)


def test_a_softmax_at_the_end_changes_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = nets.model()
    model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["p"]))
    model.graph.output[0].name = "p"
    onnx.save(model, tmp_path / "p.onnx")
    plain, soft = (run_attack(each, files[1], label="y", verify=False) for each in (files[0], tmp_path / "p.onnx"))
    np.testing.assert_allclose(plain.inputs["x"], soft.inputs["x"], atol=1e-6)


def test_samples_without_a_gradient_are_told(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = nets.model()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(-1e3), "low"))
    model.graph.node.insert(4, onnx.helper.make_node("Add", ["deep", "low"], ["dead"]))
    model.graph.node[5].input[0] = "dead"
    onnx.save(model, tmp_path / "dead.onnx")
    told: list[str] = []
    found = run_attack(tmp_path / "dead.onnx", files[1], verify=False, tell=lambda text, level: told.append(text))
    assert found.vanishing == 5 and found.success == 0
    assert any("does not show that the model is robust: Relu 'layer' saturates" in text for text in told)


NAMES = ["ant", "bee", "cat", "dog", "eel"]


def test_an_attack_has_one_run_of_seed_0_unless_asked_otherwise(files: tuple[Path, Path]) -> None:
    """One short step from a random place: of several runs another one would have the highest loss."""
    fooling = {"epsilon": 1e-3, "steps": 1, "step_size": 1e-4}
    found, same, other = (
        run_attack(*files, fooling=Fooling("pgd", **fooling, **more), verify=False).inputs["x"]  # type: ignore[arg-type]
        for more in ({}, {"restarts": 1, "seed": 0}, {"restarts": 2})
    )
    np.testing.assert_array_equal(found, same)
    assert not np.array_equal(found, other)


def test_restarts_go_on_until_the_target_is_found(tmp_path: Path) -> None:
    """Another class than the label, which is wrong for every sample here, is no success of a targeted attack."""
    files = nets.save(tmp_path, y=np.zeros(5, np.int64))
    session = onnxruntime.InferenceSession(files[0])
    hits = []
    for restarts in (1, 12):
        fooling = Fooling("pgd", 0.3, targeted=2, restarts=restarts, steps=2)
        found = run_attack(*files, fooling=fooling, label="y", verify=False)
        hits.append(session.run(None, {"x": found.inputs["x"]})[0].argmax(1) == 2)
    assert np.all(hits[1] >= hits[0]) and hits[1].sum() > hits[0].sum()


@pytest.fixture
def named(tmp_path: Path, files: tuple[Path, Path]) -> tuple[Path, Path]:
    """The network with the names of its classes, as a training or Ultralytics has stored them."""
    model = nets.model()
    model.metadata_props.add(key="names", value=str(dict(enumerate(NAMES))))
    onnx.save(model, tmp_path / "named.onnx")
    return tmp_path / "named.onnx", files[1]


def test_a_class_is_called_by_the_name_that_the_model_stores(
    named: tuple[Path, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    by_name, by_number = (run_attack(*named, fooling=Fooling(targeted=each), verify=False) for each in ("cat", 2))
    assert by_name.targeted == 2 and "predicts class 2 (cat)" in by_name.words
    np.testing.assert_array_equal(by_name.inputs["x"], by_number.inputs["x"])
    explained = run_explain(*named, class_="cat", verify=False)
    assert explained.classes.tolist() == [2] * 5 and explained.name_of(0) == "cat"
    assert "the score of class 2 (cat) in 'logits'" in explained.words
    derived = run_derive(named[0], tmp_path / "d.onnx", wrt=["x"], class_="cat", verify=False).model
    plain = run_derive(files[0], tmp_path / "e.onnx", wrt=["x"], class_=2, verify=False).model
    assert derived.graph == plain.graph
    for call in (
        lambda: run_attack(*named, fooling=Fooling(targeted="cot"), verify=False),
        lambda: run_explain(*named, class_="cot", verify=False),
        lambda: run_derive(named[0], tmp_path / "f.onnx", class_="cot"),
    ):
        with raises(UsageError, "unknown_name", "cot"):
            call()
    with raises(UsageError, "wrong_value", "class_", "cat"):
        run_attack(*files, fooling=Fooling(targeted="cat"), verify=False)
    with raises(UsageError, "wrong_value", "targeted='argmax'"):
        run_attack(*named, fooling=Fooling(targeted="argmax"), verify=False)


@pytest.mark.parametrize("name", ["epsilon", "step_size"])
def test_no_distance_is_beyond_all_numbers(name: str) -> None:
    with raises(UsageError, "wrong_value", name, "float32"):
        Fooling(method="pgd", **{name: 1e308})


INTEGERS = {
    "a table": """(int64[N, 2] ids) => (float[N, 2] y) <float[3, 2] table = {1, -2, 3, 4, 5, 6}, int64[1] along = {1}>
        { rows = Gather(table, ids) y = ReduceSum<keepdims = 0>(rows, along) }""",
    "a Cast": """(uint8[N, 2] ids) => (float[N, 2] y) <float[2, 2] w = {1, -2, 3, 4}>
        { h = Cast<to = 1>(ids) y = MatMul(h, w) }""",
    "a Cast, and a mask": """(uint8[N, 2] ids, bool[N, 2] mask) => (float[N, 2] y)
        <float[2, 2] w = {1, -2, 3, 4}, float zero = {0}>
        { h = Cast<to = 1>(ids) s = MatMul(h, w) y = Where(mask, s, zero) }""",
}


@pytest.mark.parametrize("model", list(INTEGERS))
def test_integers_have_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> net {INTEGERS[model]}'), "m.onnx")
    ids = np.array([[0, 1], [2, 1]])
    table = np.array([[1, -2], [3, 4], [5, 6]], np.float32)
    np.savez("x.npz", ids=ids.astype(np.uint8), mask=np.ones((2, 2), bool), rows=table[ids])
    for words in ((), ("--wrt", "ids")):
        result = shell("attack", "m.onnx", "--data", "x.npz", "--json", *words)
        error = result.document["error"]
        assert result.code == 2
        assert "no float inputs, and integers such as token ids have no gradient: 'ids' is" in error["message"]
        assert error["hint"].startswith('python -c "import onnx; ')
    code, use = error["hint"].removeprefix('python -c "').split('" cuts the model behind the ')
    exec(code)
    part = use.split("attack '")[1].split("'")[0]
    columns = use.split(" with ")[1].split() if " with " in use else []
    after = shell("attack", part, "--data", "x.npz", "--json", "--epsilon", "1", *columns)
    assert after.code == 0 and after.json["accuracy"]["before"] == 1, after.err


@pytest.mark.parametrize(
    ("nodes", "output"),
    [("y = Cast<to = 1>(x)", "y"), ("f = Cast<to = 1>(x) y = Mul(f, f)", 'y"$(id)')],
    ids=["nothing is behind the cut", "a name that a shell would run"],
)
def test_a_model_that_can_not_be_cut_needs_a_float_input(tmp_path: Path, nodes: str, output: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        net (int64[N, 2] x) => (float[N, 2] y) {{ {nodes} }}""")
    model.graph.output[0].name = model.graph.node[-1].output[0] = output
    np.savez(tmp_path / "x.npz", x=np.array([[0, 1]]))
    with raises(UsageError, "wrong_type", "x", "int64", "2") as told:
        run_attack(model, tmp_path / "x.npz")
    assert "python -c" not in (told.value.hint or "")


def test_a_name_that_two_outputs_have_at_different_places_is_no_class(tmp_path: Path) -> None:
    model = nets.model()
    model.metadata_props.add(key="onnxgrad.classes", value='{"logits": ["a", "b"], "other": ["b", "a"]}')
    with raises(UsageError, "ambiguous", "b"):
        run_derive(model, tmp_path / "d.onnx", class_="b")


def test_samples_that_were_normalised_are_not_normalised_again_unsaid(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        net (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, -2, 3, 4}> { y = MatMul(x, w) }""")
    np.savez(tmp_path / "x.npz", x=X[:, 0, 0, :2])
    told: list[str] = []
    how: Any = {"verify": False, "tell": lambda text, _: told.append(text)}
    run_attack(model, tmp_path / "x.npz", tmp_path / "a.npz", **how)
    assert not any("normalised already" in each for each in told)
    asked = SampleOptions(normalize=("0.5/0.5",))
    run_attack(model, tmp_path / "x.npz", tmp_path / "b.npz", samples=asked, **how)
    assert "b.npz' holds model inputs that are already normalized: read it with `normalize='none'`" in told[-1]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steps": 3}, "require pgd"),
        ({"clip": (1, 0)}, "the second larger"),
        ({"clip": (0, 0.5)}, "outside 0 to 0.5"),
        ({"targeted": 9}, "0 to 4"),
        ({"norm": "1"}, "none of"),
        ({"epsilon": -1}, "epsilon"),
    ],
)
def test_what_does_not_fit_is_refused(files: tuple[Path, Path], asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_attack(*files, fooling=Fooling(**asked), verify=False)
    assert says in f"{caught.value.message} {caught.value.hint}"
