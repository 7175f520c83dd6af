"""The top of an evaluation's page: does deployment lose accuracy, by how much, how sure is that, what next."""

from mismatch_probe.dtypes import side_label
from mismatch_probe.notation import write_count, write_estimate, write_many, write_percent
from mismatch_probe.records.evaluation import Evaluation, PairAccuracy
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.answer import short_answer
from mismatch_probe.report.evaluation.answer import (
    advice,
    badge,
    capital,
    headline,
    pair_name,
    pairs_table,
    sentence,
    tables,
    without_sign,
    worst,
)
from mismatch_probe.report.evaluation.figure import accuracy_figure
from mismatch_probe.report.view import Badge, Block, Finding, Overview, Section, Tile


def evaluation_overview(evaluation: Evaluation) -> Overview:
    """Of an evaluation that is finished."""
    pair = worst(evaluation.pairs)
    return Overview(
        subject="accuracy under both policies",
        model=evaluation.model,
        headline=headline(evaluation.pairs),
        tiles=_tiles(evaluation, pair),
        badge=badge(pair),
        facts=_facts(evaluation),
        advice=advice(evaluation),
        table=pairs_table(evaluation),
        footnote="Brackets: intervals clustered by problem. Under pi: the engine's responses, each weighing pi/mu. "
        "ESS: the share of the responses that these weights leave.",
        contrasts=[],
        figure=accuracy_figure(evaluation),
    )


def evaluation_section(evaluation: Evaluation, summary: Summary) -> Section:
    """What each pair's numbers say, the engines, and where the log-probs themselves stand."""
    blocks: list[Block] = [
        Finding(f"accuracy-{number}", pair_name(pair), badge(pair), f"{capital(sentence(pair))}.", [])
        for number, pair in enumerate(evaluation.pairs, start=1)
    ]
    blocks += [table for table in tables(evaluation) if table.caption != "Pairs"]
    behind = Badge.of(summary.verdict)
    blocks.append(Finding("accuracy-mismatch", "The mismatch behind it", behind, short_answer(summary), []))
    return Section(
        "accuracy",
        "What the responses earned",
        f"Task {evaluation.task}. The sections below are those of a comparison: what the two sides' log-probs are.",
        blocks,
    )


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
        is_gain = badge(pair).kind == "precision"
        gap = write_estimate(without_sign(pair.gap) if is_gain else pair.gap)
        note = "; ".join(part for part in (gap.interval, "0 is no gap") if part)
        tiles.append(
            Tile(f"{pair_name(pair)}: accuracy that deployment {'gains' if is_gain else 'loses'}", gap.value, note)
        )
    return [*tiles, Tile("Responses", write_count(engine.accuracy.num_sequences), _problems(pair))]


def _problems(pair: PairAccuracy) -> str:
    estimate = pair.under_mu
    if estimate is None or estimate.num_prompts is None:
        return "of each engine"
    return f"of each engine, to {write_many(estimate.num_prompts, 'problem')}"


def _facts(evaluation: Evaluation) -> list[str]:
    sampled = "pi sampled responses of its own" if evaluation.settings.sample_pi else "responses of the engines alone"
    return [f"task {evaluation.task}", sampled]
