"""The command line: one file a command, the only room that knows typer. Heavy parts load after parsing."""
