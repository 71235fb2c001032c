"""What stands beside a model that onnxruntime-genai's builder has written: genai_config.json, with the model's kind."""

from __future__ import annotations

import re
from pathlib import Path

from onnx import ModelProto

from onnxgrad_cli.common import strict_json
from onnxgrad_cli.ir.modules import GENAI, GENAI_KIND

CONFIG = "genai_config.json"
MOST = 2**20
"""Bytes that the file may have."""


def note_kind(model: ModelProto, path: Path | None) -> None:
    """Note the kind of a model in its metadata, where it goes with the model into other folders.

    Args:
        model: one of the builder's gets an entry, if it has none and the file says what it is; others stay as they are.
        path: where the model was read from.
    """
    if model.producer_name != GENAI or path is None or any(entry.key == GENAI_KIND for entry in model.metadata_props):
        return
    if kind := _kind(path.parent / CONFIG):
        model.metadata_props.add(key=GENAI_KIND, value=kind)


def _kind(path: Path) -> str:
    """What a genai_config.json calls the model: 'phi3'; "" where there is no such file, or it says nothing."""
    try:
        if not path.is_file() or path.stat().st_size > MOST:
            return ""
        kind = strict_json.loads(path.read_bytes())["model"]["type"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):  # whatever it holds, the model stands alone
        return ""
    return kind if isinstance(kind, str) and re.fullmatch(r"[\w.-]{1,64}", kind) else ""
