"""Inference engines (mu): one folder an engine, behind one interface."""
