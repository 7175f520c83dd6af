"""What the sums of a log say, in words: scales, signs, and the shift at which its two sides agree."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import Level, LogCode
from mismatch_probe.logs.checks.columns import ColumnSums, ResponseBlock
from mismatch_probe.logs.checks.rows import LONGEST_HEAD, Copies, EdgeSums, HeadSums, MaskSums, RowSums
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count, write_many, write_number, write_share
from mismatch_probe.records.sequences import FloatArray
from mismatch_probe.stats.copies import CopyTotals
from mismatch_probe.stats.sequences import MOST_ROUNDED_UP, Ints, Mask, is_usable
from mismatch_probe.stats.zeros import ZeroCounts
from mismatch_probe.verdict.case import where_equal

SHIFTS: Final = (-1, 0, 1)
_FEWEST_TOKENS: Final = 64
_LEAST_SPREAD: Final = 0.1
"""Standard deviation in nats under which rounding decides the correlation."""
_CLEARLY: Final = 0.3
_BELONGS: Final = 0.5
_LEAST: Final = -20.0
"""Nats: a lower log-prob counts as this, or one token would decide the correlation."""


@dataclass
class Alignment:
    """Sums over pairs of log mu at token t and log pi at token t + shift, [shift, (n, x, y, xx, yy, xy)]."""

    sums: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(SHIFTS), 6)))

    def add(self, block: ResponseBlock) -> None:
        mu, pi, rows = block.log_mu, block.column("log_pi"), block.rows
        counts_mu, counts_pi = block.sampled & _can_be(mu), block.sampled & _can_be(pi)
        is_recorded = np.ones(len(block.responses), dtype=np.bool_)
        for counts, side in ((counts_mu, mu), (counts_pi, pi)):  # zeros stand for what was not recorded
            is_recorded &= np.bincount(rows[counts & (side != 0)], minlength=is_recorded.size) > 0
        counts_mu &= is_recorded[rows]
        for index, shift in enumerate(SHIFTS):
            first = slice(max(0, -shift), mu.size - max(0, shift))
            second = slice(max(0, shift), mu.size - max(0, -shift))
            both = counts_mu[first] & counts_pi[second] & (rows[first] == rows[second])
            x, y = (np.maximum(side, _LEAST) for side in (mu[first][both], pi[second][both]))
            self.sums[index] += (x.size, x.sum(), y.sum(), x @ x, y @ y, x @ y)

    def __iadd__(self, other: Self) -> Self:
        self.sums = self.sums + other.sums
        return self

    @property
    def correlations(self) -> dict[int, float] | None:
        """By shift; None where the log-probs are too few or too alike to tell."""
        n, x, y, xx, yy, xy = self.sums.T
        if n.min() < _FEWEST_TOKENS:
            return None
        spread_x = np.sqrt(np.maximum(xx / n - (x / n) ** 2, 0))
        spread_y = np.sqrt(np.maximum(yy / n - (y / n) ** 2, 0))
        if min(spread_x.min(), spread_y.min()) < _LEAST_SPREAD:
            return None
        values = (xy / n - x * y / n**2) / (spread_x * spread_y)
        return dict(zip(SHIFTS, values.tolist(), strict=True))

    @property
    def shift(self) -> int:
        """By how many tokens the trainer's column is behind the sampler's; 0 where it is not or nothing shows it."""
        by_shift = self.correlations
        if by_shift is None:
            return 0
        best = max(by_shift, key=lambda shift: by_shift[shift])
        return best if by_shift[best] > _BELONGS and by_shift[best] > by_shift[0] + _CLEARLY else 0

    @property
    def is_unrelated(self) -> bool:
        """Whether the two sides do not go together at any shift."""
        by_shift = self.correlations
        return by_shift is not None and max(by_shift.values()) < _BELONGS


def _can_be(log_probs: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether each is a log-prob; squares of what is far above 0 have no sum."""
    return is_usable(log_probs) & (log_probs <= MOST_ROUNDED_UP)


_NAMES: Final = {
    "log_mu": "the sampler's log-probs",
    "log_pi": "the trainer's log-probs",
    "log_ref": "the reference's log-probs",
    "entropy_nats": "the entropies",
}
_AS_COPIED: Final = "as where a trainer copies them instead of computing"
_WHY_UNTOLD: Final = {False: "There is no other side", True: "The other side is exactly 0 there too"}
_LEFT_OUT: Final = "they were not recorded there and are left out"
_MOST_STEPS_NAMED: Final = 8


def unrecorded_finding(
    column: str, code: LogCode, steps: Collection[int | None] | None, sums: ColumnSums, copies: CopyTotals
) -> LogFinding:
    """That a column holds no numbers in these steps, or nowhere. sums, copies: of the steps without."""
    where = f" {where_equal(copies)}, {_AS_COPIED}" if code is LogCode.COPIED else ""
    where += "" if steps is None else f"{',' if where else ''} in {_steps(steps)}"
    why = _why_zeros(column, sums, sums.zeros) if code is LogCode.ALL_ZERO else _LEFT_OUT
    evidence = {} if steps is None else {"steps": _sort_steps(steps)}
    return LogFinding.of(code, column=column, evidence=evidence, name=_NAMES[column], where=where, why=why)


def _wrong_sign(column: str, sums: ColumnSums) -> str:
    """What is wrong, and what to log instead where no number of the column has the right sign."""
    if column == "entropy_nats":
        return "below 0, and no entropy is"
    if sums.lowest < 0:
        return "above 0, and no probability is above 1"
    if sums.highest <= 1:
        return "above 0, as probabilities are (log their logarithms)"
    return "above 0, as log-probs without their minus sign are (log them with it)"


def column_findings(column: str, sums: ColumnSums) -> Iterator[LogFinding]:
    """The findings on a column, over the steps that have it."""
    if sums.wrong_sign:
        yield _finding_with_count(LogCode.WRONG_SIGN, sums.wrong_sign, sums, column, _wrong_sign(column, sums))
    if sums.absent and sums.num_recorded:
        yield _finding_with_count(LogCode.SOME_MISSING, sums.absent, sums, column)
    if sums.sentinels:
        least = "-100 or lower, and no sampler draws such a token" if column == "log_mu" else "-9999 or lower"
        yield _finding_with_count(LogCode.SENTINELS, sums.sentinels, sums, column, least)
    if zero_counts := sums.filled:
        counts = sum(zero_counts, ZeroCounts())
        where = f", in {write_many(len(zero_counts), 'response')},"
        yield _zeros(LogCode.ZEROS_FILL_RESPONSES, column, sums, counts, where, responses=len(zero_counts))
    if (counts := sums.scattered_zeros).zeros:
        yield _zeros(LogCode.ZEROS_FOR_MISSING, column, sums, counts, ",")
    if zeros := sums.doubtful_zeros:
        yield LogFinding.of(
            LogCode.ZEROS_UNTOLD,
            column=column,
            evidence={"tokens": zeros, "of": sums.tokens},
            name=_NAMES[column],
            zeros=write_count(zeros),
            total=write_count(sums.tokens),
            why=_WHY_UNTOLD[bool(sums.zero_counts.compared)],
        )


def _zeros(
    code: LogCode, column: str, sums: ColumnSums, counts: ZeroCounts, where: str, **evidence: object
) -> LogFinding:
    """That zeros stand for no numbers."""
    zeros, num_refuted = int(counts.zeros), int(counts.refuted)
    return LogFinding.of(
        code,
        column=column,
        evidence={"tokens": zeros, "of": sums.tokens, "refuted": num_refuted, **evidence},
        name=_NAMES[column],
        zeros=write_count(zeros),
        total=write_count(sums.tokens),
        where=where,
        refuted=write_count(num_refuted),
        why=_why_zeros(column, sums, zeros),
    )


def _why_zeros(column: str, sums: ColumnSums, num_zeros: int) -> str:
    """Why so many of the zeros stand for no numbers."""
    if column != "log_mu":
        return _LEFT_OUT
    if sums.greedy_zeros >= num_zeros:
        return (
            "their tokens were sampled at temperature 0, where a log-prob is 0 once it is processed and says nothing; "
            "log those before processing (vLLM: --logprobs-mode raw_logprobs), or sample at a temperature above 0"
        )
    return f"{_LEFT_OUT}, or sampling was greedy (temperature 0) and they were logged after processing"


def copies_finding(column: str, copies: Copies, num_responses: int) -> LogFinding:
    """Responses whose column was copied, where the column of others was computed."""
    return LogFinding.of(
        LogCode.COPIED_ROWS,
        column=column,
        evidence={"responses": copies.count, "of": num_responses},
        name=_NAMES[column],
        as_copied=_AS_COPIED,
        number=write_count(copies.count),
        total=write_count(num_responses),
        undecided=_undecided_words(copies),
    )


def _undecided_words(copies: Copies) -> str:
    short = copies.short.undecided
    return f"; {write_many(short, 'other')} that are equal too are too short to tell" if short else ""


def alignment_findings(alignment: Alignment) -> Iterator[LogFinding]:
    """Whether one side is shifted, or the two do not belong together."""
    correlations = alignment.correlations
    if correlations is None:
        return
    evidence: dict[str, object] = {"correlations": {str(shift): value for shift, value in correlations.items()}}
    words = ", ".join(f"{value:.2f} at a shift of {shift}" for shift, value in correlations.items())
    if alignment.shift:
        side_of_shift = "late" if alignment.shift > 0 else "early"
        yield LogFinding.of(LogCode.SHIFTED, column="log_pi", evidence=evidence, late=side_of_shift, correlations=words)
    elif alignment.is_unrelated:
        yield LogFinding.of(LogCode.UNRELATED, column="log_pi", evidence=evidence, correlations=words)


def row_findings(rows: RowSums, vocabulary_size: int | None) -> Iterator[LogFinding]:
    """The findings on masks and ids."""
    yield LogFinding.of(
        LogCode.MASK_COUNTS,
        evidence={"sampled": rows.sampled, "not_sampled": rows.not_sampled, "padding": rows.padding},
        sampled=write_count(rows.sampled),
        not_sampled=write_count(rows.not_sampled),
        padding=write_count(rows.padding),
    )
    total = write_count(rows.responses)
    if rows.without_sampled:
        yield LogFinding.of(
            LogCode.NO_SAMPLED_TOKENS,
            level=Level.WARNING if 2 * rows.without_sampled >= rows.responses else Level.NOTE,
            evidence={"responses": rows.without_sampled, "of": rows.responses},
            number=write_count(rows.without_sampled),
            total=total,
        )
    if rows.with_padding_inside:
        yield LogFinding.of(
            LogCode.PADDING_AS_TOKENS,
            evidence={"responses": rows.with_padding_inside, "at": rows.padding_inside_at},
            number=write_count(rows.with_padding_inside),
            at=rows.padding_inside_at,
        )
    if rows.copies:
        yield LogFinding.of(
            LogCode.DUPLICATES,
            evidence={"responses": rows.copies, "of": rows.responses},
            number=write_count(rows.copies),
            total=total,
        )
    if vocabulary_size is not None and rows.largest_id >= vocabulary_size:
        yield LogFinding.of(
            LogCode.OUTSIDE_VOCABULARY,
            evidence={"id": rows.largest_id, "at": rows.largest_id_at, "vocabulary_size": vocabulary_size},
            at=rows.largest_id_at,
            id=rows.largest_id,
            size=write_count(vocabulary_size),
        )


_FEWEST_RUNS: Final = 8
_NEARLY_ALL: Final = 0.95
_FEW: Final = 0.05
_MOST: Final = 0.7
_ENOUGH_SURE: Final = 100
_IMPOSSIBLE_NATS: Final = 20.0
_UNLIKELY_NATS_A_TOKEN: Final = 1.5
_FEWEST_DIFFERENT: Final = 4
_IDS_OF_A_HEAD: Final = 8


def mask_findings(masks: MaskSums) -> Iterator[LogFinding]:
    """The findings on what stands at the edges of masks."""
    heads = (masks.first_heads, "responses"), (masks.later_heads, "later stretches of sampled tokens")
    has_constant_head = False
    for sums, what in heads:
        finding = _constant_head(sums, masks.edges, what)
        if finding is not None:
            has_constant_head = True
            yield finding
    edges = masks.edges
    if edges.inner and edges.inner_missing <= _FEW * edges.inner:
        others = "nearly all others under it have one"
        missing = "no log-prob of the sampler, or an exact 0 that the other side refutes,"
        is_off = _are_off(edges, edges.firsts_missing, edges.firsts_empty, edges.firsts)
        if is_off.any() and not has_constant_head:
            how = "begins a token early, or the sampler does not log what it samples first"
            counts = edges.firsts_empty[is_off], edges.firsts[is_off]
            yield _mask_edge(how, "that it begins with", missing, *counts, others)
        is_off = _are_off(edges, edges.lasts_missing, edges.lasts_empty, edges.lasts)
        if is_off.any():
            how = "ends a token late, or the sampler does not log what ends a response"
            counts = edges.lasts_empty[is_off], edges.lasts[is_off]
            yield _mask_edge(how, "that it ends with", missing, *counts, others)
    if edges.outside_recorded <= _FEW * edges.outside:
        others = "others outside have none" if edges.outside else "nothing else is outside"
        log_prob = "a log-prob of the sampler"
        for how, where, number, total in (
            ("begins a token late", "right before it", edges.before_recorded, edges.before),
            ("ends a token early", "right behind it", edges.after_recorded, edges.after),
        ):
            counts = np.array([number]), np.array([total])
            if _are_nearly_all(*counts).any():
                yield _mask_edge(how, where, log_prob, *counts, others)


def _are_nearly_all(numbers: Ints, totals: Ints, share: float = _NEARLY_ALL) -> Mask:
    return (totals >= _FEWEST_RUNS) & (numbers >= share * totals)


def _are_off(edges: EdgeSums, missing: Ints, empty: Ints, totals: Ints) -> Mask:
    """Whether tokens at an edge were not sampled. A trainer is mostly sure of what a template writes; a sampler that
    elsewhere writes down log-probs of tokens as sure as these has no 0 at nearly all of them.
    """
    has_log_probs = edges.inner_sure >= _ENOUGH_SURE and edges.inner_sure_empty <= _FEW * edges.inner_sure
    return _are_nearly_all(missing, totals) | (_are_nearly_all(empty, totals, _MOST) & has_log_probs)


def _mask_edge(how: str, where: str, what: str, numbers: Ints, totals: Ints, others: str) -> LogFinding:
    number, total = int(numbers.sum()), int(totals.sum())
    return LogFinding.of(
        LogCode.MASK_EDGE,
        evidence={"edge": how.partition(",")[0], "places": number, "of": total},
        how=how,
        where=where,
        what=what,
        number=write_count(number),
        total=write_count(total),
        others=others,
    )


def _constant_head(sums: HeadSums, edges: EdgeSums, what: str) -> LogFinding | None:
    """That stretches begin with the same tokens which cannot have been sampled each time."""
    if sums.runs < _FEWEST_RUNS or len(sums.hashes) < _FEWEST_DIFFERENT:
        return None
    is_constant = sums.alike >= _NEARLY_ALL * sums.runs
    has_numbers = edges.inner and edges.inner_missing <= edges.inner / 2
    is_missing = is_constant & (sums.missing >= _NEARLY_ALL * sums.alike) & bool(has_numbers)
    is_unlikely = is_constant & (sums.surprisal >= _UNLIKELY_NATS_A_TOKEN * sums.alike)
    nats = float(sums.surprisal[is_unlikely].sum())
    if nats < _IMPOSSIBLE_NATS:
        is_unlikely[:] = False
    is_telling = is_missing | is_unlikely
    if not is_telling.any():
        return None
    length = int(np.flatnonzero(is_telling)[-1]) + 1
    ids = sums.head[:length].tolist()
    alike = int(sums.alike[length - 1])
    why = (
        "of which the sampler has no log-prob"
        if is_missing[:length].all()
        else f"too improbable to be sampled each time (their log-probs add up to {write_number(-nats)})"
        if is_unlikely.any()
        else "some of which the sampler has no log-prob of"
    )
    return LogFinding.of(
        LogCode.CONSTANT_HEAD,
        evidence={"tokens": length, "ids": ids, "runs": alike, "of": sums.runs, "nats": nats},
        alike=write_count(alike),
        runs=write_count(sums.runs),
        what=what,
        number="token" if length == 1 else f"{length} tokens{' or more' if length == LONGEST_HEAD else ''}",
        ids=", ".join(map(str, ids[:_IDS_OF_A_HEAD])) + (", ..." if length > _IDS_OF_A_HEAD else ""),
        why=why,
    )


def _finding_with_count(code: LogCode, count: int, sums: ColumnSums, column: str, what: str = "") -> LogFinding:
    return LogFinding.of(
        code,
        column=column,
        evidence={"tokens": count, "of": sums.tokens},
        name=_NAMES[column],
        share=f"{write_count(count)} of {write_count(sums.tokens)} sampled tokens ({write_share(count, sums.tokens)})",
        what=what,
    )


def _steps(steps: Collection[int | None]) -> str:
    steps_by_name = [str(step) for step in _sort_steps(steps)[:_MOST_STEPS_NAMED]]
    more = f" and {len(steps) - len(steps_by_name)} more" if len(steps) > len(steps_by_name) else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(steps_by_name)}{more}"


def _sort_steps(steps: Collection[int | None]) -> list[int]:
    return sorted(step for step in steps if step is not None)
