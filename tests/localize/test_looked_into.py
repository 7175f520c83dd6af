"""What is stored stays within what may be stored, and which sequences and positions that leaves."""

from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.workspace import logit_rows, looked_into, max_stored_tokens
from mismatch_probe.records.activations import plan_activation_batches
from mismatch_probe.records.sequences import TokenSequence

CONFIG = {"hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151_936}


def sequence(name: str, prompt: int, response: int) -> TokenSequence:
    return TokenSequence(name, [1] * prompt, [2] * response)


def test_tokens_are_bounded_by_the_bytes_of_both_sides() -> None:
    blocks = max_stored_tokens(CONFIG, dtypes=(Dtype.BF16, Dtype.BF16), modules=False, most_bytes=2**32)
    modules = max_stored_tokens(CONFIG, dtypes=(Dtype.BF16, Dtype.BF16), modules=True, most_bytes=2**32)
    fp32 = max_stored_tokens(CONFIG, dtypes=(Dtype.FP32, Dtype.FP32), modules=True, most_bytes=2**32)
    assert blocks > 10 * modules
    assert modules == 2 * fp32 or modules == 2 * fp32 + 1
    assert modules * 28 * 1024 * 48 * 4 <= 2**32


def test_wide_feed_forward_parts_and_heads_leave_room_for_fewer_tokens() -> None:
    def tokens(**changes: int) -> int:
        config = {**CONFIG, "num_attention_heads": 8, "num_key_value_heads": 1, **changes}
        return max_stored_tokens(config, dtypes=(Dtype.BF16, Dtype.BF16), modules=True, most_bytes=2**32)

    gemma = tokens(intermediate_size=8 * 1024)
    assert (
        gemma * 28 * 1024 * (18 + 6 * 9 / 8 + 6 * 8) * 4 <= 2**32 < (gemma + 1) * 28 * 1024 * (18 + 6 * 9 / 8 + 48) * 4
    )
    assert tokens(intermediate_size=4096, head_dim=256) < tokens(intermediate_size=4096)


def test_a_composite_config_is_read_in_its_text_part() -> None:
    assert logit_rows({"text_config": CONFIG}) == logit_rows(CONFIG) == 2**26 // 151_936


def test_the_first_sequences_that_fit_are_taken_and_one_at_least() -> None:
    three = [sequence("a", 10, 10), sequence("b", 10, 10), sequence("c", 1, 1)]
    assert looked_into(three, 45) == three
    assert looked_into(three, 30) == three[:1]
    assert looked_into(three, 5) == three[:1]


def test_batches_hold_sequences_in_order_within_their_tokens() -> None:
    sequences = [sequence(str(number), 3, 5) for number in range(5)]
    batches = plan_activation_batches(sequences, batch_tokens=20, logit_rows=100)
    assert [[one.id for one in batch.sequences] for batch in batches] == [["0", "1"], ["2", "3"], ["4"]]
    assert [batch.first_sequence for batch in batches] == [0, 2, 4]
    assert batches[0].rows_per_sequence == [7, 7]


def test_logit_rows_are_those_that_predict_a_response_token() -> None:
    (batch,) = plan_activation_batches([sequence("a", 3, 2), sequence("b", 2, 3)], batch_tokens=20, logit_rows=100)
    assert batch.logit_rows == [2, 3, 5, 6, 7]


def test_logit_rows_are_thinned_evenly_over_all_batches() -> None:
    sequences = [sequence(str(number), 4, 10) for number in range(10)]
    batches = plan_activation_batches(sequences, batch_tokens=14, logit_rows=20)
    assert [len(batch.logit_rows) for batch in batches] == [2] * 10
