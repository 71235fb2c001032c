"""Data for training: one module a format, one that checks what was read, one that shuffles it and deals it out."""

from onnxgrad_cli.training.data.balance import balance
from onnxgrad_cli.training.data.batches import Batches
from onnxgrad_cli.training.data.dataset import Data, absent, holds_samples, holds_text, names_in, open_data
from onnxgrad_cli.training.data.hold_out import fraction_of, held_out
from onnxgrad_cli.training.data.input_types import Range, input_types_of, ranges_of, rows_of
from onnxgrad_cli.training.data.part import Part
from onnxgrad_cli.training.data.prepared import as_trained, prepared
from onnxgrad_cli.training.data.preprocessing import Preprocessing
from onnxgrad_cli.training.data.sample_options import SampleOptions
from onnxgrad_cli.training.data.sequences import SequenceOptions

__all__ = [
    "Batches",
    "Data",
    "Part",
    "Preprocessing",
    "Range",
    "SampleOptions",
    "SequenceOptions",
    "absent",
    "as_trained",
    "balance",
    "fraction_of",
    "held_out",
    "holds_samples",
    "holds_text",
    "input_types_of",
    "names_in",
    "open_data",
    "prepared",
    "ranges_of",
    "rows_of",
]
