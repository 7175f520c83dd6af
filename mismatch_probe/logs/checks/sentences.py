"""What the sums of a log say, in words: scales, signs, and the shift at which its two sides agree."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np

from mismatch_probe.causes.findings import Level, LogCode
from mismatch_probe.logs.checks.columns import ColumnSums, Copies
from mismatch_probe.logs.checks.rows import LONGEST_HEAD, EdgeSums, HeadSums, MaskSums, RowSums, StopSums
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import write_count, write_many, write_number, write_share
from mismatch_probe.stats.copies import CopyTotals
from mismatch_probe.stats.sequences import Ints, Mask
from mismatch_probe.stats.zeros import ZeroCounts, ZerosAtEdge
from mismatch_probe.verdict.case import where_equal

_NAMES: Final = {
    "log_mu": "the engine's log-probs",
    "log_pi": "the training path's log-probs",
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
        least = "-100 or lower, and no engine draws such a token" if column == "log_mu" else "-9999 or lower"
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
_IMPROBABLE_ZEROS_NATS: Final = 18.0
"""-log p; of 102 sound logs of two models none had 0.1, of 21 whose mask takes in several tokens 19 had more."""
_IMPOSSIBLE_NATS: Final = 20.0
_UNLIKELY_NATS_A_TOKEN: Final = 1.5
_BY_CHANCE_NATS: Final = 7.0
"""-log p: tokens behind a prefix that are alike in all responses, less likely than this, belong to it."""
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
    after_stop = _after_stop(masks.stops)
    if after_stop is not None:
        yield after_stop
    if edges.inner and edges.inner_missing <= _FEW * edges.inner:
        others = "nearly all others under it have one"
        missing = "no log-prob of the engine, or an exact 0 that the other side refutes,"
        zeros = edges.firsts_zeros
        is_off = _are_off(edges, edges.firsts_missing, edges.firsts_empty, edges.firsts, zeros)
        if is_off.any() and not has_constant_head:
            how = "begins a token early, or the engine does not log what it samples first"
            yield _mask_edge(how, "that it begins with", missing, *_counts_off(edges, "firsts", is_off), others)
        elif not has_constant_head:
            yield from _zeros_of_one_token("begins a token early", "begins", edges, zeros)
        zeros = edges.lasts_zeros
        is_off = _are_off(edges, edges.lasts_missing, edges.lasts_empty, edges.lasts, zeros)
        if is_off.any() and after_stop is None:
            how = "ends a token late, or the engine does not log what ends a response"
            yield _mask_edge(how, "that it ends with", missing, *_counts_off(edges, "lasts", is_off), others)
        elif after_stop is None:
            yield from _zeros_of_one_token("ends a token late", "ends", edges, zeros)
    if edges.outside_recorded <= _FEW * edges.outside:
        others = "others outside have none" if edges.outside else "nothing else is outside"
        log_prob = "a log-prob of the engine"
        for how, where, number, total in (
            ("begins a token late", "right before it", edges.before_recorded, edges.before),
            ("ends a token early", "right behind it", edges.after_recorded, edges.after),
        ):
            counts = np.array([number]), np.array([total])
            if _are_nearly_all(*counts).any():
                yield _mask_edge(how, where, log_prob, *counts, others)


def _are_nearly_all(numbers: Ints, totals: Ints, share: float = _NEARLY_ALL) -> Mask:
    return (totals >= _FEWEST_RUNS) & (numbers >= share * totals)


def _are_off(edges: EdgeSums, missing: Ints, empty: Ints, totals: Ints, zeros: Sequence[ZerosAtEdge]) -> Mask:
    """Whether tokens at an edge were not sampled. A trainer is mostly sure of what a template writes; an engine that
    elsewhere writes down log-probs of tokens as sure as these has no 0 at nearly all of them. One token alone may be
    forced, and its 0 real, so that each token counts once.
    """
    has_log_probs = edges.inner_sure >= _ENOUGH_SURE and edges.inner_sure_empty <= _FEW * edges.inner_sure
    are_zeros = [
        _are_all_zeros(each) and each.nats(edges.inner_by_sureness)[0] >= _IMPROBABLE_ZEROS_NATS for each in zeros
    ]
    are_empty = _are_nearly_all(empty, totals, _MOST) & has_log_probs
    return np.asarray(_are_nearly_all(missing, totals) | are_empty | np.array(are_zeros))


def _are_all_zeros(zeros: ZerosAtEdge) -> bool:
    return zeros.places >= _FEWEST_RUNS and zeros.zeros >= _NEARLY_ALL * zeros.places


def _counts_off(edges: EdgeSums, name: str, is_off: Mask) -> tuple[Ints, Ints]:
    """How many tokens at an edge have no log-prob, or a 0 that stands for none, and of how many."""
    zeros = np.array([each.zeros if _are_all_zeros(each) else 0 for each in getattr(edges, f"{name}_zeros")])
    return np.maximum(getattr(edges, f"{name}_empty"), zeros)[is_off], getattr(edges, name)[is_off]


def _zeros_of_one_token(how: str, verb: str, edges: EdgeSums, zeros: Sequence[ZerosAtEdge]) -> Iterator[LogFinding]:
    """The question whether a token that always has 0 at an edge was forced, or not sampled: the log holds the same
    numbers in both cases.
    """
    open_edges = [
        each
        for each in zeros
        if _are_all_zeros(each) and each.nats(edges.inner_by_sureness)[1] >= _IMPROBABLE_ZEROS_NATS
    ]
    if not open_edges:
        return
    number, tokens = sum(each.zeros for each in open_edges), len(set[int]().union(*(e.surest for e in open_edges)))
    yield LogFinding.of(
        LogCode.MASK_EDGE,
        "question",
        level=Level.NOTE,
        evidence={"edge": how, "places": number, "of": sum(each.places for each in open_edges), "tokens": tokens},
        how=how,
        verb=verb,
        number=write_count(number),
        tokens="the same token" if tokens == 1 else f"the same {write_count(tokens)} tokens",
    )


def _after_stop(stops: StopSums) -> LogFinding | None:
    """That stretches of sampled tokens go on by the same number of tokens behind one at which the engine stops."""
    most = stops.after_stop[:, 1:-1].argmax(1) + 1
    numbers, totals = stops.after_stop[np.arange(2), most], stops.after_stop.sum(1)
    is_late = _are_nearly_all(numbers, totals)
    if not is_late.any():
        return None
    number, total = int(numbers[is_late].sum()), int(totals[is_late].sum())
    return LogFinding.of(
        LogCode.MASK_EDGE,
        "after_stop",
        evidence={"edge": "ends late", "tokens": int(most[is_late].max()), "places": number, "of": total},
        late=" or ".join(write_many(tokens, "token") for tokens in sorted(set(most[is_late].tolist()))),
        number=write_count(number),
        total=write_count(total),
    )


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
    goes_on = (sums.alike == sums.alike[length - 1]) & (sums.surprisal >= _BY_CHANCE_NATS)
    if goes_on[length:].any():
        length = int(np.flatnonzero(goes_on)[-1]) + 1
        nats = float(sums.surprisal[:length].sum())
    ids = sums.head[:length].tolist()
    alike = int(sums.alike[length - 1])
    why = (
        "of which the engine has no log-prob"
        if is_missing[:length].all()
        else f"too improbable to be sampled each time (their log-probs add up to {write_number(-nats)})"
        if is_unlikely.any()
        else "some of which the engine has no log-prob of"
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
