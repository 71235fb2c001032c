"""Running models: executors for proofs, onnxruntime sessions for training, interleaved timing for comparisons."""
