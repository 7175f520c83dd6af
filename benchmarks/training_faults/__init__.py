"""Faults injected into real training runs, and what the default guards say and do."""
