"""Read and check the header of a safetensors file before the library parses the file.

Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from onnxgrad_cli.common import strict_json

MAX_BYTES = 25_000_000
"""Bytes of a header: the bound of Hugging Face's reader in JavaScript. 10,000 tensors take one million."""


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Return the header: the description of each tensor by name, and metadata as '__metadata__'.

    The library takes the last of two tensors with one name, and any bytes that a header claims.

    Args:
        file: the file, at its start.

    Raises:
        ValueError: the header is too long, cut off, no JSON object, or names two tensors alike.
    """
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_BYTES:
        raise ValueError(f"its header has {size:,} bytes, and at most {MAX_BYTES:,} are read")
    text = file.read(size)
    if len(text) < size:
        raise ValueError("it ends within its header")
    header = strict_json.loads(text)
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError("its header is no JSON object")
    return header
