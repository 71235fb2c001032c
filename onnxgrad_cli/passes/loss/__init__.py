"""The loss, appended to the model."""
