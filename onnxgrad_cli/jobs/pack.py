"""A folder that holds all that a page needs to train a model, for any server of static files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import onnxgrad_cli
from onnxgrad_cli.common import checks
from onnxgrad_cli.common.inputs import keep
from onnxgrad_cli.common.narration import Tell, silent
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.execution.judged import judged
from onnxgrad_cli.execution.ort_format import ort_format
from onnxgrad_cli.execution.session import take_out
from onnxgrad_cli.files import ModelSource, Switch, check_target, make_folder, read_model, stage_model, told
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
from onnxgrad_cli.training.data.dataset import Data, open_data
from onnxgrad_cli.training.data.input_types import input_types_of, ranges_of
from onnxgrad_cli.training.data.preprocessing import Preprocessing
from onnxgrad_cli.verification.written import refused

MODEL, ORT_MODEL, DATA_JSON, DATA_BIN, RUNTIME = "model.onnx", "model.ort", "data.json", "data.bin", "ort"
SCRIPT = "page.js"
PAGE = ("trainer.mjs", "matches.mjs", SCRIPT, "index.html")
WASM = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WEBGPU = ("ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm")
"""The files of onnxruntime-web that a page loads, by what computes."""


@judged
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
    """Write a page that trains a model in the browser, with the model, data and the runtime.

    Args:
        model: a training model with an optimizer; where its weights are stored in it, they are taken out.
        out: the folder; it is made where it is missing.
        data: what to train on; see `onnxgrad train`.
        prefix: what the names in the data have before those of the inputs, such as 'train_'.
        val: what to evaluate on, with `val_prefix`.
        runtime: the folder dist of the npm package onnxruntime-web, whose files are copied; without it they are to be
            put into the folder's `ort`.
        webgpu: copy those that compute on the GPU too.
        ort: write the model in onnxruntime's own format, too, which the page then opens, in less time.
        force: replace files that onnxgrad did not write.
        tell: takes what is narrated.

    Returns:
        The files written, the model first.

    Raises:
        UsageError: the model has no optimizer, the data don't fit it, or a file would be replaced that must not be.
        OnnxgradError: a file can't be read or written, or onnxruntime does not open the model.
    """
    out, data = checks.path("out", out), checks.path("data", data)
    val, runtime = checks.path_or_none("val", val), checks.path_or_none("runtime", runtime)
    keep(data, val)
    if ort and webgpu:
        raise UsageError("`ort` is optimized for the processor, and `webgpu` uses the GPU", "leave one of them out")
    proto, path = read_model(model)
    roles = describe(proto)
    if not roles.optimizer:
        raise UsageError("the training model has no optimizer", "build it with `optimizer=NAME`")
    elsewhere = lacking(proto, roles)
    values = values_beside(path, elsewhere) if elsewhere else {}
    bare, stored = take_out(proto, [name for name, role in roles.inputs.items() if role in KEPT], path)
    if why := refused(bare, path):
        raise OnnxgradError(f"onnxruntime does not open the model: {why}", "build it again")
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
        tell(f"put {', '.join(WASM)} of onnxruntime-web's folder dist into '{out / RUNTIME}'", 0)
    else:
        make_folder(out / RUNTIME, "`out`")
    with Switch(head, bound=True) as switch:
        beside = [*stage_values(switch, bare, values, head, ORT_MODEL if ort else ""), *_stage_data(switch, out, parts)]
        if ort:
            beside.append(head.with_name(ORT_MODEL))
            switch.stage(beside[-1], partial(_write, data=ort_format(bare)))
        files = stage_model(switch, bare, head, path)
        for target, source in copies.items():
            with told(source):
                switch.stage(target, partial(_write, data=source.read_bytes()))
        switch.commit()
    return [*files, *beside, *copies]


def _check(head: Path, copies: Iterable[Path], source: Path | None, force: bool) -> None:
    """Refuse to replace files of others, but those of a page that onnxgrad has packed, and to write through a link.

    Args:
        head: the model.
        copies: what is copied to its folder and below.
        source: the model that is read.
        force: replace files of others.
    """
    check_target(head, None, source, force)
    check_places(head, force)
    within = head.with_name(RUNTIME)
    if within.is_symlink():
        raise UsageError(f"'{within}' is a link, which leads out of the page's folder", "remove it")
    ours = force or (head.exists() and _is_page(head.with_name(SCRIPT)))
    for file in (*(head.with_name(name) for name in (ORT_MODEL, DATA_JSON, DATA_BIN)), *copies):
        if file.parent.exists():
            check_target(file, None, source, ours)


def _is_page(script: Path) -> bool:
    """Whether a script begins as that of a page does which onnxgrad has packed."""
    own = (Path(onnxgrad_cli.__file__).parent / "page" / script.name).read_bytes()
    return script.is_file() and script.read_bytes().startswith(own.splitlines()[0])


def _copies(out: Path, runtime: Path | None, webgpu: bool) -> dict[Path, Path]:
    """Target -> source, of the page's files and the runtime's."""
    folder = Path(onnxgrad_cli.__file__).parent / "page"
    found = {out / name: folder / name for name in PAGE}
    if runtime is None:
        return found
    for name in (*WASM, *(WEBGPU if webgpu else ())):
        if not (runtime / name).is_file():
            hint = "name the folder dist of the npm package: node_modules/onnxruntime-web/dist"
            raise UsageError(f"`runtime`: there is no '{runtime / name}'", hint)
        found[out / RUNTIME / name] = runtime / name
    return found


def _stage_data(switch: Switch, out: Path, parts: Mapping[str, Data]) -> list[Path]:
    """Write the samples one array after the other, and what they are."""
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
    switch.stage(out / DATA_JSON, partial(_write, data=json.dumps(said).encode()))
    switch.stage(out / DATA_BIN, partial(_write, data=b"".join(chunks)))
    return [out / DATA_JSON, out / DATA_BIN]


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
