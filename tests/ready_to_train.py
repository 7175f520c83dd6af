"""Imported once by a process that commands that train are forked from."""
