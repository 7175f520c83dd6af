"""What people look at: the terminal summary and `report.html`, both from the records of a run and nothing else."""
