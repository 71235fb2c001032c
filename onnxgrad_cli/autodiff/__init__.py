"""Reverse-mode differentiation: the table of rules and definitions, the walk that applies them, and the mathematics."""
