"""What stood before the responses: each fault is a real pass over other tokens or positions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.records.sequences import TokenSequence
from tests.explain.conftest import Explained
from tests.explain.logs import BOS, scored

Log = list[TokenSequence]
HEADER = [ord(letter) for letter in "You are helpful. "]
PAD = 256


def prompts(change: Callable[[list[int]], list[int]]) -> Callable[[Log], Log]:
    return lambda log: [replace(one, prompt_token_ids=change(one.prompt_token_ids)) for one in log]


def padded(log: Log) -> Log:
    longest = max(len(one.prompt_token_ids) for one in log)
    return prompts(lambda prompt: [PAD] * (longest - len(prompt)) + prompt)(log)


def packed(log: Log) -> Log:
    """Every second response behind the one before it."""
    return [
        replace(one, prompt_token_ids=log[row - 1].prompt_token_ids + log[row - 1].token_ids + one.prompt_token_ids)
        if row % 2
        else one
        for row, one in enumerate(log)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code", "what"),
    [
        (prompts(lambda prompt: prompt[1:]), "prompt_prefix", "a prompt without BOS"),
        (prompts(lambda prompt: [BOS, *prompt]), "prompt_prefix", "a prompt with BOS twice"),
        (
            prompts(lambda prompt: [BOS, *HEADER, *prompt[1:]]),
            "prompt_prefix",
            "a prompt with an extra header of 17 tokens behind its BOS",
        ),
        (
            prompts(lambda prompt: [*HEADER, *prompt]),
            "prompt_prefix",
            "a prompt with an extra header of 17 tokens before it",
        ),
        (padded, "positions", "left padding to 22 tokens attended to"),
        (packed, "packing", "packing without boundaries: the response before it in its context in 22 of 45 responses"),
    ],
)
def test_another_context_is_named(
    llama: Path, responses: Log, explained: Explained, change: Callable[[Log], Log], code: str, what: str
) -> None:
    side = explained(scored(llama, change(responses)), headers=(tuple(HEADER),))
    assert side.verdict.code == code
    assert side.explained_by is not None
    assert [departure.what for departure in side.explained_by.departures] == [what]


@pytest.mark.slow
def test_a_header_that_nobody_gives_is_unexplained_and_told_by_where_it_shows(
    llama: Path, responses: Log, explained: Explained
) -> None:
    columns = scored(llama, prompts(lambda prompt: [*HEADER, *prompt])(responses))
    side = explained(columns)
    assert side.verdict.code == "unexplained"
    assert side.explained_by is None
