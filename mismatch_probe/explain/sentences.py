"""From what was found to a verdict in words."""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.config.explain import LoggedSide
from mismatch_probe.explain.bench import SideBench
from mismatch_probe.explain.codes import ADVICE, KINDS, LogCode
from mismatch_probe.explain.repeats import repeats
from mismatch_probe.explain.resolution import grid_of
from mismatch_probe.explain.search import Found
from mismatch_probe.explain.unrelated import unrelated
from mismatch_probe.explain.where import where
from mismatch_probe.notation import write_count, write_number, write_share
from mismatch_probe.records.explanation import Trial
from mismatch_probe.records.summary import Cause, Verdict
from mismatch_probe.verdict.codes import Code

SIDES: Final[dict[LoggedSide, str]] = {"mu": "the engine's side (mu)", "pi": "the trainer's side (pi)"}
GRAVEST_FIRST: Final = ("broken", "bug", "undecided", "precision", "clean")
_WORTH_SAYING: Final = 0.05


def verdict_of(bench: SideBench, explained: Found | None, num_missing: int, num_sampled: int) -> Verdict:
    """On one side: what is missing in it, what it departs in, or that it is as declared.

    found: None where every log-prob is missing.
    """
    causes = list(_missing(bench, num_missing, num_sampled))
    if explained is not None:
        causes += [*_departures(bench, explained), *_rounded(bench), *_nameless(bench, explained)]
        causes = causes or [_as_declared(bench, explained)]
    first, *others = sorted(causes, key=lambda cause: GRAVEST_FIRST.index(KINDS[cause.code]))
    return Verdict(kind=KINDS[first.code], also=others, **first.model_dump())


def _missing(bench: SideBench, num_missing: int, num_sampled: int) -> Iterator[Cause]:
    if num_missing:
        yield _cause(
            Code.MISSING_LOGPROBS,
            f"The data is broken: {write_count(num_missing)} log-probs of {SIDES[bench.side]} are missing.",
            [
                f"{write_share(num_missing, num_sampled)} of its log-probs are NaN, infinite, a floor such as -9999, "
                "or 0 at tokens that are far from certain; they are left out of everything else that is said"
            ],
        )


def _departures(bench: SideBench, explained: Found) -> Iterator[Cause]:
    if explained.explained_by is None:
        return
    trial = explained.explained_by.trial
    for departure in trial.departures:
        yield _cause(
            departure.code,
            f"{_capital(SIDES[bench.side])} departs from its declared settings: {departure.what}.",
            [evidence_of(trial), _left_by("as declared", explained.null.trial)],
        )


def _rounded(bench: SideBench) -> Iterator[Cause]:
    grid = grid_of(bench.judge.column[bench.judge.counted])
    if grid is not None:
        yield _cause(
            Code.ONE_SIDED_DTYPE,
            f"{_capital(SIDES[bench.side])} departs from its declared settings: its log-probs are rounded to {grid}.",
            [f"every log-prob is exact in {grid}: a log-softmax in {grid}, or a transport that stored it"],
        )


def _as_declared(bench: SideBench, explained: Found) -> Cause:
    return _cause(
        LogCode.AS_DECLARED,
        f"As declared: {SIDES[bench.side]} is what its checkpoint and settings give.",
        [_left_by("as declared", explained.null.trial)],
    )


def _nameless(bench: SideBench, explained: Found) -> Iterator[Cause]:
    """What no hypothesis explains, and whether the side agrees with itself."""
    if explained.explained_by is not None:
        return
    strangers = unrelated(bench.tokens, bench.judge, explained.null.account)
    if strangers is not None:
        yield _cause(
            Code.MISPAIRED,
            f"{_capital(SIDES[bench.side])} departs from its declared settings: {strangers.num_off} of "
            f"{strangers.num_responses} responses carry log-probs of another text.",
            [
                f"their log-probs do not follow their tokens (correlation {write_number(strangers.correlation)}), and "
                "the other responses agree; whose they are is not in the sample",
                _left_by("as declared", explained.null.trial),
            ],
        )
        return
    repeated = repeats(bench.tokens, bench.judge, explained.null.account)
    tried = [
        _left_by("as declared", explained.null.trial),
        *_best_attempts(explained),
        *where(bench.tokens, bench.judge, explained.null.account),
    ]
    spread = f"{write_number(repeated.spread_floors)} times the floor"
    if repeated.disagree:
        yield _cause(
            Code.NOT_REPEATABLE,
            f"{_capital(SIDES[bench.side])} does not agree with itself: dropout, or another randomness, is active.",
            [
                f"{write_count(repeated.num_tokens)} log-probs of tokens that occur again after the same context, "
                f"under the same weights, differ from each other by {spread}",
                *tried,
            ],
        )
        return
    if repeated.agree:
        evidence = (
            f"the side agrees with itself to {spread} where the same context occurs again, so it is no randomness: it "
            "looks like other weights or another computation than was tried"
        )
    else:
        evidence = "no context occurs often enough in the log to tell whether the side agrees with itself"
    yield Cause(
        code=Code.UNEXPLAINED,
        sentence=f"Unexplained: nothing that was tried explains {SIDES[bench.side]}.",
        evidence=[*tried, evidence],
        advice=[
            "Give the checkpoints that the side may have had instead, and headers that may stand before its prompts."
        ],
    )


def _best_attempts(explained: Found) -> list[str]:
    """Those that explain anything, or that none does."""
    attempts = [tried.trial for tried in explained.tried if tried.trial.explained >= _WORTH_SAYING]
    if attempts:
        return [evidence_of(trial) for trial in attempts[:2]]
    return [f"none of {len(explained.tried)} hypotheses takes away {_WORTH_SAYING:.0%} of the square"]


def evidence_of(trial: Trial) -> str:
    """What a hypothesis explains; a format, which predicts nothing, by the size of what is left."""
    what = " and ".join(departure.what for departure in trial.departures)
    if all(departure.part == "format" for departure in trial.departures):
        return f"{what} leaves {write_number(trial.residual_floors)} times the floor of that format"
    share = f"{100 * trial.explained:.3g}"
    return f"{what} explains {share} % of the square and leaves {write_number(trial.residual_floors)} times the floor"


def _left_by(what: str, trial: Trial) -> str:
    return (
        f"{what}: {write_number(trial.residual_floors)} times the floor of rounding "
        f"({write_number(trial.residual_nats)} nats rms)"
    )


def _cause(code: str, sentence: str, evidence: list[str]) -> Cause:
    return Cause(code=code, sentence=sentence, evidence=evidence, advice=[ADVICE[code]] if code in ADVICE else [])


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
