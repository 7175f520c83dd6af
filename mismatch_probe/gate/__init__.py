"""The gate: limits in a file, decided with honest error rates; pass, fail or inconclusive, and never a vacuous pass."""
