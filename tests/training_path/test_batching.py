import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.batching import pad_batch, plan_batches, plan_passes

lengths_and_budget = (st.lists(st.integers(1, 500), max_size=60), st.integers(1, 2000))


@pytest.mark.slow
@given(*lengths_and_budget)
def test_every_sequence_is_in_exactly_one_batch(lengths: list[int], budget: int) -> None:
    planned = [index for batch in plan_batches(lengths, budget) for index in batch]
    assert sorted(planned) == list(range(len(lengths)))


@pytest.mark.slow
@given(*lengths_and_budget)
def test_no_padded_batch_exceeds_the_budget_unless_it_is_one_sequence(lengths: list[int], budget: int) -> None:
    for batch in plan_batches(lengths, budget):
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


@pytest.mark.slow
@given(*lengths_and_budget)
def test_at_most_a_quarter_of_a_batch_is_padding(lengths: list[int], budget: int) -> None:
    for batch in plan_batches(lengths, budget):
        in_batch = [lengths[index] for index in batch]
        assert min(in_batch) >= 0.75 * max(in_batch)


def test_the_longest_sequences_come_first_and_equal_lengths_keep_their_order() -> None:
    assert plan_batches([5, 9, 5, 9, 5], 10) == [[1], [3], [0, 2], [4]]


def test_padding_stands_to_the_right_and_the_last_token_is_no_input() -> None:
    padded = pad_batch([TokenSequence("a", [1, 2], [3, 4, 5]), TokenSequence("b", [6], [7])], vocab_size=10, pad_id=9)
    assert padded.input_ids_BS.tolist() == [[1, 2, 3, 4], [6, 7, 9, 9]]
    assert padded.rows_T.tolist() == [0, 0, 0, 1]
    assert padded.positions_T.tolist() == [1, 2, 3, 0]
    assert padded.targets_T.tolist() == [3, 4, 5, 7]


@pytest.mark.parametrize(
    ("sequence", "reason"),
    [
        (TokenSequence("empty", [], [1]), "empty has no prompt token"),
        (TokenSequence("large", [1], [10]), "large holds a token id outside the model's 10 embeddings"),
        (TokenSequence("negative", [-1], [1]), "negative holds a token id outside the model's 10 embeddings"),
    ],
)
def test_a_sequence_that_cannot_be_scored_is_named(sequence: TokenSequence, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        pad_batch([sequence], vocab_size=10)


@pytest.mark.slow
@given(*lengths_and_budget, st.integers(1, 8))
def test_streams_share_a_batch_evenly_in_passes_within_their_budget(
    lengths: list[int], budget: int, streams: int
) -> None:
    passes = plan_passes(lengths, budget, streams)
    assert sorted(index for rows in passes for index in rows) == list(range(len(lengths)))
    for rows in passes:
        in_pass = [lengths[index] for index in rows]
        assert len(rows) == 1 or len(rows) * max(in_pass) <= budget
        assert min(in_pass) >= 0.75 * max(in_pass)


@pytest.mark.parametrize(
    ("sequences", "streams", "rows_of_streams"),
    [(16, 2, [8, 8]), (4, 2, [2, 2]), (17, 2, [8, 9]), (3, 2, [2, 1]), (1, 2, [1]), (7, 1, [7]), (16, 8, [2] * 8)],
)
def test_no_stream_has_more_than_a_row_of_a_length_beyond_the_others(
    sequences: int, streams: int, rows_of_streams: list[int]
) -> None:
    passes = plan_passes([900] * sequences, 3072, streams)
    shares = [sum(map(len, passes[number::streams])) for number in range(min(streams, len(passes)))]
    assert sorted(shares) == sorted(rows_of_streams)
