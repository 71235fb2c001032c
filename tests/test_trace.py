"""`python -m tools.trace` prints the functions of a build in the order of their calls."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_build_has_four_steps(tmp_path: Path) -> None:
    model = ROOT / "sample_models" / "linear_regression.onnx"
    command = [sys.executable, "-m", "tools.trace", "build", str(model), "-o", str(tmp_path / "t.onnx")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (names,) = re.findall(r"^jobs/build\.py: (.*)", done.stdout, re.MULTILINE)
    steps = ["run_build", "plan_build", "transform", "prove", "write"]
    assert [name for name in names.split(", ") if name in steps] == steps
    assert re.search(r"^ *\d{3,4} functions +\d{2,3} files  in all", done.stdout, re.MULTILINE)
