"""Answers compared as mathematics by math-verify (`1/2` is `\\frac{1}{2}` is `0.5`), which is installed on request."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks.prompt import Prompt


def math_scorer(prompts: Sequence[Prompt]) -> Callable[[EncodedPrompt, str], bool]:
    """Whether a response's last formula or number equals its prompt's answer.

    An answer without `$` or `\\boxed` is read as a formula.

    Raises:
        MissingExtra: math-verify is not installed.
        UsageError: a prompt has no answer; later, in scoring, one that math-verify cannot read.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtra(
            "reward math needs the package math-verify, which is not installed; run pip install 'mismatch-probe[math]'"
        ) from error
    unanswered = [prompt.prompt_id for prompt in prompts if not (prompt.answer or "").strip()]
    if unanswered:
        raise UsageError(
            f"reward math compares with answers, and {len(unanswered)} of {len(prompts)} prompts have none, "
            f"{unanswered[0]} the first; give every row an answer column, or another --reward"
        )

    @cache
    def gold(answer: str) -> list[Any]:
        is_marked = "$" in answer or "\\boxed" in answer
        return list(parse(answer if is_marked else f"${answer}$"))

    def score(prompt: EncodedPrompt, text: str) -> bool:
        assert prompt.answer is not None
        expected = gold(prompt.answer)
        if not expected:
            raise UsageError(f"math-verify can read no answer in {prompt.answer!r} of prompt {prompt.prompt_id}")
        return bool(verify(expected, parse(text)))

    return score
