"""What an evaluation says of deployment: a sentence a pair, and the tables behind it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mismatch_probe.dtypes import side_label, sides_label
from mismatch_probe.notation import ABSENT, write_count, write_estimate, write_number
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.report.view import Badge, Cell, Table
from mismatch_probe.stats.results import Estimate

_WORST_FIRST = ("bug", "undecided", "precision", "clean")


def sentence(pair: PairAccuracy) -> str:
    """What a pair's numbers say of deployment."""
    name = f"trained in {side_label(pair.train)}, deployed in {side_label(pair.infer)}"
    if pair.undecided is not None:
        advice = "" if pair.direct else "; --sample-pi samples from pi itself"
        return f"{name}: accuracy under pi cannot be told from these responses, {pair.undecided}{advice}"
    gap = pair.gap
    if gap is None or gap.low is None or gap.high is None:
        return f"{name}: all responses earned the same, so they cannot show a gap"
    if gap.low <= 0 <= gap.high:
        return f"{name}: no gap seen; one beyond {write_number(max(-gap.low, gap.high))} would have been"
    verb = "loses" if gap.value > 0 else "gains"
    return f"{name}: deployment {verb} {write_estimate(without_sign(gap))} of accuracy"


def without_sign(gap: Estimate) -> Estimate:
    """What a loss or a gain comes to."""
    if gap.value >= 0 or gap.low is None or gap.high is None:
        return replace(gap, value=abs(gap.value))
    return replace(gap, value=-gap.value, low=-gap.high, high=-gap.low)


def badge(pair: PairAccuracy) -> Badge:
    """A loss is what somebody has to act on; what overlaps zero is no loss that was seen."""
    gap = pair.gap
    if pair.undecided is not None or gap is None or gap.low is None or gap.high is None:
        return Badge("undecided", "cannot be told")
    if gap.low <= 0 <= gap.high:
        return Badge("clean", "no gap seen")
    return Badge("bug", "deployment loses") if gap.value > 0 else Badge("precision", "deployment gains")


def worst(pairs: Sequence[PairAccuracy]) -> PairAccuracy:
    """The pair that somebody has to look at first."""
    return min(pairs, key=lambda pair: (_WORST_FIRST.index(badge(pair).kind), -abs(pair.gap.value if pair.gap else 0)))


def headline(pairs: Sequence[PairAccuracy]) -> str:
    """Whether deployment loses accuracy, of the pair for which it is worst."""
    pair = worst(pairs)
    if len(pairs) > 1 and badge(pair).kind == "clean":
        widest = max(map(_seen_from, pairs))
        return (
            f"No gap in accuracy seen in any of {len(pairs)} pairs. One beyond {write_number(widest)} would have been "
            "in each."
        )
    return f"{capital(sentence(pair))}."


def _seen_from(pair: PairAccuracy) -> float:
    """The gap beyond which one would have been seen."""
    gap = pair.gap
    return 0.0 if gap is None or gap.low is None or gap.high is None else max(-gap.low, gap.high)


def advice(evaluation: Evaluation) -> list[str]:
    """What to do next."""
    if any(badge(pair).kind == "bug" for pair in evaluation.pairs):
        return ["Deploy in the format that is trained in, or look below for what moves the log-probs."]
    if all(badge(pair).kind == "clean" for pair in evaluation.pairs):
        return ["For a narrower interval give more `--num-problems`; more responses to the same ones help less."]
    return []


def capital(text: str) -> str:
    """The text as a sentence begins."""
    return f"{text[0].upper()}{text[1:]}"


def pair_name(pair: PairAccuracy) -> str:
    return sides_label(pair.train, pair.infer)


def tables(evaluation: Evaluation) -> Iterator[Table]:
    """Engines, what lies between them where there are several, and pairs."""
    engines: list[list[Cell]] = [
        [
            side_label(engine.infer),
            write_estimate(engine.accuracy),
            write_count(engine.accuracy.num_sequences),
            write_count(engine.truncated_responses),
        ]
        for engine in evaluation.engines
    ]
    yield Table("Engines", ["engine", "accuracy (mu)", "responses", "truncated"], engines)
    if evaluation.differences:
        yield _between(evaluation)
    yield pairs_table(evaluation)


def _between(evaluation: Evaluation) -> Table:
    rows: list[list[Cell]] = [
        [
            f"{side_label(difference.of)} less {side_label(difference.over)}",
            write_estimate(difference.difference),
            _told(difference.difference),
        ]
        for difference in evaluation.differences
    ]
    return Table("Between engines", ["engines", "difference", "what it says"], rows, text_columns=frozenset({2}))


def _told(difference: Estimate) -> str:
    """The honest reading of an interval."""
    if difference.low is None or difference.high is None:
        return "all responses earned the same, so they cannot show a difference"
    if difference.low <= 0 <= difference.high:
        return "no difference seen: the interval holds 0"
    return "the first is better" if difference.value > 0 else "the second is better"


def pairs_table(evaluation: Evaluation) -> Table:
    is_sampled = any(pair.direct is not None for pair in evaluation.pairs)
    rows: list[list[Cell]] = [
        [
            side_label(pair.train),
            side_label(pair.infer),
            *(write_estimate(estimate) for estimate in (pair.under_mu, pair.under_pi, pair.gap)),
            ABSENT if pair.ess is None else write_number(pair.ess.value),
            *(_direct(pair) if is_sampled else ()),
        ]
        for pair in evaluation.pairs
    ]
    asked = ["pi sampled", "gap sampled"] if is_sampled else []
    columns = ["train", "infer", "under mu", "under pi", "gap", "ESS", *asked]
    return Table("Pairs", columns, rows, text_columns=frozenset({1}), stacked=True)


def _direct(pair: PairAccuracy) -> tuple[Cell, Cell]:
    if pair.direct is None:
        return ABSENT, ABSENT
    return write_estimate(pair.direct.accuracy), write_estimate(pair.direct.gap)
