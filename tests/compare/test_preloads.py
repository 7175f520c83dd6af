"""What jobs on a checkpoint need is there before they begin."""

from mismatch_probe.children.start import Job, run
from tests.children.jobs import has_table_of_renamed_weights


def test_a_job_finds_the_table_of_renamed_weights_made() -> None:
    job = Job("looking", has_table_of_renamed_weights, (), "training", "")
    assert run(job) is True
