"""Guards: rules on a step's metrics that decide, before the optimizer steps, what the training loop should do."""
