"""Run models: executors for proofs, onnxruntime sessions for training, and interleaved timing for comparisons."""
