"""The evaluation on one screen; plain lines where the output is no terminal."""

from rich.console import Console

from mismatch_probe.notation import ABSENT, write_count, write_estimate, write_number
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.report.screen import print_line, print_table, screen_table


def render_evaluation(found: Evaluation, console: Console) -> None:
    """Accuracy of every engine, of every pair under both policies, and a sentence a pair."""
    engines = screen_table(console, "engine", "accuracy (mu)", "responses", "truncated")
    for engine in found.engines:
        responses = write_count(engine.accuracy.num_sequences)
        accuracy = str(write_estimate(engine.accuracy))
        engines.add_row(engine.infer_dtype, accuracy, responses, write_count(engine.truncated_responses))
    print_table(console, engines)
    if found.differences:
        differences = screen_table(console, "engines", "difference")
        for one in found.differences:
            differences.add_row(f"{one.of} less {one.over}", str(write_estimate(one.difference)))
        print_table(console, differences)
    columns = ("train", "infer", "under mu", "under pi", "gap", "ESS")
    asked = ("pi sampled", "gap sampled") if found.settings.sample_pi else ()
    pairs = screen_table(console, *columns, *asked)
    for pair in found.pairs:
        estimates = (pair.under_mu, pair.under_pi, pair.gap)
        cells = [str(write_estimate(one)) for one in estimates]
        ess = ABSENT if pair.ess is None else write_number(pair.ess.value)
        direct = [] if pair.direct is None else [pair.direct.accuracy, pair.direct.gap]
        pairs.add_row(pair.train_dtype, pair.infer_dtype, *cells, ess, *(str(write_estimate(one)) for one in direct))
    print_table(console, pairs)
    for pair in found.pairs:
        print_line(console, sentence(pair))


def sentence(pair: PairAccuracy) -> str:
    """What a pair's numbers say of deployment."""
    name = f"trained in {pair.train_dtype}, deployed in {pair.infer_dtype}"
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
