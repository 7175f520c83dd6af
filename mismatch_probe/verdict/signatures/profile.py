"""How a deviation is spread over tokens and positions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from mismatch_probe.causes import OrderedTests
from mismatch_probe.causes.comparison import ARRAYS_IN_ORDER
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.pair_totals import rms_by_sequence
from mismatch_probe.stats.results import Conditioning, Estimate, RoutingCheck
from mismatch_probe.stats.sequences import Floats, Ints, Mask, TokenPair, difference

LEAST_SENSITIVITY = 0.03
UNCERTAIN = 0.1


USUAL_NATS: Final = 0.064
"""Mean abs(d) in BF16, the largest measured; of other formats by their unit roundoff."""


def usual_nats(*dtypes: Dtype) -> float:
    """The largest mean abs(d) (nats) that was measured in these formats."""
    return USUAL_NATS * max(dtype.round_off for dtype in dtypes) / Dtype.BF16.round_off


@dataclass(frozen=True)
class Disagreement:
    """One pair, what was asked of it, and `floor`: the rms of d (nats) that rounding gives by what the run measured.

    `is_settled` says that the pair is known to disagree by more than rounding, so that the causes which differ from
    rounding only in degree may be looked for; `formats_alone` that FP32 against FP32 agrees, so that only the formats
    are left to explain it.
    """

    pair: TokenPair
    train_dtype: Dtype
    infer_dtype: Dtype
    floor: float
    is_settled: bool = False
    formats_alone: bool = False
    prompt_lengths: Ints | None = None
    """Prompt tokens before each response [N]."""
    has_experts: bool = False
    """Whether the checkpoint is a mixture of experts."""
    repeats_decode: bool = True
    """Whether the engine's prefill covers what it samples from, so that decode and prefill must agree."""
    ref_repeats_pi: bool = True
    """Whether the reference in FP32 is pi's own computation once more; that of a logged pi is another program's."""
    prompt_start: "Disagreement | None" = None
    """The same two sides on the first tokens of the prompts, where the start of the context is seen; None where it was
    not recorded.
    """
    routing: RoutingCheck | None = None
    """Both sides' choice of experts, where it was recorded."""
    conditioning: Conditioning | str | None = None
    """What rounding in FP32 does to the checkpoint, or why that could not be measured; None where nothing asked."""
    exact_repeat: float | None = None
    """The median nats between two passes of the training path in FP64 over the same tokens, where a run measured it."""
    rounding: float | None = None
    """The rms of d (nats) that rounding alone gives, where `floor` is the sides' own noise; None: `floor`."""

    @property
    def is_exact(self) -> bool:
        """Both sides compute in FP32 or better, so a gap between them is a bug."""
        return self.train_dtype.can_be_reference and self.infer_dtype.can_be_reference

    @cached_property
    def rms(self) -> float:
        """Root mean square of d, nats."""
        return root_mean_square(self.pair.diff)

    @property
    def is_rounding(self) -> bool:
        """d is no larger than rounding can make it."""
        return self.rms <= 3 * self.floor

    @cached_property
    def places(self) -> Floats:
        """Tokens before each response token, from 1: the prompt's included where their number is known [T]."""
        places = self.pair.sequences.positions.astype(np.float64) + 1
        return places if self.prompt_lengths is None else places + self.pair.sequences.spread(self.prompt_lengths)

    @cached_property
    def sensitivity(self) -> Floats:
        """Standard deviation of d for independent unit errors in every logit [T].

        log p_a moves by e_a - sum_b p_b e_b, whose variance is 1 - 2 p_a + sum_b p_b^2; the last sum is at least
        exp(-H), and at least p_a^2 where pi's entropy was not recorded.
        """
        probability, entropy = self.pair.prob_mu, self.pair.entropy_pi
        collision = probability**2 if entropy is None else np.exp(-entropy.astype(np.float64))
        variance = np.maximum(1 - 2 * probability + collision, LEAST_SENSITIVITY**2)
        return np.asarray(np.sqrt(variance), dtype=np.float64)

    @property
    def logit_floor(self) -> float:
        """The error of each logit (nats) that would give the floor."""
        return self.floor / root_mean_square(self.sensitivity)

    @property
    def logit_rounding(self) -> float:
        """The error of each logit (nats) that rounding alone would give."""
        return (self.floor if self.rounding is None else self.rounding) / root_mean_square(self.sensitivity)

    @cached_property
    def logit_errors(self) -> Floats:
        """abs(d) over what the token's uncertainty makes of a unit error of the logits, never below rounding [T].

        Tokens are compared with each other by it. A side's own noise is no bound here: as a mean square it is that of
        its largest errors, under which a deviation at some places would vanish.
        """
        return np.asarray(self.pair.abs_diff / self.sensitivity + self.logit_rounding)

    @cached_property
    def uncertain(self) -> Mask:
        """Tokens whose log-prob an error of the logits can move at all [T]."""
        return np.asarray(self.sensitivity > UNCERTAIN)

    @cached_property
    def errors(self) -> tuple[float, float] | None:
        """Median error of pi and of mu against the reference on uncertain tokens (nats); None without a reference.

        Medians, since flips of expert routing and rare tokens carry most of the squares.
        """
        if self.pair.log_ref is None or not self.uncertain.any():
            return None
        pi, mu = (np.abs(difference(leg, self.pair.log_ref)) for leg in (self.pair.log_pi, self.pair.log_mu))
        return float(np.median(pi[self.uncertain])), float(np.median(mu[self.uncertain]))

    def is_beyond(self, times: float) -> Mask:
        """Tokens that deviate by more than `times` what rounding makes of their own uncertainty [T]."""
        return np.asarray(self.pair.abs_diff > times * self.logit_floor * self.sensitivity)

    @cached_property
    def breadth(self) -> float:
        """Share of uncertain tokens that deviate by more than rounding."""
        return float(self.is_beyond(3)[self.uncertain].mean()) if self.uncertain.any() else 0.0

    @cached_property
    def rms_by_sequence(self) -> Floats:
        """Root mean square of d in each response [N]."""
        return rms_by_sequence(self.pair)


class Signature(Protocol):
    """A test of a pair's data: whether it looks as a cause makes it look.

        @SIGNATURES.of(Code.MINE)
        def mine(disagreement: Disagreement) -> Cause | None:
            share = ...
            if share < 0.5:
                return None
            return Cause.of(Code.MINE, [f"{write_percent(share)} of the tokens ..."])

    It raises nothing on data that `compare` hands over; what it raises nonetheless names it (`errors.noted`).
    """

    __name__: str

    def __call__(self, disagreement: Disagreement, /) -> Cause | None: ...


SIGNATURES: Final = OrderedTests[Signature](ARRAYS_IN_ORDER)
"""The tests of a pair's data, one a shape."""


def lower_bound(estimate: Estimate) -> float:
    """Of the interval; the value of an estimate from a single response, which has no interval."""
    return estimate.value if estimate.low is None else estimate.low


def root_mean_square(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


NUM_BINS = 12
LEAST_TOKENS = 24
LEAST_BINS = 4
GROUPS = 24
ERRORS = 3.0
LEAST_SPAN = np.log(8)


@dataclass(frozen=True)
class Profile:
    """Level of abs(d) over what the token's uncertainty alone would make of it, in bins of place.

    centers [K]: geometric mean place of each bin.
    """

    centers: Floats
    levels: Floats
    slope: float
    """Of log level against log place."""
    error: float
    """Its standard error."""

    def surely_above(self, slope: float) -> bool:
        return self.slope - ERRORS * self.error > slope

    def surely_below(self, slope: float) -> bool:
        return self.slope + ERRORS * self.error < slope

    def __str__(self) -> str:
        return f"place^{self.slope:.2f} (standard error {self.error:.2f})"


def profile_along(disagreement: Disagreement, from_place: int = 1, of_tokens: Mask | None = None) -> Profile | None:
    """The profile of abs(d) from a place of the context on, of these tokens [T], all uncertain ones where None; None
    for one prompt, or places that span less than a factor of 8.

    Levels are geometric means, so that flips between experts and rare tokens do not make the profile.
    """
    is_chosen = (disagreement.uncertain if of_tokens is None else of_tokens) & (disagreement.places >= from_place)
    if not is_chosen.any():
        return None
    places = np.log(disagreement.places[is_chosen])
    if places.max() - places.min() < LEAST_SPAN:
        return None
    edges = np.linspace(places.min(), places.max() + 1e-9, NUM_BINS + 1)
    bins = _join_bins(np.clip(np.searchsorted(edges, places, side="right") - 1, 0, NUM_BINS - 1))
    is_filled = np.arange(NUM_BINS) <= bins.max()
    sequences = disagreement.pair.sequences
    if is_filled.sum() < LEAST_BINS or sequences.num_clusters < 2:
        return None
    cells = sequences.spread(sequences.cluster_index % GROUPS)[is_chosen] * NUM_BINS + bins
    sizes = np.log(disagreement.logit_errors[is_chosen])
    count, size, place = (_sums(cells, values)[:, is_filled] for values in (np.ones_like(places), sizes, places))
    centers, levels = place.sum(axis=0) / count.sum(axis=0), size.sum(axis=0) / count.sum(axis=0)
    rest = count.sum(axis=0) - count
    full = (rest > 0).all(axis=1) & (count > 0).any(axis=1)
    without = np.array(
        [_slope(centers, others_size) for others_size in ((size.sum(axis=0) - size) / np.maximum(rest, 1))[full]]
    )
    error = float(np.sqrt((without.size - 1) / without.size * np.square(without - without.mean()).sum()))
    return Profile(np.exp(centers), np.exp(levels), _slope(centers, levels), error)


def _join_bins(bins: Ints) -> Ints:
    """Bins with too few tokens go into the next one, the last into the one before: few prompts have few tokens at the
    first places, where other text weighs most.
    """
    new_bins, number, tokens = np.zeros(NUM_BINS, dtype=np.int64), 0, 0
    for place, count in enumerate(np.bincount(bins, minlength=NUM_BINS)):
        new_bins[place] = number
        tokens += int(count)
        if tokens >= LEAST_TOKENS:
            number, tokens = number + 1, 0
    new_bins[new_bins == number] = max(number - 1, 0)
    return np.asarray(new_bins[bins])


def _sums(cells: Ints, values: Floats) -> Floats:
    """Sums of token values in each group and bin [G, NUM_BINS]."""
    sums = np.bincount(cells, weights=values, minlength=GROUPS * NUM_BINS)
    return sums.astype(np.float64).reshape(GROUPS, NUM_BINS)


def _slope(centers: Floats, log_levels: Floats) -> float:
    """Of log level against log place, every stretch of the context counting alike."""
    offsets = centers - centers.mean()
    return float(offsets @ log_levels / (offsets @ offsets))


FIRST_TOKENS: Final = 8
"""Tokens of a response that engines compute otherwise than the later ones."""
SUREST, CLASS_OF_SURENESS = 1e-4, 0.5
"""1 - p above which a token shows the level of the deviation, and what of log10 (1 - p) is one class."""


def sizes_by_sureness(disagreement: Disagreement) -> tuple[Mask, Floats, Floats, Ints]:
    """Which tokens an error of the logits moves [T], the log of that error [T], its median at tokens as sure [T], and
    their class [T]: a text that grows sure is no change.
    """
    pair = disagreement.pair
    unsure = -(np.expm1(pair.log_mu.astype(np.float64)) + np.expm1(pair.log_pi.astype(np.float64))) / 2
    is_moved, unsure = unsure > SUREST, np.maximum(unsure, SUREST)
    sizes = np.log(np.maximum(pair.abs_diff / unsure, 1e-300))
    kinds = _class_of(unsure)
    medians = np.zeros(kinds.max(initial=0) + 1)
    for kind in np.unique(kinds[is_moved]):
        medians[kind] = np.median(sizes[is_moved & (kinds == kind)])
    return is_moved, sizes, medians[kinds], kinds


def _class_of(unsure: Floats) -> Ints:
    return np.asarray((np.log10(unsure / SUREST) / CLASS_OF_SURENESS).astype(np.int64))


SPREAD_OUT: Final = 0.6
"""Largest share of changes at one place of the context, of the response, or from its end; that has another cause."""
BY_CHANCE: Final = 0.01
"""Of places drawn at random, the probability above which as many are one: in short responses they often are."""
TOGETHER: Final = (2, 4, 8)
"""Tokens within which two places are one. As few tokens as hold most places are no chance in short responses either."""


def are_together(places: Sequence[float], span: float) -> bool:
    """Whether most places are one, more than places drawn at random from so many would be."""
    from scipy.stats import binom

    values = np.asarray(places)
    distances = np.abs(values[:, None] - values)
    for tokens in TOGETHER:
        most = int((distances <= tokens).sum(1).max())
        by_chance = values.size * float(binom.sf(most - 2, values.size - 1, min(1.0, (2 * tokens + 1) / span)))
        if most > SPREAD_OUT * values.size and len(TOGETHER) * by_chance < BY_CHANCE:
            return True
    return False


LEAST_SIZES: Final = 256
LEAST_MEASURED: Final = 8
SMALL: Final = 10.0
"""Of sizes in geometric means: none counts as less than the median over this."""

SAME_BITS: Final = -40.0
"""Log of the median size below which most tokens as sure have the same bits on both sides."""
MEASURED: Final = 0.01
"""1 - p of both sides above which a token shows how large rounding is in nats."""


@dataclass(frozen=True)
class Sizes:
    """How far the sides lie apart at tokens [N] of those that `mask` has [T]."""

    mask: Mask
    logs: Floats
    """Log of the size and its median: it grows with large sizes alone, and errors of normal size hardly move it."""
    plain: Floats
    """Log of the size, or the size in nats."""
    kinds: Ints
    """The class of sureness of each, among whose tokens sizes are compared."""
    are_nats: bool = False
    """Whether `plain` is in nats."""

    def of(self, is_first: Mask) -> "Sizes":
        """Those of some of the tokens [N]."""
        return replace(self, logs=self.logs[is_first], plain=self.plain[is_first], kinds=self.kinds[is_first])

    def times(self, is_at: Mask) -> float:
        """By how many times the sizes at these of the tokens are larger than at others as sure: in geometric means, of
        nats in arithmetic ones.
        """
        counts = np.bincount(self.kinds[~is_at], minlength=int(self.kinds.max()) + 1)
        means = np.bincount(self.kinds[~is_at], self.plain[~is_at], minlength=counts.size) / np.maximum(counts, 1)
        is_compared = is_at & (counts > 0)[self.kinds]
        if not is_compared.any():
            return 0.0
        size, other_size = float(self.plain[is_compared].mean()), float(means[self.kinds[is_compared]].mean())
        return size / max(other_size, 1e-12) if self.are_nats else float(np.exp(size - other_size))


def sizes_of(disagreement: Disagreement) -> Iterator[Sizes]:
    """By the error of the logits, less what tokens as sure have: of tokens that rounding moves, so that a sure text
    shows it too; of uncertain tokens alone, where sure ones show nothing; and of all tokens in nats, where most places
    of a period or behind an onset are of sure tokens, and only what is large shows there.
    """
    for sizes in (_relative_sizes(disagreement), _uncertain_sizes(disagreement), _sizes_in_nats(disagreement)):
        if sizes.mask.sum() >= LEAST_SIZES:
            yield sizes


def _relative_sizes(disagreement: Disagreement) -> Sizes:
    is_moved, sizes, medians, kinds = sizes_by_sureness(disagreement)
    is_shown = is_moved & (medians > SAME_BITS)
    rises, kinds = (sizes - medians)[is_shown], kinds[is_shown]
    logs = _less_mean_of_kind(np.logaddexp(rises, 0.0), kinds)
    return Sizes(is_shown, logs, np.maximum(rises, -np.log(SMALL)), kinds)


def _uncertain_sizes(disagreement: Disagreement) -> Sizes:
    uncertain = disagreement.uncertain
    errors = disagreement.logit_errors[uncertain]
    usual = float(np.median(errors)) if errors.size else 1.0
    plain = np.log(np.maximum(errors, usual / SMALL))
    return Sizes(uncertain, np.log(errors + usual), plain, np.zeros(errors.size, np.int64))


def _sizes_in_nats(disagreement: Disagreement) -> Sizes:
    pair = disagreement.pair
    unsure = -np.expm1(np.maximum(pair.log_mu, pair.log_pi).astype(np.float64))
    is_measured = unsure > MEASURED
    usual = usual_nats(disagreement.train_dtype, disagreement.infer_dtype)
    if is_measured.sum() >= LEAST_MEASURED:
        usual = float(np.median(pair.abs_diff[is_measured]))
    nats = pair.abs_diff.astype(np.float64) + disagreement.logit_rounding
    kinds = _class_of(np.maximum(unsure, SUREST))
    logs = _less_mean_of_kind(np.log(nats + usual), kinds)
    return Sizes(np.ones(nats.size, np.bool_), logs, nats, kinds, are_nats=True)


def _less_mean_of_kind(values: Floats, kinds: Ints) -> Floats:
    return np.asarray(values - (np.bincount(kinds, values) / np.maximum(np.bincount(kinds), 1))[kinds])
