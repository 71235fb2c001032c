"""`make digests` reports models that change, and does not report renamed modules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import digests


def changed_sources(folder: Path) -> Path:
    """Return a folder with the sources, in which the module of Gemm is renamed and the rule of Relu is changed."""
    shutil.copytree(digests.ROOT / "onnxgrad_cli", folder / "onnxgrad_cli")
    rules = folder / "onnxgrad_cli" / "autodiff" / "rules"
    (rules / "linalg.py").rename(rules / "matrix_products.py")
    text = (rules / "activation.py").read_text()
    assert "g * step(op, y)" in text
    (rules / "activation.py").write_text(text.replace("g * step(op, y)", "g * op.Sign(y)"))
    return folder


@pytest.mark.slow
def test_a_changed_model_is_noticed_and_a_renamed_module_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [
        each
        for each in digests.models(tmp_path, tmp_path / "absent")
        if each.path.stem in ("add", "digits_mlp", "linear_regression")
    ]
    builds = [build for build in digests.builds(models) if build.name.endswith(" standard plain")]
    refused, other, same = (build.name for build in builds)
    before = digests.results(digests.ROOT, builds, tmp_path / "before.json", 1)
    after = digests.results(changed_sources(tmp_path), builds, tmp_path / "after.json", 1)
    assert [text.splitlines()[0] for text in digests.differences(before, after)] == [other]
    assert before[refused]["result"].startswith("exit code 3: error: no weight is left to train")
    assert before[refused]["result"] == after[refused]["result"]

    out = ["-o", str(tmp_path / "train.onnx")]
    command = [sys.executable, "-m", "onnxgrad_cli", "build", *builds[2].words, *out]
    subprocess.run(command, cwd=digests.ROOT, check=True)
    assert before[same]["result"] == digests.digest([tmp_path / "train.onnx"])

    capsys.readouterr()
    assert digests.results(digests.ROOT, builds, tmp_path / "before.json", 1, reuse=True) == before
    assert "0 built" in capsys.readouterr().out


def test_the_subset_has_each_variant_of_a_model_once(tmp_path: Path) -> None:
    models = list(digests.models(tmp_path, tmp_path / "absent"))
    quick = {build.name for build in digests.builds(models, quick=True)}
    assert quick < {build.name for build in digests.builds(models)}
    for model in models:
        found = [name.split()[1:] for name in quick if name.startswith(f"{model.name} ")]
        assert sorted(target for target, _ in found) == sorted(digests.TARGETS)
        assert sorted(variant for _, variant in found) == sorted(digests.VARIANTS)


def test_an_option_has_the_name_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "OTHER_NAMES", {"--newer": ("--newest", "--no-verify")})
    assert list(digests.spelled(["a.onnx", "--newer", "--target"], digests.ROOT)) == [
        "a.onnx",
        "--no-verify",
        "--target",
    ]
    with pytest.raises(SystemExit, match="has no --unknown: add its name there to OTHER_NAMES"):
        list(digests.spelled(["--unknown"], digests.ROOT))
