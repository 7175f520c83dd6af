"""A plug-in for mismatch-probe: an engine, a log format and a guard rule, one file each."""
