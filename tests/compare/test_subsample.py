from mismatch_probe.compare import stages
from mismatch_probe.compare.stages import compared_positions, repeated_rows
from mismatch_probe.records.sequences import TokenSequence


def sequences(*lengths: tuple[int, int]) -> list[TokenSequence]:
    return [TokenSequence(f"s{row}", [1] * prompt, [2] * response) for row, (prompt, response) in enumerate(lengths)]


def test_repeated_responses_are_spread_evenly_over_the_run() -> None:
    assert repeated_rows(sequences(*[(2, 8)] * 100), 4) == [12, 37, 62, 87]
    assert repeated_rows(sequences(*[(2, 8)] * 3), 16) == [0, 1, 2]


def test_a_response_too_long_for_eager_attention_is_not_repeated() -> None:
    given = sequences((2, 8), (2, stages.LONGEST_REPEATED), (2, 8))
    assert repeated_rows(given, 16) == [0, 2]


def test_compared_positions_are_response_tokens_spread_over_all_responses() -> None:
    given = sequences((2, 30), (2, 0), (2, 10))
    assert compared_positions(given, 4, vocab_size=100) == [(0, 5), (0, 15), (0, 25), (2, 5)]
    assert len(compared_positions(given, 512, vocab_size=100)) == 40


def test_a_large_vocabulary_has_fewer_positions() -> None:
    given = sequences(*[(10, 100)] * 20)
    assert len(compared_positions(given, 512, vocab_size=152_000)) == stages.MOST_NUMBERS // 152_000
    assert len(compared_positions(given, 512, vocab_size=320)) == 512


def test_contexts_together_hold_no_more_tokens_than_the_run() -> None:
    given = sequences(*[(100, 4000)] * 20)
    chosen = compared_positions(given, 512, vocab_size=320)
    assert 30 < len(chosen) < 60
    assert sum(100 + position for _, position in chosen) <= 20 * 4100


def test_a_run_without_a_token_has_no_position() -> None:
    assert compared_positions(sequences((2, 0)), 512, vocab_size=320) == []
