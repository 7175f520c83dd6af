"""The reference for checkpoints larger than memory: one decoder layer's weights at a time, over all responses."""
