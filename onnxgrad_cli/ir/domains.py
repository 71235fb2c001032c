"""Names of the domains of the standard's operators. Its main domain has two: "" and "ai.onnx"."""

from __future__ import annotations

STANDARD = "ai.onnx"
"""The long name of the standard's domain."""

ML = "ai.onnx.ml"
"""The domain of the standard's operators of classical machine learning."""

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""

PREVIEW = "ai.onnx.preview.training"
"""The domain of the standard's training operators: Gradient and the optimizers."""


def is_standard(domain: str) -> bool:
    """Return True if a domain is the standard's, by either name."""
    return domain in ("", STANDARD)


def plain_domain(domain: str) -> str:
    """Return the domain, with the short name "" for the standard's domain."""
    return "" if domain == STANDARD else domain


def short_name(op_type: str, domain: str) -> str:
    """Return an operator's name, with its domain unless that is the standard's: 'Relu', 'com.microsoft::Gelu'."""
    return op_type if is_standard(domain) else f"{domain}::{op_type}"


def full_name(op_type: str, domain: str) -> str:
    """Return an operator's name with its domain, as 'ai.onnx::Relu'."""
    return f"{domain or STANDARD}::{op_type}"
