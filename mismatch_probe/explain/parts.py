"""Weights that changed while a response was sampled: which weights each response's parts fit, and where it changes.

The loss of a token under given weights is a negative log-likelihood, so the best sequence of parts, whose weights come
in one order, is found by dynamic programming [Bellman 1954; Viterbi 1967]. Of one version of the weights, another one
looks better by `g` nats on some beginning or end with a probability of exp(-g) at most [Wald 1947, the likelihood
ratio as a martingale], so that each change has to be better by a fixed number of nats and by the logarithm of the
places that it is chosen from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import ExplainSettings, KnownWeights
from mismatch_probe.explain.hypotheses import Family, Option, Setup, WeightsPlan, departure
from mismatch_probe.explain.judging import Account, Floats, Judge, LoggedTokens
from mismatch_probe.explain.search import REACHES_FLOORS, SideBench
from mismatch_probe.stats.sequences import Ints

_LEAST_NATS: Final = 8.0
"""By which a change of weights, and a departure from what is recorded, must be the better explanation."""
_WITHIN_NATS: Final = 3.0
"""A place that is so much worse than the best one at most is in the interval."""
_LEAST_PRICE: Final = 2.0
"""Of a change, nats, where it is recorded, and where no response is judged by it."""
_PRICE_OF_A_HALF: Final = 0.5
"""The same on half of the tokens: the other half sees what is chance."""
_FIRST_PLACES: Final = 12
_FIRST_RESPONSES: Final = 8
_COMES_NEAR: Final = 1.5
_BETTER_SCORES: Final = 2.5
PartsPlan = tuple[tuple[int, int], ...]
"""The parts of a response: the number of their weights, and where they end."""


@dataclass(frozen=True)
class PartsFit:
    """What each of R responses fits. candidates: weights, the oldest first; None is the checkpoint."""

    candidates: tuple[KnownWeights | None, ...]
    losses: Floats
    """[K, T] of each weights, tempered; 0 where a token does not count."""
    plans: list[PartsPlan]
    intervals: list[list[tuple[int, int]]]
    """Of each change of a response: the first and the last token that the new weights may have begun with."""
    prediction: Floats
    """[T] Each half of the tokens as the other half chose; NaN where a half cannot tell."""
    floors: float
    """What the plans leave, in units of rounding."""
    keeps_cache: bool = False
    """The later parts are what the newer weights give behind keys and values that the older ones computed."""

    loss: float = 0.0
    """Of the plans, with the price of their changes."""

    @property
    def num_mixed(self) -> int:
        return sum(len(plan) > 1 for plan in self.plans)


def fit_parts(bench: SideBench, settings: ExplainSettings) -> PartsFit | None:
    """None where no other weights are given."""
    tokens = bench.tokens
    candidates = tuple(dict.fromkeys([*settings.weights, None]))
    if len(candidates) < 2:
        return None
    bench.tell("weights within responses", None)
    setups = [Setup(WeightsPlan((each,) * tokens.num_responses), None, bench.context) for each in candidates]
    columns = np.stack([bench.predictions.column(setup, bench.as_declared) for setup in setups])
    fits = []
    for way in (1, -1):
        in_order = candidates[::way], columns[::way]
        fits.append((_fit_in_order(bench, *in_order, _records(bench, in_order[0])), in_order))
    fit, in_order = min(fits, key=lambda each: each[0].loss)
    if fit.floors <= REACHES_FLOORS:
        return _with_kept(bench, fit, in_order)
    for _, (candidates_in_order, columns_in_order) in fits:
        for newer in range(1, len(candidates)):
            fit = _better_with_kept(bench, fit, candidates_in_order, columns_in_order, newer)
    return fit


def _better_with_kept(
    bench: SideBench, fit: PartsFit, candidates: tuple[KnownWeights | None, ...], columns: Floats, newer: int
) -> PartsFit:
    """The parts behind kept keys and values, where they are better. Every place that is tried takes two passes over a
    response, so a few responses are tried first, and the others where these come near the floor.
    """
    tokens = bench.tokens
    rows = [row for row in range(tokens.num_responses) if tokens.lengths[row] > 2]
    if not rows:
        return fit
    first_rows = rows[:: -(-len(rows) // _FIRST_RESPONSES)]
    ends = _ends_of_kept(bench, candidates, columns, newer, first_rows)
    columns_of_first = np.where(np.isin(tokens.rows, first_rows), columns, np.nan)
    if _kept_at(bench, candidates, columns_of_first, newer, ends).floors > _COMES_NEAR * REACHES_FLOORS:
        return fit
    ends |= _ends_of_kept(bench, candidates, columns, newer, [row for row in rows if row not in ends])
    return _better(bench, fit, _kept_at(bench, candidates, columns, newer, ends))


def _records(bench: SideBench, candidates: tuple[KnownWeights | None, ...]) -> list[PartsPlan | None]:
    """What the log has of each response."""
    numbers = {each: number for number, each in enumerate(candidates)}
    lengths = bench.tokens.lengths.tolist()
    return [recorded_plan(bench.weights, row, numbers, length) for row, length in enumerate(lengths)]


def _with_kept(bench: SideBench, fit: PartsFit, in_order: tuple[tuple[KnownWeights | None, ...], Floats]) -> PartsFit:
    """The parts behind kept keys and values, where they are better still."""
    candidates, columns = in_order
    for newer in range(1, len(candidates)):
        ends = {
            row: plan[0][1]
            for row, plan in enumerate(fit.plans)
            if [weights for weights, _ in plan] == [newer - 1, newer]
        }
        if ends:
            fit = _better(bench, fit, _kept_at(bench, candidates, columns, newer, ends))
    return fit


def _better(bench: SideBench, fit: PartsFit, other: PartsFit) -> PartsFit:
    """The other one, where it reaches the floor and is better beyond doubt."""
    judge, floor = bench.judge, bench.floors[bench.dtype]
    accounts = [judge.account(each.prediction, floor) for each in (other, fit)]
    is_better = other.floors <= REACHES_FLOORS and judge.standard_scores(accounts[0], accounts[1]) >= _BETTER_SCORES
    return other if is_better else fit


def _fit_in_order(
    bench: SideBench,
    candidates: tuple[KnownWeights | None, ...],
    columns: Floats,
    records: Sequence[PartsPlan | None],
    *,
    keeps_cache: bool = False,
) -> PartsFit:
    """The parts by the predictions [K, T] of each weights. records: what the log has of each response, which costs
    nothing.
    """
    tokens, judge, floor = bench.tokens, bench.judge, bench.floors[bench.dtype]
    losses = _losses(columns, bench)
    noise = judge.account(_composition(columns, _plans(losses, tokens, _LEAST_PRICE), tokens), floor)
    losses = losses / _noise_floors(judge, noise, tokens) ** 2
    plans = _with_records(losses, _plans(losses, tokens), records, tokens)
    return PartsFit(
        candidates,
        losses,
        plans,
        [_intervals(losses[:, tokens.of_row(row)], plan) for row, plan in enumerate(plans)],
        _composition_across_halves(columns, losses, records, tokens),
        judge.floors(judge.account(_composition(columns, plans, tokens), floor)),
        keeps_cache,
        sum(_priced_loss(losses[:, tokens.of_row(row)], plan) for row, plan in enumerate(plans)),
    )


def _noise_floors(judge: Judge, account: Account, tokens: LoggedTokens) -> float:
    """What a response leaves at the median, in units of rounding: at least 1, at most what counts as explained."""
    squares = np.square(judge.residual(account) / account.unit)
    rows = [squares[tokens.of_row(row)] for row in range(tokens.num_responses)]
    typical = [float(np.sqrt(np.nanmean(row))) for row in rows if np.isfinite(row).any()]
    return float(np.clip(np.median(typical), 1.0, REACHES_FLOORS)) if typical else 1.0


def _with_records(
    losses: Floats,
    plans: Sequence[PartsPlan],
    records: Sequence[PartsPlan | None],
    tokens: LoggedTokens,
    price_nats: float | None = None,
) -> list[PartsPlan]:
    """What is recorded of several parts where it explains a response better than the parts that were fitted, with the
    price of their changes; recorded changes cost little.
    """
    best_plans = []
    for row, (plan, record) in enumerate(zip(plans, records, strict=True)):
        of_row = losses[:, tokens.of_row(row)]
        price = change_price(of_row.shape[1]) if price_nats is None else price_nats
        fitted_loss = loss_of(of_row, plan) + price * (len(plan) - 1)
        if record is not None and len(record) > 1:
            little = min(_LEAST_PRICE, price) * (len(record) - 1)
            plan = record if loss_of(of_row, record) + little < fitted_loss else plan
        best_plans.append(plan)
    return best_plans


def _kept_at(
    bench: SideBench, candidates: tuple[KnownWeights | None, ...], columns: Floats, newer: int, ends: Mapping[int, int]
) -> PartsFit:
    """The parts where some weights go on behind the keys and values of those before, from the token `ends[ROW]` on."""
    column = bench.predictions.column_with_kept_cache(
        candidates[newer - 1], candidates[newer], bench.context, ends, bench.as_declared
    )
    with_kept = columns.copy()
    with_kept[newer] = np.where(np.isfinite(column), column, columns[newer])
    return _fit_in_order(bench, candidates, with_kept, [None] * bench.tokens.num_responses, keeps_cache=True)


def _ends_of_kept(
    bench: SideBench,
    candidates: tuple[KnownWeights | None, ...],
    columns: Floats,
    newer: int,
    rows: Sequence[int],
) -> dict[int, int]:
    """The token of each of these responses from which the newer weights fit best behind the older ones' keys and
    values. What they give depends on where they begin, so that places are tried: some from all over it, then nearer
    ones.
    """
    tokens = bench.tokens
    best: dict[int, tuple[float, int]] = {}

    def try_ends(ends: Mapping[int, int]) -> None:
        column = bench.predictions.column_with_kept_cache(
            candidates[newer - 1], candidates[newer], bench.context, ends, bench.as_declared
        )
        kept_column = np.where(np.isfinite(column), column, columns[newer])
        old, new = _losses(np.stack([columns[newer - 1], kept_column]), bench)
        for row, end in ends.items():
            start = int(tokens.starts[row])
            loss = float(old[start : start + end].sum() + new[start + end : start + int(tokens.lengths[row])].sum())
            best[row] = min(best.get(row, (np.inf, 0)), (loss, end))

    steps = {row: max(1, (int(tokens.lengths[row]) - 1) // _FIRST_PLACES) for row in rows}
    for number in range(_FIRST_PLACES + 1):
        ends = {row: 1 + number * steps[row] for row in rows if 1 + number * steps[row] < tokens.lengths[row]}
        if ends:
            try_ends(ends)
    while any(step > 1 for step in steps.values()):
        steps = {row: -(-step // 2) for row, step in steps.items()}
        for sign in (-1, 1):
            ends = {row: best[row][1] + sign * steps[row] for row in rows}
            try_ends({row: end for row, end in ends.items() if 0 < end < tokens.lengths[row]})
    return {row: end for row, (_, end) in best.items()}


def _losses(columns: Floats, bench: SideBench) -> Floats:
    """[K, T] of predictions; 0 where a token does not count for one of them."""
    floor = bench.floors[bench.dtype]
    losses = np.stack([bench.judge.loss(bench.judge.account(column, floor)) for column in columns])
    return np.where(np.isfinite(losses).all(axis=0), losses, 0.0)


def _priced_loss(losses: Floats, plan: PartsPlan) -> float:
    return loss_of(losses, plan) + change_price(losses.shape[1]) * (len(plan) - 1)


def loss_of(losses: Floats, plan: PartsPlan) -> float:
    start, total = 0, 0.0
    for weights, end in plan:
        total += float(losses[weights, start:end].sum())
        start = end
    return total


def change_price(num_tokens: int) -> float:
    return _LEAST_NATS + float(np.log(max(num_tokens, 1)))


def _plans(losses: Floats, tokens: LoggedTokens, price_nats: float | None = None) -> list[PartsPlan]:
    """The parts of least loss of each response, in the order of the weights, each change at its price.

    losses: [K, T] of each weights. price_nats: of a change, `change_price` unless given.
    """
    num_weights, num_rows, longest = len(losses), tokens.num_responses, int(tokens.lengths.max())
    padded = np.zeros((longest, num_weights, num_rows))
    padded[tokens.places, :, tokens.rows] = losses.T
    price = np.array([change_price(int(length)) if price_nats is None else price_nats for length in tokens.lengths])
    best = padded[0].copy()
    came_from = np.zeros((longest, num_weights, num_rows), np.int16)
    for place in range(1, longest):
        before, least, least_from = best.copy(), np.full(num_rows, np.inf), np.zeros(num_rows, np.int16)
        for weights in range(num_weights):
            is_changed = least + price < before[weights]
            best[weights] = np.where(is_changed, least + price, before[weights]) + padded[place, weights]
            came_from[place, weights] = np.where(is_changed, least_from, weights)
            is_less = before[weights] < least
            least, least_from = np.where(is_less, before[weights], least), np.where(is_less, weights, least_from)
    last = best.argmin(axis=0)
    return [_plan_of_trace(came_from[:, :, row], int(last[row]), int(tokens.lengths[row])) for row in range(num_rows)]


def _plan_of_trace(came_from: Ints, last: int, num_tokens: int) -> PartsPlan:
    """The plan that ends with the weights `last`, of where each of them came from at each place [T, K]."""
    parts, weights, end = [], last, num_tokens
    for place in range(num_tokens - 1, 0, -1):
        before = int(came_from[place, weights])
        if before != weights:
            parts.append((weights, end))
            weights, end = before, place
    return ((weights, end), *parts[::-1])


def _intervals(losses: Floats, plan: PartsPlan) -> list[tuple[int, int]]:
    """Of each change: the tokens that the new weights may have begun with, the parts around it as they are."""
    intervals = []
    starts = [0, *(end for _, end in plan)]
    for number, ((old, end), (new, next_end)) in enumerate(pairwise(plan)):
        start = starts[number]
        gains = np.concatenate([[0.0], np.cumsum((losses[old] - losses[new])[start:next_end])])
        near = np.flatnonzero(gains <= gains[end - start] + _WITHIN_NATS)
        intervals.append((start + int(near[0]), start + int(near[-1])))
    return intervals


def _composition(columns: Floats, plans: Sequence[PartsPlan], tokens: LoggedTokens) -> Floats:
    """The predictions [T] of the weights that the plans name, of those of each weights [K, T]."""
    numbers_T = np.concatenate([np.zeros(0, np.int64), *(_weights_of(plan) for plan in plans)])
    return np.asarray(columns[numbers_T, np.arange(columns.shape[1])])


def _weights_of(plan: PartsPlan) -> Ints:
    ends = np.array([end for _, end in plan])
    return np.repeat([weights for weights, _ in plan], np.diff(ends, prepend=0))


def _composition_across_halves(
    columns: Floats, losses: Floats, records: Sequence[PartsPlan | None], tokens: LoggedTokens
) -> Floats:
    """As the even tokens choose for the odd ones, and the reverse; NaN at the tokens between which a half cannot tell
    where the weights changed, unless the log records it.
    """
    parity = tokens.places % 2 == 1
    halves = []
    for odd in (False, True):
        of_half = losses * (parity == odd)
        fitted_plans = _plans(of_half, tokens, _PRICE_OF_A_HALF)
        plans = _with_records(of_half, fitted_plans, records, tokens, _PRICE_OF_A_HALF)
        half = _composition(columns, plans, tokens)
        for row, plan in enumerate(plans):
            if plan != records[row]:
                for start, end in _intervals(of_half[:, tokens.of_row(row)], plan):
                    half[tokens.of_row(row)][start:end] = np.nan
        halves.append(half)
    return np.where(parity, halves[0], halves[1])


def recorded_plan(
    plan: WeightsPlan, row: int, numbers: dict[KnownWeights | None, int], num_tokens: int
) -> PartsPlan | None:
    """What the log records of a response, by the numbers of the candidates; None where one is not among them."""
    parts = plan.parts_of(row, num_tokens)
    if any(weights not in numbers for weights, _ in parts):
        return None
    return tuple((numbers[weights], end) for weights, end in parts)


def families_of_parts(fit: PartsFit | None) -> list[Family]:
    """That the weights changed within responses; none where they did in none."""
    if fit is None or not fit.num_mixed:
        return []
    kept = ", with the keys and values of the older ones kept" if fit.keeps_cache else ""
    what = f"weights that changed within {fit.num_mixed} of {len(fit.plans)} responses{kept}"
    option = Option(departure("weights", Code.MIXED_WEIGHTS, what), edit=partial(_replacement, by=fit.prediction))
    return [Family(what, "weights", (option,), is_fitted=True)]


def _replacement(prediction: Floats, judge: Judge, by: Floats) -> Floats:
    return by
