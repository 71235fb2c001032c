"""Node, and the packages that the tests run there: one process of several installs them into build/node, once."""

from __future__ import annotations

import shutil
import subprocess

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
