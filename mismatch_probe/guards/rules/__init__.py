"""What a guard may ask of its metrics: one file a family of rules."""
