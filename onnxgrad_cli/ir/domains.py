"""The domain of the standard's operators, which has two names: "" and "ai.onnx"."""

from __future__ import annotations

STANDARD = "ai.onnx"
"""The long name of the standard's domain."""


def is_standard(domain: str) -> bool:
    """Whether a domain is that of the standard's operators, by either name."""
    return domain in ("", STANDARD)


def plain_domain(domain: str) -> str:
    """The domain, the standard's by its short name ""."""
    return "" if domain == STANDARD else domain


def short_name(op_type: str, domain: str) -> str:
    """An operator with its domain, if that is not the standard's: 'Relu', 'com.microsoft::Gelu'."""
    return op_type if is_standard(domain) else f"{domain}::{op_type}"


def full_name(op_type: str, domain: str) -> str:
    """An operator with its domain, as 'ai.onnx::Relu'."""
    return f"{domain or STANDARD}::{op_type}"
