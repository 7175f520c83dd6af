"""What people look at: the terminal summary and `report.html`, both from the records of a run and nothing else."""

from mismatch_probe.report.page import render_html, write_report
from mismatch_probe.report.terminal import render_terminal

__all__ = ["render_html", "render_terminal", "write_report"]
