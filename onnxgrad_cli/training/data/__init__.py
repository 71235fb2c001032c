"""Data for training: one module a format, one that checks what was read, one that shuffles it and deals it out."""

from onnxgrad_cli.training.data.batches import Batches, Part
from onnxgrad_cli.training.data.dataset import Data, open_data
from onnxgrad_cli.training.data.hold_out import fraction_of, held_out
from onnxgrad_cli.training.data.ports import Range, ports_of, ranges_of

__all__ = ["Batches", "Data", "Part", "Range", "fraction_of", "held_out", "open_data", "ports_of", "ranges_of"]
