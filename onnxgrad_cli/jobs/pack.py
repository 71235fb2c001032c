"""Write a folder with all files that a web page needs to train a model. Any server of static files can serve it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad_cli.common import checks
from onnxgrad_cli.common.flags import job
from onnxgrad_cli.common.inputs import protect_inputs
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.data.dataset import Data, open_data
from onnxgrad_cli.data.input_types import input_types_of, ranges_of
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.errors import UsageError, conflict, missing_file, missing_value, unreadable
from onnxgrad_cli.execution.attribute_failures import attribute_failures
from onnxgrad_cli.execution.session import ort_format, take_out
from onnxgrad_cli.files import AtomicWriteGroup, ModelSource, check_target, make_folder, read_model, stage_model, told
from onnxgrad_cli.files.start_values import (
    ALIGNMENT,
    KEPT,
    TYPED_ARRAYS,
    check_places,
    lacking,
    little_endian,
    stage_values,
    values_beside,
)
from onnxgrad_cli.metadata import describe
from onnxgrad_cli.verification.written_file import refused

MODEL, ORT_MODEL, DATA_JSON, DATA_BIN, RUNTIME = "model.onnx", "model.ort", "data.json", "data.bin", "ort"
SCRIPT = "page.js"
PAGE_FOLDER = Path(__file__).parents[1] / "page"
PAGE = ("trainer.mjs", "matches.mjs", SCRIPT, "index.html")
WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
"""The files of onnxruntime-web with which a page computes on the GPU, too. `WASM` lists the files for the CPU."""


@attribute_failures
@job
def run_pack(
    model: ModelSource,
    out: str | Path,
    *,
    data: str | Path,
    prefix: str = "",
    val: str | Path | None = None,
    val_prefix: str = "",
    runtime: str | Path | None = None,
    webgpu: bool = False,
    ort: bool = False,
    force: bool = False,
    tell: Tell = silent,
) -> list[Path]:
    """Write a page that trains a model in the browser, with the model, the data and the runtime.

    Args:
        model: a training model with an optimizer. Weights that are stored in the model are moved to a file beside it.
        out: the folder, which is created if it is missing.
        data: the training data; see `onnxgrad train`.
        prefix: the prefix of the inputs' names in the data, such as 'train_'.
        val: the validation data, with the prefix `val_prefix`.
        runtime: the folder dist of the npm package onnxruntime-web, whose files are copied. Without it, the user must
            copy them to the folder's `ort`.
        webgpu: copy the files for the GPU too.
        ort: also write the model in onnxruntime's own format. The page then opens this file, because that is faster.
        force: replace files that onnxgrad did not write.
        tell: receives progress messages.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: the model has no optimizer, the data don't fit it, or an existing file would be replaced.
        OnnxgradError: a file can't be read or written, or onnxruntime does not open the model.
    """
    out, data = checks.path("out", out), checks.path("data", data)
    val, runtime = checks.path_or_none("val", val), checks.path_or_none("runtime", runtime)
    protect_inputs(data, val)
    if ort and webgpu:
        raise conflict(
            "`ort` can't be combined with `webgpu`, because it optimizes the model for the CPU", "leave one of them out"
        )
    proto, path = read_model(model)
    roles = describe(proto)
    if not roles.optimizer:
        raise missing_value("the training model has no optimizer", "build it with `optimizer=NAME`")
    elsewhere = lacking(proto, roles)
    values = values_beside(path, elsewhere) if elsewhere else {}
    bare, stored = take_out(proto, [name for name, role in roles.inputs.items() if role in KEPT], path)
    if why := refused(bare, path):
        raise unreadable(f"onnxruntime does not open the model: {why}", "build it again")
    values = {**roles.begun({**values, **stored}), **stored, **values}
    types, ranges = input_types_of(proto), ranges_of(proto)
    opened = partial(open_data, inputs=types, ranges=ranges, terms=roles.losses, tell=tell)
    known = Preprocessing.of_model(proto)
    parts = {"train": opened(data, prefix=prefix, known=known)}
    if val is not None:
        known = known.with_more(parts["train"].preprocessing(roles.losses))
        parts["val"] = opened(val, prefix=val_prefix, known=known, trains=False)
    copies = _copies(out, runtime, webgpu)
    make_folder(out, "`out`")
    head = out / MODEL
    _check(head, copies, path, force)
    if runtime is None:
        tell(f"copy {', '.join(WASM)} from the folder dist of onnxruntime-web to '{out / RUNTIME}'", 0)
    else:
        make_folder(out / RUNTIME, "`out`")
    with AtomicWriteGroup(head, bound=True) as switch:
        beside = [*stage_values(switch, bare, values, head, ORT_MODEL if ort else ""), *_stage_data(switch, out, parts)]
        if ort:
            beside.append(head.with_name(ORT_MODEL))
            switch.stage(beside[-1], methodcaller("write", ort_format(bare)))
        files = stage_model(switch, bare, head, path)
        for target, source in copies.items():
            with told(source):
                switch.stage(target, methodcaller("write", source.read_bytes()))
        switch.commit()
    return [*files, *beside, *copies]


def _check(head: Path, copies: Iterable[Path], source: Path | None, force: bool) -> None:
    """Check that no file would be replaced, except for those of a page that onnxgrad wrote. Links are refused, too.

    Args:
        head: the model.
        copies: the paths of the files that are copied to the model's folder or below.
        source: the file of the model that is read.
        force: replace files that onnxgrad did not write.
    """
    check_target(head, None, source, force)
    check_places(head, force)
    within = head.with_name(RUNTIME)
    if within.is_symlink():
        raise UsageError(
            f"'{within}' is a link to a place outside the page's folder", "remove it", code="unwritable_file"
        )
    ours = force or (head.exists() and _is_page(head.with_name(SCRIPT)))
    for file in (*(head.with_name(name) for name in (ORT_MODEL, DATA_JSON, DATA_BIN)), *copies):
        if file.parent.exists():
            check_target(file, None, source, ours)


def _is_page(script: Path) -> bool:
    """Return True if a script begins with the first line of onnxgrad's script, so that onnxgrad wrote its page."""
    own = (PAGE_FOLDER / script.name).read_bytes()
    return script.is_file() and script.read_bytes().startswith(own.splitlines()[0])


def _copies(out: Path, runtime: Path | None, webgpu: bool) -> dict[Path, Path]:
    """Return the files to copy for the page and its runtime: target path -> source path."""
    found = {out / name: PAGE_FOLDER / name for name in PAGE}
    if runtime is None:
        return found
    for name in (*WASM, *(WEBGPU if webgpu else ())):
        if not (runtime / name).is_file():
            hint = "name the folder dist of the npm package: node_modules/onnxruntime-web/dist"
            raise missing_file(f"`runtime`: there is no '{runtime / name}'", hint)
        found[out / RUNTIME / name] = runtime / name
    return found


def _stage_data(switch: AtomicWriteGroup, out: Path, parts: Mapping[str, Data]) -> list[Path]:
    """Add a file with the arrays of all samples, and a JSON file that describes the arrays, to a group of files."""
    said: dict[str, dict[str, Any]] = {}
    chunks: list[bytes] = []
    end = 0
    for part, data in parts.items():
        for name, array in data.batch(np.arange(len(data))).items():
            chunks.append(bytes(-end % ALIGNMENT))
            end += len(chunks[-1])
            kind = array.dtype.name
            said.setdefault(part, {})[name] = {
                "array": TYPED_ARRAYS[kind], "dims": array.shape, "size": array.size, "offset": end,
            }  # fmt: skip
            chunks.append(little_endian(array))
            end += len(chunks[-1])
    switch.stage(out / DATA_JSON, methodcaller("write", json.dumps(said).encode()))
    switch.stage(out / DATA_BIN, methodcaller("write", b"".join(chunks)))
    return [out / DATA_JSON, out / DATA_BIN]
