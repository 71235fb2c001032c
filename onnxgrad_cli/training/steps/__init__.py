"""Trainers: they hold weights and state in buffers, and take steps, each in one or several runs of onnxruntime."""
