"""The evaluation on one screen; plain lines where the output is no terminal."""

from collections.abc import Iterator

from rich.console import Console

from mismatch_probe.notation import ABSENT, write_count, write_estimate, write_number
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.report.screen import print_line, print_table
from mismatch_probe.report.view import Cell, Table


def render_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Accuracy of every engine, of every pair under both policies, and a sentence a pair."""
    for table in tables(evaluation):
        print_table(console, table)
    for pair in evaluation.pairs:
        print_line(console, sentence(pair))


def tables(evaluation: Evaluation) -> Iterator[Table]:
    """Engines, what lies between them where there are several, and pairs."""
    engines: list[list[Cell]] = [
        [
            engine.infer,
            write_estimate(engine.accuracy),
            write_count(engine.accuracy.num_sequences),
            write_count(engine.truncated_responses),
        ]
        for engine in evaluation.engines
    ]
    yield Table("Engines", ["engine", "accuracy (mu)", "responses", "truncated"], engines)
    if evaluation.differences:
        between: list[list[Cell]] = [
            [f"{difference.of} less {difference.over}", write_estimate(difference.difference)]
            for difference in evaluation.differences
        ]
        yield Table("Between engines", ["engines", "difference"], between)
    pairs: list[list[Cell]] = [
        [
            pair.train,
            pair.infer,
            *(write_estimate(estimate) for estimate in (pair.under_mu, pair.under_pi, pair.gap)),
            ABSENT if pair.ess is None else write_number(pair.ess.value),
            *(
                write_estimate(estimate)
                for estimate in ([] if pair.direct is None else (pair.direct.accuracy, pair.direct.gap))
            ),
        ]
        for pair in evaluation.pairs
    ]
    asked = ["pi sampled", "gap sampled"] if evaluation.settings.sample_pi else []
    yield Table("Pairs", ["train", "infer", "under mu", "under pi", "gap", "ESS", *asked], pairs)


def sentence(pair: PairAccuracy) -> str:
    """What a pair's numbers say of deployment."""
    name = f"trained in {pair.train}, deployed in {pair.infer}"
    if pair.undecided is not None:
        advice = "" if pair.direct else "; --sample-pi samples from pi itself"
        return f"{name}: accuracy under pi cannot be told from these responses, {pair.undecided}{advice}"
    gap = pair.gap
    if gap is None or gap.low is None or gap.high is None:
        return f"{name}: all responses earned the same, so they cannot show a gap"
    if gap.low <= 0 <= gap.high:
        return f"{name}: no gap seen; one beyond {write_number(max(-gap.low, gap.high))} would have been"
    verb = "loses" if gap.value > 0 else "gains"
    return f"{name}: deployment {verb} {write_number(abs(gap.value))} of accuracy"
