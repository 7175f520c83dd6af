"""What the starts of two prompts share, of each side: equal ids behind equal ids."""

import numpy as np
import pyarrow as pa

from mismatch_probe.compare.pair_data import LegColumns, PairData, join_legs
from mismatch_probe.compare.subsamples import repeats_in_starts
from mismatch_probe.records.sequences import leg_columns

PROMPTS = ([1, 7, 8, 9], [2], [1, 7, 5], [1, 6], [3, 7, 8], [1, 7, 8, 4])
"""The first, third and last begin alike, and the first and last on three tokens; the second has no start."""


def leg(size: float) -> LegColumns:
    """Responses of two tokens; log-probs of starts are the number of the prompt and the place, times `size`."""
    count = len(PROMPTS)
    starts = [
        -size * (number + np.arange(1, len(prompt)) / 10) if len(prompt) > 1 else np.zeros(0)
        for number, prompt in enumerate(PROMPTS)
    ]
    return LegColumns(
        logprobs=[np.array([-1.0, -2.0])] * count,
        by_token=dict.fromkeys(leg_columns()),
        prompt_starts=starts,
        keys=np.arange(count, dtype=np.uint64),
        foreign=np.zeros(count, dtype=np.bool_),
    )


def data() -> PairData:
    count = len(PROMPTS)
    rollouts = pa.table(
        {
            "id": [f"row-{number}" for number in range(count)],
            "prompt_id": [f"row-{number}" for number in range(count)],
            "prompt_token_ids": list(PROMPTS),
            "token_ids": [[3, 4]] * count,
            "finish_reason": ["stop"] * count,
        }
    )
    tables = {"mu": leg(0.0), "mu_prefill": leg(0.5), "pi": leg(1.0)}
    return join_legs({name: name for name in tables}, tables, rollouts, in_part=False, num_zeros=0)


def test_what_prompts_begin_with_alike_is_a_repetition_of_each_side() -> None:
    repeats = repeats_in_starts(data())
    assert set(repeats) == {"pi_starts", "mu_starts"}
    repeat = repeats["pi_starts"]
    assert repeat.sequences.lengths.tolist() == [1, 2], "of neighbours in the order of ids: 2 and 5, then 5 and 0"
    assert np.allclose(repeat.first, [-2.1, -5.1, -5.2])
    assert np.allclose(repeat.second, [-5.1, -0.1, -0.2])
    assert np.allclose(repeats["mu_starts"].diff, repeat.diff / 2)


def test_a_prompt_without_a_start_shifts_no_other_prompts_cluster() -> None:
    start = data().prompt_start
    assert start is not None
    assert start.sequences.clusters.tolist() == [0, 2, 3, 4, 5]
