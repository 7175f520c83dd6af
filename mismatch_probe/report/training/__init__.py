"""What people look at while and after a model trains, made from the files of the run and nothing else."""
