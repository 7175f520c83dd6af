import numpy as np

from mismatch_probe.records.legs import by_sequence, routing_of, routing_table
from mismatch_probe.records.sequences import TokenSequence

SEQUENCES = [TokenSequence("a", [1, 2], [3, 4]), TokenSequence("b", [5], [6])]


def test_what_was_recorded_of_all_tokens_is_cut_by_sequence_and_read_back_as_it_was():
    experts = np.arange(2 * 4 * 2, dtype=np.int32).reshape(2, 4, 2)
    weights = experts.astype(np.float32) / 16
    first, second = by_sequence(SEQUENCES, (0, 3), experts, weights)
    np.testing.assert_array_equal(first.experts, experts[:, :3])
    np.testing.assert_array_equal(second.weights, weights[:, 3:])
    for one, read in zip((first, second), routing_of(routing_table(SEQUENCES, [first, second])), strict=True):
        assert (read.id, read.layers) == (one.id, (0, 3))
        np.testing.assert_array_equal(read.experts, one.experts)
        np.testing.assert_array_equal(read.weights, one.weights)
