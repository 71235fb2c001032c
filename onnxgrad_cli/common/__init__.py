"""Helpers for all layers, independent of ONNX graphs: registries, options, checks of arguments, messages, JSON."""
