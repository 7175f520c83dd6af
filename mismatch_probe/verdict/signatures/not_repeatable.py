"""A side that does not agree with itself: dropout left on, a stale cache, a result that hangs on its batch.

The same leg twice differs; decode and prefill of one engine differ; or the training path's two FP32 passes over the
same ids differ from each other as much as from the engine, each by errors of its own. None of these involves the other
side.
"""

from collections.abc import Iterator

import numpy as np

from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Floats, Reals, difference
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement, root_mean_square

BEYOND_ROUNDING = 8.0
"""Times the floor; two passes of one implementation differ by about the floor itself."""

REPEATS = {
    "pi_again": "the same tokens scored twice get other log-probs",
    "pi_other_batch": "log-probs depend on what shares the batch",
    "mu_other_batch": "log-probs depend on what shares the batch",
    "mu_decoded_alone": "log-probs of decoding depend on what shares the batch",
    "mu_cached": "log-probs change behind the prefix cache",
}
"""Repeated legs that must give the same; another implementation of attention, also recorded, need not."""

DECODED_ALONE = "mu_decoded_alone"
"""One token at a time is another kernel than many: in 16 bit only the reference tells how far that may round apart."""

SHARED = 0.8
"""Correlation of two passes' deviations from the engine above which they make one and the same error."""


def not_repeatable(disagreement: Disagreement) -> Cause | None:
    """The cause for the first side that contradicts itself by far more than rounding."""
    for side, what, twice, floor, advice in _repetitions(disagreement):
        size = root_mean_square(twice)
        if size > BEYOND_ROUNDING * floor:
            return Code.NOT_REPEATABLE.cause(
                side=side,
                what=what,
                evidence=[
                    f"rms difference {write_number(size)} nats, where rounding gives about {write_number(floor)}"
                ],
                advice=[advice],
            )
    return None


def _own_floor(disagreement: Disagreement, first: Reals, second: Reals) -> float:
    """What rounding gives this side: in 16 bit no less than the smaller of its own two errors."""
    reference = disagreement.pair.log_ref
    if reference is None or disagreement.is_exact:
        return disagreement.floor
    return max(disagreement.floor, min(root_mean_square(difference(leg, reference)) for leg in (first, second)))


def _repetitions(disagreement: Disagreement) -> Iterator[tuple[str, str, Floats, float, str]]:
    pair = disagreement.pair
    one_at_a_time = (
        "Switch off prefix caching, chunked prefill, speculative decoding and cascade attention one at a time, and "
        "reset the prefix cache after every weight update."
    )
    still = (
        "Put the model in evaluation mode (dropout off); look for padding that is attended to, sequences packed "
        "without boundaries, and nondeterministic kernels."
    )
    prefilled = pair.log_mu if pair.log_mu_prefill is None else pair.log_mu_prefill
    of_engine = _own_floor(disagreement, pair.log_mu, prefilled)
    for name, what in REPEATS.items():
        if name in pair.repeats:
            if name == DECODED_ALONE and pair.log_ref is None and not disagreement.is_exact:
                continue
            twice = pair.repeats[name].diff
            if name.startswith("pi_"):
                yield "The training path", what, twice, disagreement.floor, still
            else:
                yield "The engine", what, twice, of_engine, one_at_a_time
    if pair.log_mu_prefill is not None and disagreement.repeats_decode:
        yield (
            "The engine",
            "decoding and prefill give the same tokens other log-probs",
            difference(pair.log_mu, pair.log_mu_prefill),
            of_engine,
            one_at_a_time,
        )
    if pair.log_ref is not None and disagreement.is_exact and disagreement.ref_repeats_pi:
        errors = difference(pair.log_pi, pair.log_mu), difference(pair.log_ref, pair.log_mu)
        if all(root_mean_square(error) > BEYOND_ROUNDING * disagreement.floor for error in errors) and not _alike(
            *errors
        ):
            twice, floor = difference(pair.log_pi, pair.log_ref), disagreement.floor
            yield "The training path", "two FP32 passes over the same tokens differ", twice, floor, still


def _alike(first: Floats, second: Floats) -> bool:
    return float(np.corrcoef(first, second)[0, 1]) > SHARED
