"""What serves users of older systems: `onnx_derivative`, gradient lists, and the artifacts of onnxruntime-training."""
