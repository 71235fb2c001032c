"""Checkpoints: read, write and validate safetensors files, and write trained values back into an inference model."""
