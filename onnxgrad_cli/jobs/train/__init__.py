"""From an inference model and data to a trained inference model.

`run_train` asks `prepare` for a `PreparedRun`, takes its steps, and writes the model and the report.
"""

from onnxgrad_cli.jobs.train.course import Course
from onnxgrad_cli.jobs.train.train import run_train
from onnxgrad_cli.jobs.train.trained import Trained

__all__ = ["Course", "Trained", "run_train"]
