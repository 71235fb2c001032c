"""Read and check the header of a safetensors file, before the safetensors library parses the file.

Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from onnxgrad_cli.common import strict_json

MAX_BYTES = 25_000_000
"""Maximum size of a header in bytes, as in Hugging Face's JavaScript reader. For 10,000 tensors, it takes 1 MB."""


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Return the header: name of a tensor -> its description, and '__metadata__' -> the metadata.

    The safetensors library would use the last of two tensors with the same name, and accept a header of any size.

    Args:
        file: the file, at its start.

    Raises:
        ValueError: the header is too long, cut off or not a JSON object, or two tensors have the same name.
    """
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_BYTES:
        raise ValueError(f"its header has {size:,} bytes, but at most {MAX_BYTES:,} are read")
    text = file.read(size)
    if len(text) < size:
        raise ValueError("it ends within its header")
    header = strict_json.loads(text)
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError("its header is not a JSON object")
    return header
