"""Low-rank adapters (LoRA, DoRA) after training: read and write their files, and add them to an inference model."""
