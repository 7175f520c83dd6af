"""What a person uses from Python besides the guards: comparisons of arrays, and runs opened in a notebook."""
