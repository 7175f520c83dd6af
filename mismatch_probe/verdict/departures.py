"""How far the sides lie from each other or from a reference, in units of what rounding does to them.

The unit is an error that is known to be rounding, on the same tokens: that of the training path here, where the log was
scored with a checkpoint, else that of the log's other side. Two right sides of one checkpoint differ by less than a
factor of 4 in it (`one_sided_dtype`).

Weights that change while responses are sampled change the level of the deviation inside each response, at a place of
its own; a log shows that without checkpoints, and not which weights they are.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeGuard

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_estimate, write_many, write_number
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.curves import LEAST_PART, change_of_level
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.results import Conditioning, Estimate
from mismatch_probe.stats.rounding import LEAST_NATS, LONE, Floor
from mismatch_probe.stats.sequences import Floats, Reals, Sequences, TokenPair, difference
from mismatch_probe.verdict.signatures.profile import (
    Disagreement,
    are_together,
    lower_bound,
    root_mean_square,
    sizes_by_sureness,
)
from mismatch_probe.verdict.signatures.recording import LEAST_OCTAVES

LEAST_FP32_FLOOR = 1e-6
"""Nats: log-probs of magnitude 8 are stored in FP32 to 5e-7."""

MOST_FP32_FLOOR = 2e-5
"""Nats: two FP32 passes that differ by more are no FP32 (TF32), or no repetition."""

FP32_AGREES_NATS = 1e-4
"""FP32 against FP32 differs by accumulation order alone: mean abs(d) of 2e-6 nats across engines on small models.
Fifty times that leaves room for deep models, whose measured floor raises the bound; a bug that matters moves the mean
far past it.
"""

FP32_AGREES_FLOORS = 30.0

SPIKE_NATS = 0.05
"""One token this far off in FP32 is no rounding, which reaches 1e-3 nats on the least likely tokens."""

SPIKES_OF_ROUTING = 1e-3
"""Share of spikes that near ties between experts may cause even in FP32."""


def rounding_floor(pair: TokenPair, train: Dtype, infer: Dtype) -> float:
    """rms of d (nats) that rounding in these formats gives, from the side that errs less in units of its own format.

    Without a reference, from the engine's decode against its prefill; 0 where neither was recorded, which makes every
    test ask for more.
    """
    spacings = np.hypot(train.round_off, infer.round_off)
    if pair.log_ref is not None:
        errors = [
            root_mean_square(difference(leg, pair.log_ref)) / dtype.round_off
            for leg, dtype in ((pair.log_pi, train), (pair.log_mu, infer))
        ]
        floor = min(errors) * spacings
    elif pair.log_mu_prefill is not None:
        floor = root_mean_square(difference(pair.log_mu, pair.log_mu_prefill)) / infer.round_off * spacings / np.sqrt(2)
    else:
        floor = 0.0
    if not (train.rounds_coarsely or infer.rounds_coarsely):
        return float(np.clip(floor, LEAST_FP32_FLOOR, MOST_FP32_FLOOR))
    return float(max(floor, LEAST_FP32_FLOOR))


def exact_pair_agrees(disagreement: Disagreement) -> bool:
    """Whether FP32 against FP32 agrees as two right implementations of a well-conditioned model do."""
    deviation = disagreement.pair.abs_diff
    spikes = float(np.mean(deviation > SPIKE_NATS))
    if spikes > (SPIKES_OF_ROUTING if disagreement.has_experts else 0.0):
        return False
    usual = deviation[deviation <= SPIKE_NATS]
    floor = min(disagreement.floor, MOST_FP32_FLOOR)
    return bool(usual.mean() <= max(FP32_AGREES_NATS, FP32_AGREES_FLOORS * floor))


ExactOutcome = Literal["agrees", "rounding", "open", "differs"]
"""What FP32 against FP32 shows. `rounding`: it differs by no more than FP32 itself differs from FP64 on the checkpoint.
`open`: by how much that is does not decide it, or could not be measured.
"""


def exact_outcome(disagreement: Disagreement) -> ExactOutcome:
    """What a pair in FP32 shows, by what rounding in FP32 was measured to do where the pair does not agree.

    Errors of two right implementations have one size at every quantile, within the factor of `one_sided_dtype`. An
    error beyond that, surely, at any quantile is none of rounding; nor is a token on which one side alone errs, by more
    than the reference does on any token. Where FP32 is so near to FP64 that no two errors within the factor make up a
    pair that disagrees, nothing is left to decide, and no interval of a few prompts excuses the pair. Where rounding
    was measured to be large, the bound of `exact_pair_agrees` is wide by that, and the factor decides within it too.
    """
    measured, agrees = disagreement.conditioning, exact_pair_agrees(disagreement)
    is_near = not rounds_by_more(measured) or disagreement.pair.abs_diff.mean() <= FP32_AGREES_NATS
    if agrees and is_near:
        return "agrees"
    if measured is None:
        return "differs"
    if isinstance(measured, str):
        return "open"
    if measured.error_fp32.value <= LEAST_NATS and measured.largest_fp32 <= SPIKE_NATS / _BY_ROUNDING:
        return "differs"
    times = [*measured.times_pi.items(), *measured.times_mu.items()]
    lone = max(estimate.value for name, estimate in times if name == LONE)
    if lone > BEYOND_FLOORS and lone * measured.largest_fp32 > SPIKE_NATS:
        return "differs"
    of_bulk = [estimate for name, estimate in times if name != LONE]
    if any(_is_surely_beyond(estimate) for estimate in of_bulk) or _is_beyond_the_largest(measured):
        return "differs"
    if any(estimate.value > BEYOND_FLOORS for estimate in of_bulk):
        return "open"
    return "agrees" if agrees else "rounding"


def _is_surely_beyond(times: Estimate) -> bool:
    """Whether the interval lies beyond the factor; a value without an interval must lie far beyond it."""
    return times.value > FP32_AGREES_FLOORS if times.low is None else times.low > BEYOND_FLOORS


def _is_beyond_the_largest(measured: Conditioning) -> bool:
    """Whether a side errs on average by more than the factor beyond the largest error of rounding on any token, which
    needs no interval: that of two prompts is wide.
    """
    sides = ((measured.error_pi, measured.times_pi), (measured.error_mu, measured.times_mu))
    return any(
        error.value > BEYOND_FLOORS * measured.largest_fp32 and times["mean"].value > FP32_AGREES_FLOORS
        for error, times in sides
    )


def rounds_by_more(measured: Conditioning | str | None) -> TypeGuard[Conditioning]:
    """Whether FP32 was measured to err by more on the checkpoint than on a well-conditioned one."""
    return isinstance(measured, Conditioning) and measured.error_fp32.value > MOST_FP32_FLOOR


def conditioning_words(measured: Conditioning) -> str:
    """How far FP32 is from FP64 by rounding alone, and both sides, in FP32 or not."""
    return (
        f"FP32 itself is {write_estimate(measured.error_fp32)} nats a token from FP64 on this checkpoint, "
        f"{write_number(measured.largest_fp32)} at most; the training path is {write_estimate(measured.error_pi)} from "
        f"it and the engine {write_estimate(measured.error_mu)}"
    )


def sides_by_rounding(measured: Conditioning, *, is_open: bool = False) -> str:
    """How many times as far as FP32 both sides in FP32 are from FP64."""
    pi, mu = measured.times_pi["mean"], measured.times_mu["mean"]
    if not is_open:
        return (
            f"the engine's {write_estimate(measured.error_mu).value} in FP32 and the training path's "
            f"{write_estimate(measured.error_pi).value} are of that size"
        )
    return f"the engine is {write_estimate(mu)} times as far and the training path {write_estimate(pi)} times"


BEYOND_FLOORS = 2.0**LEAST_OCTAVES
_BY_ROUNDING = 2 * BEYOND_FLOORS
"""The most units of FP32's rounding that two sides within the factor are apart, if they err in opposite directions."""
_CUT = 0.99
ALIKE_FLOORS = 3.0
"""The distance of two sides that differ by rounding alone is 1.4."""

SIDES = {"pi": "the training path's side", "mu": "the engine's side"}


@dataclass(frozen=True)
class Departures:
    """Root mean square distances in floors: of each logged side from the reference, and of both from each other."""

    sides: tuple[str, ...]
    """The logged sides that the pair holds."""
    floors: dict[str, Estimate]
    dtypes: dict[str, Dtype]
    """The dtype in which the log says that each side computed."""
    distance: Estimate | None
    from_checkpoint: bool
    """Whether the reference and the unit are those of a checkpoint, not of the log."""
    is_named: bool = False
    """Whether the data names the cause by which the engine's side departs."""

    @property
    def sides_beyond_floors(self) -> list[str]:
        """Sides that err by more than their formats can."""
        return [side for side, floors in self.floors.items() if lower_bound(floors) > BEYOND_FLOORS]

    @property
    def are_alike(self) -> bool:
        """Whether no side of the log fits the checkpoint, and both depart alike, so that it is no mismatch."""
        are_close = self.distance is None or self.distance.value <= ALIKE_FLOORS
        return self.from_checkpoint and len(self.sides_beyond_floors) == len(self.floors) and are_close

    @property
    def is_other_checkpoint(self) -> bool:
        """Whether they depart alike, and for no cause that is named."""
        return self.are_alike and not self.is_named


def floors_of(
    error: Floats,
    log_ref: Reals,
    rounding_errors: tuple[Floats, Dtype],
    dtype: Dtype,
    sequences: Sequences,
    level: float,
    errors_of_fp32: Floats | None = None,
) -> Estimate | None:
    """The rms of an error [T] (nats) in units of rounding in `dtype`; its largest hundredth is cut to the next.

    rounding_errors: an error of rounding on the same tokens, and its format. errors_of_fp32: those of FP32 from FP64
    [T], where they are larger than on a well-conditioned checkpoint. Each response is a cluster: what a side departs by
    does not depend on how many prompts there are.
    """
    each = Sequences(sequences.offsets, np.arange(sequences.num_sequences))
    floors = np.abs(error) / _units(log_ref, rounding_errors, dtype, errors_of_fp32)
    return Estimator(each, level).root_mean_square(np.minimum(floors, np.quantile(floors, _CUT)), "token")


def apart_floors(
    log_pi: Reals,
    log_mu: Reals,
    log_ref: Reals,
    rounding_errors: tuple[Floats, Dtype],
    dtypes: dict[str, Dtype],
    sequences: Sequences,
    level: float,
    errors_of_fp32: Floats | None = None,
) -> Estimate | None:
    """The rms distance of two sides, in units of the coarser one's rounding."""
    coarser = max(dtypes.values(), key=lambda dtype: dtype.round_off)
    return floors_of(difference(log_pi, log_mu), log_ref, rounding_errors, coarser, sequences, level, errors_of_fp32)


def beyond_format(departures: Departures | None) -> list[Cause]:
    """The bug of sides that err by more than their formats can; none where both depart alike from a checkpoint."""
    if departures is None or departures.are_alike:
        return []
    sides = [side for side in departures.sides if side in departures.sides_beyond_floors]
    if not sides:
        return []
    formats = " and ".join(dict.fromkeys(departures.dtypes[side].upper() for side in sides))
    return [
        Cause.of(
            Code.BEYOND_FORMAT,
            sides=f"{' and '.join(SIDES[side] for side in sides)} err{'s' if len(sides) == 1 else ''}",
            formats=formats,
            evidence=_evidence(departures),
        )
    ]


def other_checkpoint(departures: Departures | None) -> Verdict | None:
    """The verdict where the checkpoint is not the log's; None where it is, or where that is unknown."""
    if departures is None or not departures.is_other_checkpoint:
        return None
    is_one_side = departures.distance is None
    cause = Cause.of(
        Code.OTHER_CHECKPOINT,
        unless=", or its engine is not the declared one" if is_one_side else "",
        sides="the log-probs depart" if is_one_side else "both sides depart alike",
        evidence=_evidence(departures),
    )
    return Verdict(kind="undecided", **cause.model_dump())


def _evidence(departures: Departures) -> list[str]:
    yardstick = "the training path here" if departures.from_checkpoint else "the other side"
    lines = [
        f"{SIDES[side]} errs against the reference by {write_estimate(floors)} times what rounding in "
        f"{departures.dtypes[side].upper()} does, as {yardstick} measures it"
        for side, floors in departures.floors.items()
    ]
    if departures.from_checkpoint and departures.distance is not None:
        lines.append(f"the two sides lie {write_estimate(departures.distance)} times that apart")
    return lines


def _units(
    log_ref: Reals, rounding_errors: tuple[Floats, Dtype], dtype: Dtype, errors_of_fp32: Floats | None
) -> Floats:
    """What rounding in a format moves each token by [T], nats."""
    exact = log_ref.astype(np.float64)
    of_all = np.ones(exact.shape, dtype=np.bool_)
    least = np.full(exact.shape, FP32_AGREES_NATS)
    if errors_of_fp32 is not None:
        of_fp32 = Floor.measure(errors_of_fp32, exact, of_all)
        least = np.maximum(least, of_fp32.of_format(dtype.round_off / Dtype.FP32.round_off).at(exact))
    if not dtype.rounds_coarsely:
        return least
    error, format_of_error = rounding_errors
    floor = Floor.measure(error, exact, of_all)
    return np.asarray(np.hypot(floor.of_format(dtype.round_off / format_of_error.round_off).at(exact), least))


THAN_GROWTH = 1.5
"""Nats by which the change of a response is at least likelier, in the mean, than growth along the context, or from its
own start or end: a line in the place with at most one bend, or one in a place's logarithm, with normal errors."""
_MOST_NATS = 5.0
"""Of one response in this mean: noise that lasts for long makes a change in some responses very likely by chance."""
_MOST_EQUAL = 0.6
"""Share of a part's tokens that are equal bit for bit; with more it was copied, not computed otherwise."""
LEAST_SHARE = 0.15
"""Of the responses that are long enough; at least LEAST_RESPONSES, of LEAST_PROMPTS prompts."""
LEAST_RESPONSES = 6
LEAST_PROMPTS = 3
ONE_WAY = 4.0
"""Responses that change in the prevailing direction, over those that change in the other one."""


@dataclass(frozen=True)
class LevelChange:
    """Responses whose deviation changes its level inside them, of `num_long` that have the length to show it."""

    num_responses: int
    num_long: int
    times: float
    """The level of the later part over that of the earlier one, in geometric means: the median of these responses."""

    @property
    def words(self) -> str:
        how, times = ("rises", self.times) if self.times > 1 else ("falls", 1 / self.times)
        return (
            f"the deviation {how} at once, {write_number(times)}-fold at the median, inside {self.num_responses} of "
            f"{write_many(self.num_long, 'response')} that are long enough to show it, in each at a place of its own: "
            "from there on one side has other weights (an update while it was sampled) or another context"
        )


class _Change(NamedTuple):
    """Inside one response."""

    row: int
    rise: float
    """Of the log of the level."""
    nats: float
    """By which it is likelier than growth."""
    span: int
    """Tokens among which it can be."""
    places: tuple[int, int, int]
    """Of the context, of the response, and from its end."""


def level_change_of(disagreement: Disagreement) -> LevelChange | None:
    """The change of level inside responses, each at its own place; None where there is none."""
    sequences = disagreement.pair.sequences
    is_equal, places = disagreement.pair.diff == 0, disagreement.places
    is_moved, sizes, levels, _ = sizes_by_sureness(disagreement)
    changes: list[_Change] = []
    num_long = 0
    for row, (start, end) in enumerate(pairwise(sequences.offsets.tolist())):
        at = np.flatnonzero(is_moved[start:end]) + start
        if at.size < 2 * LEAST_PART:
            continue
        num_long += 1
        own = sizes[at]
        courses = [places[at].astype(np.float64), np.log(places[at]), np.log(at - start + 1), np.log(end - at)]
        change = change_of_level(np.maximum(own, np.median(own) - np.log(10)) - levels[at], courses)
        if change is None:
            continue
        number, rise, nats = change
        if max(is_equal[at[:number]].mean(), is_equal[at[number:]].mean()) > _MOST_EQUAL:
            continue
        first, room = int(at[number]), int(at[-LEAST_PART] - at[LEAST_PART]) + 1
        changes.append(_Change(row, rise, nats, room, (int(places[first]), first - start, end - first)))
    rises, falls = ([each for each in changes if each.rise * way > 0] for way in (1, -1))
    more, fewer = (rises, falls) if len(rises) >= len(falls) else (falls, rises)
    num_prompts = len({int(sequences.cluster_index[each.row]) for each in more})
    if len(more) < max(LEAST_RESPONSES, LEAST_SHARE * num_long, ONE_WAY * len(fewer)) or num_prompts < LEAST_PROMPTS:
        return None
    if np.mean([min(each.nats, _MOST_NATS) for each in more]) < THAN_GROWTH:
        return None
    span = float(np.median([each.span for each in more]))
    if any(are_together(places_of_kind, span) for places_of_kind in zip(*(each.places for each in more), strict=True)):
        return None
    return LevelChange(len(more), num_long, float(np.exp(np.median([each.rise for each in more]))))
