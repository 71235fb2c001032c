"""The checks of a proof. Each compares a property of a training model with a source independent of onnxgrad's rules."""
