"""Training in Chromium: the page that `onnxgrad pack` makes, by wasm; gradients by WebGPU, on the processor.

`ONNXGRAD_SCREENSHOTS=docs/assets python -m pytest -m slow tests/web/test_browser.py` makes the screenshots of the docs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad_cli import LossSpec, Options, run_build
from onnxgrad_cli.jobs.export import run_export
from onnxgrad_cli.jobs.pack import run_pack
from tests.older_runtime import Absent
from tests.web import javascript
from tests.web.cases import SAMPLES, batch_of, errors, made, options_of, read_arrays

HERE = Path(__file__).parent
MODULES = javascript.FOLDER / "node_modules"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run() -> list[str | Path]:
    """What runs a program of JavaScript that opens pages: node, the packages, Chromium follow by turns."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    try:
        return [javascript.node(), MODULES, chromium]
    except Absent as why:
        pytest.skip(str(why))


def right(model: Path) -> float:
    data = np.load(SAMPLES / "digits.npz")
    (logits,) = ort.InferenceSession(model).run(None, {"x": data["test_x"]})
    return float((np.argmax(logits, 1) == data["test_y"]).mean())


def packed(folder: Path, **more: Any) -> Path:
    """A folder with the digits CNN, its weights as they were drawn."""
    folder.mkdir(exist_ok=True)
    source = SAMPLES / "digits_cnn.onnx"
    options = Options(losses=(LossSpec("cross-entropy"),), label="y", optimizer="adamw", keep_outputs=True,
                      target="portable")  # fmt: skip
    run_build(source, folder / "train.onnx", options, verify=False, no_report=True)
    data = SAMPLES / "digits.npz"
    run_pack(
        folder / "train.onnx", folder / "site", data=data, prefix="train_", val=data, val_prefix="test_",
        runtime=MODULES / "onnxruntime-web" / "dist", **more,
    )  # fmt: skip
    return folder / "site"


class Quiet(SimpleHTTPRequestHandler):
    """What `python -m http.server` serves with, which tells nothing."""

    def log_message(self, *_: object) -> None:
        pass


class Isolated(Quiet):
    """With the headers that threads of wasm want."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


@contextmanager
def served(site: Path, handler: type[Quiet]) -> Iterator[str]:
    """The address of a folder's files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=site))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def visited(run: list[str | Path], program: str, site: Path, out: Path, handler: type[Quiet]) -> list[str]:
    """What a program tells that visits a site; its screenshots are small, and left where the docs ask for them."""
    node, modules, chromium = run
    with served(site, handler) as url:
        command = [node, HERE / f"{program}.mjs", modules, chromium, url, out]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shots = list(out.glob("*.png"))
    for shot in shots:
        assert shot.stat().st_size < 60_000, "it is for the docs"
        if folder := os.environ.get("ONNXGRAD_SCREENSHOTS"):
            shutil.copy(shot, Path(folder, f"{program}-{shot.name}"))
    assert len(shots) == 3
    return done.stdout.splitlines()


def test_the_page_trains_a_network_with_pools(run: list[str | Path], tmp_path: Path) -> None:
    """From random weights, with nothing but the folder, elsewhere, and a plain server of files; asks nothing of others.

    What is saved is a model that is as good in Python.
    """
    site = packed(tmp_path / "made").rename(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "made")
    before, after = visited(run, "page", site, tmp_path, Quiet)
    assert float(before.split()[-3]) < 30 and float(after.split()[-3]) > 95, after
    run_export(tmp_path / "trained.bin", SAMPLES / "digits_cnn.onnx", tmp_path / "m.onnx", roles=site / "model.json")
    assert right(tmp_path / "m.onnx") == pytest.approx(float(after.split()[-3]) / 100, abs=0.004)


def test_the_drawing_pad_trains(run: list[str | Path], tmp_path: Path) -> None:
    """Digits that are drawn are learned, from a model in onnxruntime's own format.

    What is saved is a model that is as good in Python on those held out.
    """
    site = packed(tmp_path, ort=True)
    (site / "model.onnx").unlink()
    for file in (SAMPLES / "web").iterdir():
        shutil.copy(file, site)
    told = visited(run, "draw", site, tmp_path, Isolated)
    drawn, before, own, after = map(float, re.findall(r"([\d.]+) % right", told[1]))
    assert f"my 2 digits: {drawn} % right; held out: {before} % right" in told[0]
    assert before < 30 and own == 100 and after > 90, told
    run_export(tmp_path / "trained.bin", SAMPLES / "digits_cnn.onnx", tmp_path / "m.onnx", roles=site / "model.json")
    assert right(tmp_path / "m.onnx") == pytest.approx(after / 100, abs=0.004)


def test_the_sample_for_node_trains(run: list[str | Path], tmp_path: Path) -> None:
    site = packed(tmp_path)
    program = tmp_path / "train.mjs"
    shutil.copy(SAMPLES / "node" / "train.mjs", program)
    (tmp_path / "node_modules").symlink_to(MODULES)
    done = subprocess.run([run[0], program, site], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run_export(site / "trained.bin", SAMPLES / "digits_cnn.onnx", tmp_path / "m.onnx", roles=site / "model.json")
    assert right(tmp_path / "m.onnx") > 0.95


@pytest.mark.parametrize("provider", ["wasm", "webgpu"])
def test_gradients_are_pythons(provider: str, run: list[str | Path], tmp_path: Path) -> None:
    """Those of a network with pools, from one run: on WebGPU the processor compiles for some 20 s."""
    node, modules, chromium = run
    options = options_of("digits_cnn", target="portable")
    model = made(tmp_path / "cnn", SAMPLES / "digits_cnn.onnx", batch_of("digits"), options)
    command = [node, HERE / "chromium.mjs", modules, chromium, javascript.TRAINER.parent, provider, model.folder]
    once = {**os.environ, "ONNXGRAD_RUNS": "1"}
    done = subprocess.run(command, env=once, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = model.folder / "refused.txt"
    assert not refused.exists(), refused.read_text()
    assert max(errors(read_arrays(model.folder / "found"), model.expected).values()) < 1e-5
