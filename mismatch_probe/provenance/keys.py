"""Keys of content: two runs with equal keys compute the same thing."""

import hashlib
import json
from typing import Any, Final

RESPONSES: Final = "responses"
"""The content key of a run that was given another run's responses instead of sampling."""


def content_key(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, as 16 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sequence_seed(run_seed: int, prompt_id: str, sample: int) -> int:
    """A seed for one response that depends on nothing but the run's seed, the prompt and the sample's number."""
    digest = hashlib.sha256(f"{run_seed}\0{prompt_id}\0{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
