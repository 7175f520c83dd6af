"""A log is explained by trying: each suspected cause is computed from the checkpoint and compared with the log."""

from mismatch_probe.explain.run import ExplainJob, explain, run_explain

__all__ = ["ExplainJob", "explain", "run_explain"]
