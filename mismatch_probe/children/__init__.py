"""Child processes: every job that a command runs in a process of its own is started, heard and ended here."""
