"""Child processes: every job that a command runs beside itself is started, heard and ended here."""
