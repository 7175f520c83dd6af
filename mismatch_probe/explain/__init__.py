"""A log explained by trying: each suspected cause is computed from the checkpoint and set against what was logged."""

from mismatch_probe.explain.run import ExplainJob, explain, run_explain

__all__ = ["ExplainJob", "explain", "run_explain"]
