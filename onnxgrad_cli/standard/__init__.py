"""Read and write the training features of the ONNX standard: the Gradient operator and TrainingInfoProto."""
