"""A log becomes a run directory; what it lacks is computed on its own token ids."""
