"""The commands work after a plain `pip install .`. If another package is missing, an error says how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad_cli.common.packages import REQUIREMENTS
from tests.cli_harness import MLP, Shell, save
from tests.genai_form import decoder
from tests.older_runtime import Absent, made

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "train MODEL --loss cross-entropy --label y --data DATA --prefix train_ --val DATA --val-prefix test_ --epochs 1 "
    "--log csv --picture p.html -o trained.onnx",
    "evaluate trained.onnx --loss cross-entropy --label y --data DATA --prefix test_",
    "predict trained.onnx --data DATA --prefix test_ -o predictions.npz",
    "export trained.onnx.run/checkpoint.safetensors --model MODEL -o exported.onnx",
    "train MODEL --loss cross-entropy --label y --data DATA --prefix train_ --lora 2 --adapter adapter.safetensors "
    "--epochs 1 -o lora.onnx",
)


TOP_LEVEL = (
    ".ci .github .gitignore .editorconfig .pre-commit-config.yaml .pre-commit-hooks.yaml benchmarks docs onnxgrad_cli "
    "sample_models tests tools CHANGELOG.md CITATION.cff CODE_OF_CONDUCT.md CONTRIBUTING.md LICENSE Makefile README.md "
    "SECURITY.md pyproject.toml zensical.toml"
).split()


def test_the_top_level_holds_no_stray_file() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    assert {name.partition("/")[0] for name in listed.stdout.splitlines()} <= set(TOP_LEVEL)


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from onnxgrad_cli.__main__ import main
main()
"""


def run_commands(program: list[str], folder: Path) -> None:
    """Run `COMMANDS` on a sample model, each in its own process."""
    samples = ROOT / "sample_models"
    for command in COMMANDS:
        words = command.replace("MODEL", str(samples / "digits_cnn.onnx")).replace("DATA", str(samples / "digits.npz"))
        done = subprocess.run([*program, *words.split()], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (folder / "exported.onnx").exists() and (folder / "predictions.npz").exists()


@pytest.mark.slow
def test_the_commands_run_without_optional_packages(tmp_path: Path) -> None:
    modules = {*REQUIREMENTS, "llvmlite"}
    run_commands([sys.executable, "-c", BLOCKED.format(modules=modules)], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("ONNXGRAD_OFFLINE" in os.environ, reason="ONNXGRAD_OFFLINE is set: nothing is downloaded")
def test_a_plain_installation_runs_the_commands(tmp_path: Path) -> None:
    try:
        python = Path(made("onnxgrad", sys.executable, tmp_path / "plain", (str(ROOT),)))
    except Absent as absent:
        pytest.skip(str(absent))
    run_commands([str(python.with_name("onnxgrad"))], tmp_path)
    assert subprocess.run([python, "-c", "import tools"], cwd=tmp_path, capture_output=True).returncode == 1


PICTURES = """<ir_version: 8, opset_import: ["": 17]>
m (float[batch, 3, 8, 8] x) => (float[batch, 2] y) <float[3, 2] w = {1, -2, 3, 4, 5, -6}>
{ p = GlobalAveragePool(x) f = Flatten(p) y = MatMul(f, w) }"""
MISSING = {
    "PIL": "train pictures.onnx --data pictures --loss cross-entropy",
    "jinja2": "train tokens.onnx --data chat.jsonl --tokenizer tokenizer.json --loss causal-lm",
    "pyarrow": "train mlp.onnx --data data.parquet",
    "scipy": "train mlp.onnx --data data.npz --recompute optimal:1B",
    "tensorboardX": "train mlp.onnx --data data.npz --log tensorboard",
    "tokenizers": "train tokens.onnx --data chat.jsonl --tokenizer tokenizer.json --loss causal-lm",
}
"""Module -> a command that requires its package. The packages for runs of several processes are tested elsewhere."""


def test_each_optional_package_is_required_by_a_command() -> None:
    assert MISSING.keys() | {"mpi4py", "torch"} == REQUIREMENTS.keys()


@pytest.mark.parametrize("module", MISSING)
def test_a_missing_package_is_named_before_the_first_step(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, capsys)
    save(MLP, Path("mlp.onnx"))
    np.savez("data.npz", x=np.ones((9, 4), np.float32), label=np.ones((9, 2), np.float32))
    save(PICTURES, Path("pictures.onnx"))
    onnx.save(decoder(3), "tokens.onnx")
    Path("data.parquet").touch()
    Path("chat.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    if module == "jinja2":
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save("tokenizer.json")
    Path("pictures/a").mkdir(parents=True)
    Path("pictures/a/1.png").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    missing = shell(*MISSING[module].split())
    assert missing.code == 2 and f"requires the package {module.replace('PIL', 'pillow')}" in missing.err, missing.err
    assert f"hint: pip install '{REQUIREMENTS[module]}'" in missing.err
    assert not any(log.stat().st_size for log in tmp_path.glob("*.run/*.jsonl")) and "epoch 1" not in missing.err
