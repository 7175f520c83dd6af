"""Why vLLM's own processes ended: they tell the standard error that they share with this one, and nobody else."""

import re
from pathlib import Path
from typing import Final

_STANDARD_ERROR: Final = Path("/proc/self/fd/2")
_START: Final = "Initializing a V1 LLM engine"
_EXCEPTION: Final = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


def root_cause() -> str | None:
    """The first exception that the engine started last wrote, as `Type: message`.

    None where there is none, or where standard error is no file that could be read again.
    """
    if not _STANDARD_ERROR.is_file():
        return None
    text = _STANDARD_ERROR.read_text(encoding="utf-8", errors="replace")
    exception = _EXCEPTION.search(text, max(text.rfind(_START), 0))
    return exception[1] if exception else None
