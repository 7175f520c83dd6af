"""What a model earns under both policies, on the page of its run and on a screen."""

from mismatch_probe.report.evaluation.overview import evaluation_overview, evaluation_section, render_evaluation

__all__ = ["evaluation_overview", "evaluation_section", "render_evaluation"]
