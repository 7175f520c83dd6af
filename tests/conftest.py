"""What the command line does first, for tests that call the rooms behind it."""

from mismatch_probe.host import prepare

prepare()
