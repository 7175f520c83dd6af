"""Measure, explain, gate and guard the training-inference mismatch of language models."""

__version__ = "0.1.0"
