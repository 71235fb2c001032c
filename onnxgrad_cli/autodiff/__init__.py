"""Reverse-mode differentiation: rules and definitions of operators, their tables, and the walk that applies them."""
