"""Reinforcement learning with the mismatch measured at every step and guards that act on it."""
