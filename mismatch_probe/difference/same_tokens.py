"""Each side held against itself in another run, on the responses whose token ids are the same in both."""

from collections.abc import Sequence

import numpy as np

from mismatch_probe.difference.samples import Sample
from mismatch_probe.stats.sequences import Ints, Sequences, TokenPair


def side_against_itself(first: Sample, second: Sample) -> dict[str, TokenPair]:
    """By side (`pi`, `mu`): its log-probs in the second run as log_pi, those in the first as log_mu.

    Empty where no response has the same ids in both. Both samples have a usable response.
    """
    old, new = first.data.pair, second.data.pair
    assert old is not None
    assert new is not None
    places = {response: place for place, response in enumerate(second.responses)}
    same = [
        (place, places[response])
        for place, (response, key) in enumerate(first.responses.items())
        if second.responses.get(response) == key
        and first.data.is_complete(place)
        and second.data.is_complete(places[response])
    ]
    if not same:
        return {}
    chosen, chosen_again = map(list, zip(*same, strict=True))
    old_tokens, new_tokens = _tokens(old.sequences, chosen), _tokens(new.sequences, chosen_again)
    sequences = Sequences.of_lengths(old.sequences.lengths[chosen], old.sequences.clusters[chosen])
    return {
        "pi": TokenPair(sequences, log_pi=new.log_pi[new_tokens], log_mu=old.log_pi[old_tokens]),
        "mu": TokenPair(sequences, log_pi=new.log_mu[new_tokens], log_mu=old.log_mu[old_tokens]),
    }


def _tokens(sequences: Sequences, chosen: Sequence[int]) -> Ints:
    return np.concatenate([np.arange(*sequences.offsets[place : place + 2]) for place in chosen])
