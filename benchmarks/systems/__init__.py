"""The systems that are compared, each in a process of its own, with the packages that it needs and no others.

A system's module opens a training step from files; `serve` lets the parent process say when it computes.
"""
