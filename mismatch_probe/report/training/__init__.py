"""What people look at while and after a model trains, made from the files of the run and nothing else."""

from mismatch_probe.report.training.page import (
    render_outcome,
    render_sanity,
    render_training,
    summarise_training,
    write_training_report,
)

__all__ = ["render_outcome", "render_sanity", "render_training", "summarise_training", "write_training_report"]
