"""What the ONNX standard itself says of training: the Gradient operator and TrainingInfoProto, written and read."""
