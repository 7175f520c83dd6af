"""The files of a run directory: their schemas, and writing them whole or not at all."""
