"""Attribute defaults of operators that the installed onnxruntime has schemas for and onnx has not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from onnxgrad_cli.execution.session import load_onnxruntime
from onnxgrad_cli.ir.domains import plain_domain


def attribute_defaults(op_type: str, domain: str) -> Mapping[str, Any]:
    """Return the attributes of an operator that have a default in the newest schema of the installed onnxruntime."""
    return _all_defaults().get((plain_domain(domain), op_type), {})


@cache
def _all_defaults() -> dict[tuple[str, str], dict[str, Any]]:
    """Read the schemas, which takes 50 ms; their order in the list is not documented."""
    load_onnxruntime()
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    defaults: dict[tuple[str, str], dict[str, Any]] = {}
    for schema in sorted(get_all_operator_schema(), key=lambda schema: schema.since_version):
        found = {name: _default(attribute._default_value) for name, attribute in schema.attributes.items()}
        defaults[plain_domain(schema.domain), schema.name] = {k: v for k, v in found.items() if v is not None}
    return defaults


def _default(serialized: bytes) -> Any:
    """Return the value of a serialized attribute; None for an attribute without a default."""
    attribute = onnx.AttributeProto()
    try:
        attribute.ParseFromString(serialized)
    except DecodeError:  # an attribute without a default has a single newline here
        return None
    value = onnx.helper.get_attribute_value(attribute) if attribute.type else None
    return value.decode(errors="replace") if isinstance(value, bytes) else value
