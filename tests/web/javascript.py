"""Node, and the packages that the tests run there: one process of several installs them into build/node, once."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.older_runtime import ROOT, Absent

FOLDER = ROOT / "build" / "node"
PACKAGES = ("onnxruntime-node@1.30.0", "onnxruntime-web@1.30.0", "playwright-core@1")
TRAINER = ROOT / "onnxgrad_cli" / "page" / "trainer.mjs"


def node() -> str:
    """The program node, once FOLDER has the packages.

    Raises:
        Absent: it can't be had here.
    """
    import fcntl  # there is none but on Unix

    found, npm = shutil.which("node"), shutil.which("npm")
    if not found or not npm:
        raise Absent("there is no node, or no npm, to run JavaScript with")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "installed").exists():
            # without the variable, the package wants to download libraries for CUDA
            done = subprocess.run(
                [npm, "install", "--no-audit", "--no-fund", *PACKAGES],
                cwd=FOLDER, capture_output=True, text=True, env={**os.environ, "ONNXRUNTIME_NODE_INSTALL": "skip"},
            )  # fmt: skip
            if done.returncode:
                raise Absent(f"onnxruntime-node can't be installed: {done.stderr.strip().splitlines()[-1:]}")
            (FOLDER / "installed").touch()
    return found
