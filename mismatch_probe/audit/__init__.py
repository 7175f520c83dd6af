"""A server's tokens, held against a checkpoint: does it serve what it should, though it gives no log-probs."""
