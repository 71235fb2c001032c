"""Node, and the packages that the tests run there: one process of several installs them into build/node, once."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.older_runtime import ROOT, Absent

FOLDER = ROOT / "build" / "node"
TRAINER = ROOT / "onnxgrad_cli" / "page" / "trainer.mjs"


def node() -> str:
    """The program node, once FOLDER has the packages.

    Raises:
        Absent: it can't be had here.
    """
    import fcntl  # there is none but on Unix

    found = shutil.which("node")
    if not found or not shutil.which("npm") or not shutil.which("make"):
        raise Absent("there is no node, npm or make, to run JavaScript with")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["make", "build/node/installed"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise Absent(f"onnxruntime-node can't be installed: {done.stderr.strip().splitlines()[-1:]}")
    return found


def looked(script: Path, page: Path, *out: Path) -> Any:
    """What a script sees of a page in Chromium; if it takes pictures, they go to the folder `out`.

    The test that asks is skipped where Node or Chromium is missing.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    try:
        program = [node(), str(script), str(FOLDER / "node_modules"), chromium]
    except Absent as why:
        pytest.skip(str(why))
    done = subprocess.run([*program, page, *out], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
