"""The top of an evaluation's page: does deployment lose accuracy, by how much, how sure is that, what next."""

from collections.abc import Sequence

from mismatch_probe.dtypes import side_label
from mismatch_probe.notation import write_count, write_estimate, write_number, write_percent
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.evaluation.answer import badge, pair_name, pairs_table, sentence, tables
from mismatch_probe.report.evaluation.figure import accuracy_figure
from mismatch_probe.report.view import Badge, Block, Finding, Overview, Section, Tile

_WORST_FIRST = ("bug", "undecided", "precision", "clean")


def evaluation_overview(evaluation: Evaluation) -> Overview:
    """Of an evaluation that is finished."""
    pair = _worst(evaluation.pairs)
    return Overview(
        subject="accuracy under both policies",
        model=evaluation.model,
        headline=_headline(evaluation.pairs),
        tiles=_tiles(evaluation, pair),
        badge=badge(pair),
        facts=_facts(evaluation),
        advice=_advice(evaluation),
        table=pairs_table(evaluation),
        footnote="Brackets: intervals clustered by problem. Under pi: the engine's responses, each weighing pi/mu. "
        "ESS: the share of the responses that these weights leave.",
        contrasts=[],
        figure=accuracy_figure(evaluation),
    )


def evaluation_section(evaluation: Evaluation, summary: Summary) -> Section:
    """What each pair's numbers say, the engines, and where the log-probs themselves stand."""
    blocks: list[Block] = [
        Finding(f"accuracy-{number}", pair_name(pair), badge(pair), _capital(sentence(pair)), [])
        for number, pair in enumerate(evaluation.pairs, start=1)
    ]
    blocks += [table for table in tables(evaluation) if table.caption != "Pairs"]
    behind = Badge.of(summary.verdict)
    blocks.append(Finding("accuracy-mismatch", "The mismatch behind it", behind, summary.headline, []))
    return Section(
        "accuracy",
        "What the responses earned",
        f"Task {evaluation.task}. The sections below are those of a comparison: what the two sides' log-probs are.",
        blocks,
    )


def _worst(pairs: Sequence[PairAccuracy]) -> PairAccuracy:
    return min(pairs, key=lambda pair: (_WORST_FIRST.index(badge(pair).kind), -abs(pair.gap.value if pair.gap else 0)))


def _headline(pairs: Sequence[PairAccuracy]) -> str:
    worst = _worst(pairs)
    if len(pairs) > 1 and badge(worst).kind == "clean":
        widest = max(map(_seen_from, pairs))
        return (
            f"No gap in accuracy seen in any of {len(pairs)} pairs. One beyond {write_number(widest)} would have been "
            "in each."
        )
    return f"{_capital(sentence(worst))}."


def _seen_from(pair: PairAccuracy) -> float:
    """The gap beyond which one would have been seen."""
    gap = pair.gap
    return 0.0 if gap is None or gap.low is None or gap.high is None else max(-gap.low, gap.high)


def _tiles(evaluation: Evaluation, pair: PairAccuracy) -> list[Tile]:
    engine = next(engine for engine in evaluation.engines if engine.infer == pair.infer)
    accuracy, cut = write_estimate(engine.accuracy), engine.truncated_responses / engine.accuracy.num_sequences
    tiles = [
        Tile(
            f"Accuracy of the engine in {side_label(pair.infer)}",
            accuracy.value,
            f"{accuracy.interval}; {write_percent(cut)} of the responses were cut",
        )
    ]
    if pair.gap is not None:
        gap = write_estimate(pair.gap)
        note = "; ".join(part for part in (gap.interval, "0 is no loss") if part)
        tiles.append(Tile(f"{pair_name(pair)}: lost in deployment", gap.value, note))
    return [*tiles, Tile("Responses", write_count(engine.accuracy.num_sequences), _problems(pair))]


def _problems(pair: PairAccuracy) -> str:
    estimate = pair.under_mu
    if estimate is None or estimate.num_prompts is None:
        return "of each engine"
    return f"of each engine, to {write_count(estimate.num_prompts)} problems"


def _facts(evaluation: Evaluation) -> list[str]:
    sampled = "pi sampled responses of its own" if evaluation.settings.sample_pi else "responses of the engines alone"
    return [f"task {evaluation.task}", sampled]


def _advice(evaluation: Evaluation) -> list[str]:
    if any(badge(pair).kind == "bug" for pair in evaluation.pairs):
        return ["Deploy in the format that is trained in, or look below for what moves the log-probs."]
    if all(badge(pair).kind == "clean" for pair in evaluation.pairs):
        return ["For a narrower interval give more `--num-problems`; more responses to the same ones help less."]
    return []


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
