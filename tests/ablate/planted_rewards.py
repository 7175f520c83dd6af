"""A reward with a planted fault: its first call raises, and leaves a file by which later ones know."""

import os
from pathlib import Path


def picky(prompt: str, response: str, answer: str) -> float:
    place = Path(os.environ["FIRST_CALL"])
    if not place.exists():
        place.touch()
        raise ValueError("a planted fault")
    return float(len(response) % 2 == 0)
