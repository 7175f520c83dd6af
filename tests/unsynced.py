"""Imported by a pytest worker and by the processes that its jobs are forked from: what they write waits for no disk.

No test cuts the power, and thousands of small files are written.
"""

import os

os.fsync = lambda fd: None
