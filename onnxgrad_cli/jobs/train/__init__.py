"""Train an inference model on data.

`run_train` gets a `PreparedRun` from `prepare`, runs its steps, and writes the model and the report.
"""

from onnxgrad_cli.jobs.train.prepared_run import Trained
from onnxgrad_cli.jobs.train.train import run_train
from onnxgrad_cli.options.train import Course

__all__ = ["Course", "Trained", "run_train"]
