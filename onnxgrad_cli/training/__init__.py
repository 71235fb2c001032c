"""What runs a training model: sessions and their state, data, schedules, metrics, checkpoints, and the loop."""
