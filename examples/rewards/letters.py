"""A reward that even a random model earns something of: to try out whether a new model trains at all.

PYTHONPATH=examples/rewards mismatch-probe train --model ./tiny-moe --reward letters:share_of_letters ...
"""


def share_of_letters(prompt: str, response: str, answer: str | None) -> float:
    """The share of the response's characters that are ASCII letters; 0 for an empty one."""
    return sum(one.isascii() and one.isalpha() for one in response) / max(1, len(response))
