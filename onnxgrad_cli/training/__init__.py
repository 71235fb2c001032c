"""Run training models: trainers, schedules, metrics, evaluation, run folders, and the training loop."""
