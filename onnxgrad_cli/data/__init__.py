"""Data for training and evaluation: read files of many formats, check the data, shuffle samples and form batches."""

from onnxgrad_cli.data.batch_shard import BatchShard
from onnxgrad_cli.data.dataset import Data, absent, holds_samples, holds_text, names_in, open_data
from onnxgrad_cli.data.input_types import Range, input_types_of, ranges_of, rows_of
from onnxgrad_cli.data.prepared import as_trained, prepared, prepared_alike
from onnxgrad_cli.data.preprocessing import Preprocessing
from onnxgrad_cli.data.sampling import Batches, DataSets, NamedSet, balance, fraction_of, held_out, seed_of
from onnxgrad_cli.options.data import SampleOptions, SequenceOptions

__all__ = [
    "BatchShard", "Batches", "Data", "DataSets", "NamedSet", "Preprocessing", "Range", "SampleOptions",
    "SequenceOptions", "absent", "as_trained", "balance", "fraction_of", "held_out", "holds_samples", "holds_text",
    "input_types_of", "names_in", "open_data", "prepared", "prepared_alike", "ranges_of", "rows_of", "seed_of",
]  # fmt: skip
