"""What a reference takes of time and memory at sizes that run here, and what the same arithmetic says of large ones."""
