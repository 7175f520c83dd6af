"""What became of ids that a leg was not scored on as sampled."""

import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.records.tables import ids_key
from mismatch_probe.verdict.case import IdsCheck, doubled_first_token, examine_ids, ids_cause

PROMPTS = [[1, 10 + row, 20] for row in range(10)]
RESPONSES = [[30 + row, 40, 50, 2] for row in range(10)]
SAMPLED = [ids_key(prompt, response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
LENGTHS = [4] * 10


def examined(keys: list[int], lengths: list[int] | None = None) -> IdsCheck | None:
    return examine_ids("train-bf16", PROMPTS, RESPONSES, SAMPLED, keys, lengths or LENGTHS)


def code_of(difference: IdsCheck | None) -> str:
    assert difference is not None
    return ids_cause(difference).code


def test_a_leg_scored_as_sampled_has_nothing_to_explain() -> None:
    assert examined(SAMPLED) is None


def test_rows_in_another_order_are_mispaired() -> None:
    assert code_of(examined(SAMPLED[1:] + SAMPLED[:1])) == Code.MISPAIRED


@pytest.mark.parametrize("other", [lambda prompt: [1, *prompt], lambda prompt: prompt[1:]])
def test_bos_twice_or_missing_is_another_prompt(other: object) -> None:
    assert callable(other)
    keys = [ids_key(other(prompt), response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert code_of(examined(keys)) == Code.PROMPT_PREFIX


def test_other_ids_and_lengths_are_tokenised_again() -> None:
    keys = [ids_key(PROMPTS[0], [30, 45, 2]), *SAMPLED[1:]]
    difference = examined(keys, [3, *LENGTHS[1:]])
    assert code_of(difference) == Code.RETOKENISED
    assert difference is not None
    assert "1 of 10" in ids_cause(difference).sentence


def test_a_dropped_last_token_is_told_but_not_called_a_cause() -> None:
    keys = [ids_key(prompt, response[:-1]) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    difference = examined(keys, [3] * 10)
    assert code_of(difference) == Code.IDS_DIFFER
    assert difference is not None
    assert "lack the last token" in " ".join(ids_cause(difference).evidence)


def test_a_first_token_that_all_prompts_have_twice_is_seen() -> None:
    assert doubled_first_token([[1, 1, 5], [1, 1, 6]]) == 1


@pytest.mark.parametrize(
    "prompts", [[], [[1, 1, 5]], [[1, 1, 5], [1, 5, 1]], [[7], [7]], [[1, 1, 5], [2, 2, 5]], [[1, 5], [1, 6]]]
)
def test_a_first_token_that_is_doubled_by_chance_is_not(prompts: list[list[int]]) -> None:
    assert doubled_first_token(prompts) is None


def test_ids_without_a_story_only_differ() -> None:
    assert code_of(examined([key ^ 1 for key in SAMPLED])) == Code.IDS_DIFFER
