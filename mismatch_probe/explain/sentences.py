"""From findings to a verdict in words: rounding, repeats, and where a side departs."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import LoggedSide
from mismatch_probe.dtypes import COARSEST_FIRST, Dtype
from mismatch_probe.explain.judging import FARTHEST_NATS, Account, Floats, Judge, LoggedTokens, find_unrelated
from mismatch_probe.explain.search import LEAST_EXPLAINED, SearchResult, SideBench
from mismatch_probe.notation import write_count, write_number, write_percent, write_share
from mismatch_probe.records.findings import Trial
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.stats.rounding import trimmed_mean
from mismatch_probe.stats.sequences import Sequences, TokenPair
from mismatch_probe.verdict.departures import LEAST_FP32_FLOOR
from mismatch_probe.verdict.signatures.places import (
    BEYOND_FORM_BY_CHECKPOINT,
    cause_of_onset,
    cause_of_period,
    onset_of,
    period_of,
)
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.recording import is_on_grid

_LEAST_DEGREES: Final = 2
ROUNDING_FLOORS: Final = 2.0
"""Two values of an engine differ by less: it rounds otherwise in another batch."""
_SHARE_OF_RESIDUAL: Final = 0.5
WRONG_AT_MOST: Final = 1e-3
_LESS_BY_CHANCE: Final = 0.01
_MOST_BY_BATCHES: Final = 20.0
"""Units of rounding: dropout can move all log-probs alike, by much more than it scatters them."""


@dataclass(frozen=True)
class RepeatSpread:
    """Of tokens that occur several times after the same context, under the same weights."""

    num_tokens: int
    degrees: int
    """Degrees of freedom: how many more tokens there are than contexts."""
    spread_floors: float
    """Root mean square by which their log-probs differ from each other's mean, in units of rounding."""
    residual_floors: float
    """Root mean square by which they differ from what is declared, in units of rounding."""

    @property
    def disagree(self) -> bool:
        """Whether they surely differ from each other by more than rounding, and may by as much as from the checkpoint:
        the one by a chi-squared test of their variance, the other by an F test of it.
        """
        if self.degrees < _LEAST_DEGREES:
            return False
        of_rounding = self.degrees * (self.spread_floors / ROUNDING_FLOORS) ** 2
        return bool(special.chdtrc(self.degrees, of_rounding) <= WRONG_AT_MOST) and not self.agree

    @property
    def agree(self) -> bool:
        """Whether they surely differ less from each other than from the checkpoint, and no more than batches can make
        one computation differ.
        """
        if self.degrees < _LEAST_DEGREES or self.spread_floors > _MOST_BY_BATCHES:
            return False
        of_residual = (self.spread_floors / max(_SHARE_OF_RESIDUAL * self.residual_floors, ROUNDING_FLOORS)) ** 2
        return bool(special.fdtr(self.degrees, self.num_tokens, of_residual) <= _LESS_BY_CHANCE)


def repeats(tokens: LoggedTokens, judge: Judge, null: Account) -> RepeatSpread:
    """Spread within each context's repetitions."""
    places: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for row, (sequence, response) in enumerate(zip(tokens.sequences, tokens.responses, strict=True)):
        version = (response.weight_version, response.step)
        first = int(tokens.starts[row])
        context = hash(tuple(sequence.prompt_token_ids))
        for place, token in enumerate(sequence.token_ids):
            context = hash((context, token))
            if judge.is_counted[first + place]:
                places[version, context, place].append(first + place)
    squares, residuals = [], []
    for same in places.values():
        if len(same) > 1:
            values = (judge.column[same] - null.prediction[same]) / null.unit[same]
            squares.append((values - values.mean()) ** 2 * len(same) / (len(same) - 1))
            residuals.append(values**2)
    if not squares:
        return RepeatSpread(0, 0, 0.0, 0.0)
    flat = np.concatenate(squares)
    return RepeatSpread(
        num_tokens=len(flat),
        degrees=len(flat) - len(squares),
        spread_floors=float(np.sqrt(flat.mean())),
        residual_floors=float(np.sqrt(np.concatenate(residuals).mean())),
    )


_MOST_DECIMALS: Final = 6


def grid_of(column: Floats) -> Dtype | None:
    """The coarsest format that every log-prob of the column is exact in, of those whose rounding shows."""
    return next((dtype for dtype in COARSEST_FIRST if is_on_grid(column, dtype)), None)


def resolution(values: Floats, column: Floats) -> Floats:
    """Root mean square of what writing a column down rounded away [T] (nats); `known` are the values that count."""
    grid = grid_of(values)
    if grid is not None:
        return np.asarray(np.abs(np.nan_to_num(column)) * grid.round_off / np.sqrt(3))
    for decimals in range(1, _MOST_DECIMALS):
        if len(values) and np.array_equal(np.round(values, decimals), values):
            return np.full_like(column, 10.0**-decimals / np.sqrt(12))
    return np.zeros_like(column)


_FIRST: Final = 8
_OFF_FLOORS: Final = 2.0
_UNEVEN: Final = 2.0
_LEAST_TOKENS: Final = 30


def where(tokens: LoggedTokens, judge: Judge, null: Account) -> Iterator[str]:
    """Sentences for what is uneven; none for a departure that is everywhere alike."""
    units = np.abs(judge.residual(null)) / null.unit
    is_known = np.isfinite(units)
    rows = np.unique(tokens.rows[is_known])
    off = [row for row in rows if np.median(units[is_known & (tokens.rows == row)]) > _OFF_FLOORS]
    if 0 < len(off) < len(rows):
        yield f"{len(off)} of {len(rows)} responses depart by more than {_OFF_FLOORS:g} floors on half of their tokens"
    first, rest = (units[is_known & (tokens.places < _FIRST)], units[is_known & (tokens.places >= _FIRST)])
    if min(len(first), len(rest)) < _LEAST_TOKENS:
        return
    first_size, rest_size = (float(np.sqrt(trimmed_mean(part**2))) for part in (first, rest))
    sizes = f"{write_number(first_size)} floors on the first {_FIRST} tokens, {write_number(rest_size)} on the others"
    if first_size > _UNEVEN * rest_size:
        yield f"{sizes}: it looks like other text before the response"
    elif rest_size > _UNEVEN * first_size:
        yield f"{sizes}: it grows along the response, as other positions do"


SIDES: Final[dict[LoggedSide, str]] = {"mu": "the engine's side (mu)", "pi": "the training path's side (pi)"}
GRAVEST_FIRST: Final = ("broken", "bug", "undecided", "precision", "clean")
_WORTH_SAYING: Final = 0.05


def verdict_of(bench: SideBench, result: SearchResult | None, num_missing: int, num_sampled: int) -> Verdict:
    """On one side: what is missing in it, what it departs in, or that it is as declared.

    result: None where every log-prob is missing.
    """
    causes = list(_missing(bench, num_missing, num_sampled))
    if result is not None:
        causes += [*_causes_of_departures(bench, result), *_cause_of_rounding(bench)]
        causes += _causes_without_hypothesis(bench, result)
        causes = causes or [_as_declared(bench, result)]
    first, *others = sorted(causes, key=lambda cause: GRAVEST_FIRST.index(Code.by_name(cause.code).kind))
    return Verdict(kind=Code.by_name(first.code).kind, also=others, **first.model_dump())


def _missing(bench: SideBench, num_missing: int, num_sampled: int) -> Iterator[Cause]:
    if num_missing:
        yield _cause_in_log(
            Code.MISSING_LOGPROBS,
            f"The data is broken: {write_count(num_missing)} log-probs of {SIDES[bench.side]} are missing.",
            [
                f"{write_share(num_missing, num_sampled)} of its log-probs are not recorded, NaN, infinite, a floor "
                "such as -9999, 0 at tokens that are far from certain, or copies of the other side's; they are left "
                "out of all other results"
            ],
        )


def _causes_of_departures(bench: SideBench, result: SearchResult) -> Iterator[Cause]:
    if result.explained_by is None:
        return
    trial = result.explained_by.trial
    evidence = [evidence_of(trial), _left_by("as declared", result.null.trial)]
    if trial.explained < LEAST_EXPLAINED and all(departure.part == "weights" for departure in trial.departures):
        scores = bench.judge.drawn_to(result.explained_by.account, result.null.account)
        evidence.append(
            f"it moves log-probs by less than rounding does, and the residuals point to it by {write_number(scores)} "
            "standard errors"
        )
    for departure in trial.departures:
        yield _cause_in_log(
            Code.by_name(departure.code),
            f"{_capital(SIDES[bench.side])} departs from its declared settings: {departure.against_declared}.",
            list(evidence),
        )


def _cause_of_rounding(bench: SideBench) -> Iterator[Cause]:
    grid = grid_of(bench.judge.column[bench.judge.is_counted])
    if grid is not None:
        yield _cause_in_log(
            Code.ONE_SIDED_DTYPE,
            f"{_capital(SIDES[bench.side])} departs from its declared settings: its log-probs are rounded to {grid}.",
            [f"every log-prob is exact in {grid}: a log-softmax in {grid}, or a transport that stored it"],
        )


def _causes_without_hypothesis(bench: SideBench, result: SearchResult) -> list[Cause]:
    """What shows without a hypothesis: other texts, no agreement with itself, places of the context; else nothing."""
    has_hypothesis = result.explained_by is not None and result.explained_by is not result.null
    fault = (
        None if has_hypothesis
        else _fault_at_places(SIDES[bench.side], bench.tokens, bench.judge, result.null.account, bench.dtype)
    )  # fmt: skip
    nameless = [*_nameless(bench, result, fault)]
    if fault is None or fault.is_open or any(cause.code != Code.UNEXPLAINED for cause in nameless):
        return nameless
    evidence = [*fault.cause.evidence, _left_by("as declared", result.null.trial)]
    return [
        fault.cause.model_copy(update={"evidence": evidence, "advice": [Code.by_name(fault.cause.code).entry.in_a_log]})
    ]


def cause_at_places(side: str, tokens: LoggedTokens, judge: Judge, null: Account, dtype: Dtype) -> Cause | None:
    """The cause, where a side departs from the checkpoint once in every block of the context, or from a place on."""
    fault = _fault_at_places(side, tokens, judge, null, dtype)
    return None if fault is None or fault.is_open else fault.cause


@dataclass(frozen=True)
class _FaultAtPlaces:
    cause: Cause
    alike: str | None
    """What is said where all prompts have one length: the places may be the response's."""

    @property
    def is_open(self) -> bool:
        """Whether it is not named: rows of a table have a period too, in the response."""
        return self.alike is not None and self.cause.code == Code.PERIOD

    @property
    def open_lines(self) -> list[str]:
        return [] if self.alike is None else [self.cause.evidence[0], self.alike]


def _fault_at_places(
    side: str, tokens: LoggedTokens, judge: Judge, null: Account, dtype: Dtype
) -> _FaultAtPlaces | None:
    """None where the side departs at the other places too, which is more than a fault at places."""
    disagreement = _from_checkpoint(tokens, judge, null, dtype)
    if disagreement is None:
        return None
    prompt_lengths = [len(sequence.prompt_token_ids) for sequence in tokens.sequences]
    has_one_length = len(set(prompt_lengths)) == 1
    alike = f"every prompt has {write_count(prompt_lengths[0])} tokens: it may be a place of the response"
    places = tokens.places + np.repeat(prompt_lengths, tokens.lengths)
    if (seams := period_of(disagreement, BEYOND_FORM_BY_CHECKPOINT)) is not None:
        is_there, cause = places % seams.block == seams.phase, cause_of_period(disagreement, seams, _capital(side))
    elif (step := onset_of(disagreement, BEYOND_FORM_BY_CHECKPOINT)) is not None:
        cause = cause_of_onset(disagreement, step, _capital(side), [alike] if has_one_length else [])
        is_there = places >= step.place
    else:
        return None
    units_elsewhere = (judge.residual(null) / null.unit)[judge.is_counted & ~is_there]
    units_elsewhere = units_elsewhere[np.isfinite(units_elsewhere)]
    if np.sqrt(trimmed_mean(units_elsewhere**2)) >= _OFF_FLOORS:
        return None
    return _FaultAtPlaces(cause, alike if has_one_length else None)


def _from_checkpoint(tokens: LoggedTokens, judge: Judge, null: Account, dtype: Dtype) -> Disagreement | None:
    """A side, and what the checkpoint gives as declared in the place of the other one."""
    column, prediction = judge.column, null.prediction
    is_known = judge.is_counted & np.isfinite(prediction) & np.isfinite(column)
    prompts = [tuple(sequence.prompt_token_ids) for sequence in tokens.sequences]
    clusters = np.unique(np.array([hash(prompt) for prompt in prompts]), return_inverse=True)[1]
    sequences = Sequences.of_lengths(tokens.lengths, clusters).of_tokens(is_known)
    if sequences is None:
        return None
    has_token = np.bincount(tokens.rows[is_known], minlength=len(prompts)) > 0
    own, exact = (np.clip(values[is_known], -FARTHEST_NATS, 0.0) for values in (column, prediction))
    return Disagreement(
        TokenPair(sequences, log_pi=own, log_mu=exact),
        dtype,
        Dtype.FP32,
        LEAST_FP32_FLOOR,
        prompt_lengths=np.array([len(prompt) for prompt in prompts])[has_token],
    )


def _as_declared(bench: SideBench, result: SearchResult) -> Cause:
    evidence = [_left_by("as declared", result.null.trial)]
    return Cause.of(Code.AS_DECLARED, evidence, side=SIDES[bench.side])


def _nameless(bench: SideBench, result: SearchResult, fault: _FaultAtPlaces | None) -> Iterator[Cause]:
    """What no hypothesis explains, and whether the side agrees with itself. Where the departure stands once in every
    block, how it lies along the response says nothing.
    """
    if result.explained_by is not None:
        return
    strangers = find_unrelated(bench.tokens, bench.judge, result.null.account)
    if strangers is not None:
        yield _cause_in_log(
            Code.MISPAIRED,
            f"{_capital(SIDES[bench.side])} departs from its declared settings: {strangers.num_off} of "
            f"{strangers.num_responses} responses carry log-probs of another text.",
            [
                f"their log-probs do not follow their tokens (correlation {write_number(strangers.correlation)}), and "
                "the other responses agree; whose they are is not in the sample",
                _left_by("as declared", result.null.trial),
            ],
        )
        return
    spreads = repeats(bench.tokens, bench.judge, result.null.account)
    lines = [
        _left_by("as declared", result.null.trial),
        *_best_attempts(result),
        *(
            fault.open_lines
            if fault is not None and fault.is_open
            else where(bench.tokens, bench.judge, result.null.account)
        ),
    ]
    spread = f"{write_number(spreads.spread_floors)} times the floor"
    if spreads.disagree:
        yield _cause_in_log(
            Code.NOT_REPEATABLE,
            f"{_capital(SIDES[bench.side])} does not agree with itself: dropout, or another randomness, is active.",
            [
                f"{write_count(spreads.num_tokens)} log-probs of tokens that occur again after the same context, "
                f"under the same weights, differ from each other by {spread}",
                *lines,
            ],
        )
        return
    if spreads.agree:
        evidence = (
            f"the side agrees with itself to {spread} where the same context occurs again, so it is no randomness: it "
            "looks like other weights or another computation than was tried"
        )
    else:
        evidence = "no context occurs often enough in the log to tell whether the side agrees with itself"
    yield Cause(
        code=Code.UNEXPLAINED,
        sentence=f"Unexplained: nothing that was tried explains {SIDES[bench.side]}.",
        evidence=[*lines, evidence],
        advice=[
            f"Give `mismatch-probe explain` the checkpoints that {SIDES[bench.side]} may have had instead "
            "(`--weights VERSION=FOLDER`), and what may stand before its prompts (`--header TEXT`)."
        ],
    )


def _best_attempts(result: SearchResult) -> list[str]:
    """Those that explain anything, or that none does."""
    attempts = [attempt.trial for attempt in result.attempts if attempt.trial.explained >= _WORTH_SAYING]
    if attempts:
        return [evidence_of(trial) for trial in attempts[:2]]
    return [
        f"none of {len(result.attempts)} hypotheses explains {write_percent(_WORTH_SAYING)} of the deviation (share of "
        "the mean square)"
    ]


def evidence_of(trial: Trial) -> str:
    """What a hypothesis explains; a format, which predicts nothing, by the size of what is left."""
    what = " and ".join(departure.what for departure in trial.departures)
    if all(departure.part == "format" for departure in trial.departures):
        return f"{what} leaves {write_number(trial.residual_floors)} times the floor of that format"
    share = f"{100 * trial.explained:.3g}"
    return (
        f"{what} explains {share} % of the deviation (share of the mean square); the rest is "
        f"{write_number(trial.residual_floors)} times the floor of rounding"
    )


def _left_by(what: str, trial: Trial) -> str:
    return (
        f"{what}: {write_number(trial.residual_floors)} times the floor of rounding "
        f"({write_number(trial.residual_nats)} nats rms)"
    )


def _cause_in_log(code: Code, sentence: str, evidence: list[str]) -> Cause:
    advice = [code.entry.in_a_log] if code.entry.in_a_log else code.fix()
    return Cause(code=code, sentence=sentence, evidence=evidence, advice=advice)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
