"""A reward of one's own: partial credit on the built-in sums, the share of running totals that are right.

Run from this folder, or put it on PYTHONPATH:

    mismatch-probe train --model demo --task sums:terms=24 --reward running_totals:share_right ...
"""

import re
from itertools import accumulate


def share_right(prompt: str, response: str, answer: str | None) -> float:
    """The share of the totals asked for that the response has, in order, before its first wrong one."""
    terms = [int(term) for term in re.findall(r"\d+:(\d+)", prompt)]
    expected = list(accumulate(terms))[1:]
    written = [int(total) for total in re.findall(r"=(\d+)", response)]
    right = 0
    for total, wanted in zip(written, expected, strict=False):
        if total != wanted:
            break
        right += 1
    return right / len(expected)
