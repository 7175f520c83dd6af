"""A server's tokens, held against a checkpoint: is it what it is said to be, though it gives no log-probs."""
