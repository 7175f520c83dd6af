"""The command line: a command is one function with its flags and its help. The only room that knows typer."""
