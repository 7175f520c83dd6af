"""A reward of one's own for questions with a short answer, of which several spellings may be right.

PYTHONPATH=examples/rewards mismatch-probe train --task questions.jsonl --reward answers:names_answer ...
"""

import re


def names_answer(prompt: str, response: str, answer: str | None) -> float:
    """1 where the response has one of the answers as whole words, `eight|8` being two of them, else 0."""
    spellings = "|".join(re.escape(one.strip()) for one in (answer or "").split("|") if one.strip())
    return float(bool(spellings) and re.search(rf"(?<!\w)(?:{spellings})(?!\w)", response, re.IGNORECASE) is not None)
