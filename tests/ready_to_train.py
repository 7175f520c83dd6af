"""Imported once by a process that commands that train are forked from."""

import mismatch_probe.cli.sanity_command
import mismatch_probe.cli.train_command  # noqa: F401
