"""The passes that turn an inference model into a training model; `pipeline` has their order."""
