"""Records to `summary.json`: statistics and verdict of every pair, over all steps and by step, and its counterpart.

The counterpart of a pair differs from it in one setting.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Final, Literal

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.causes.comparison import Code
from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.replicas import replica_findings
from mismatch_probe.compare.run_reader import RunReader, growth_over_steps, last_step, over_steps
from mismatch_probe.compare.subsamples import full_vocabulary_of, routing_of_pair, share_decoded_alike
from mismatch_probe.compare.verdict_input import (
    departures,
    disagreements,
    exact_of,
    few_tokens_of,
    sides_of,
    worst_in_context,
    worst_with_tokens,
)
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.load import write_side
from mismatch_probe.config.sides import Side
from mismatch_probe.errors import MismatchProbeError, SummaryFailed, message_of, note_in_error
from mismatch_probe.inert import command_line
from mismatch_probe.provenance.environment import RESPONSES
from mismatch_probe.records.legs import Legs, read_prompts
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Cause, Contrast, PairSummary, SettingsContrast, Summary
from mismatch_probe.stats.bins import confidence_bins
from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.estimator import NO_REFERENCE, blame, contrast, paired_contrast
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import k3_terms, pair_metrics
from mismatch_probe.stats.results import Conditioning, Estimate, FullVocabularyCheck, RoutingCheck
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair, rows_of
from mismatch_probe.stats.worst_responses import error_histograms, probability_scatter
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.headline import headline, known_causes, measures_precision, overall
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.preflight import most_serious_findings_first, preflight, preflight_of_run
from mismatch_probe.verdict.preflight.facts import contradiction
from mismatch_probe.verdict.settings import with_settings_contrast
from mismatch_probe.verdict.signatures.profile import Disagreement

CONTRASTED_METRICS = ("kl_k3", "abs_logprob_diff")
CONTRADICTS: Final = "the reference does not agree with itself, so that its log-probs are left out"
ROUTING_METRICS = ("other_experts", "expert_weight_distance")


def summarise(run: RunDirectory, manifest: Manifest) -> Summary:
    """Compute statistics and verdict of a run whose legs are recorded; it needs no accelerator.

    Raises:
        SummaryFailed: a rule or a statistic raised what it should not.
    """
    try:
        return _summary_of_run(run, manifest)
    except (MismatchProbeError, MemoryError):
        raise
    except Exception as error:
        where = " on ".join(getattr(error, "__notes__", ())) or "a statistic"
        command = command_line("report", run.path, "--recompute")
        raise SummaryFailed(
            f"{where} failed ({type(error).__name__}: {message_of(error)}), which is a defect of mismatch-probe; all "
            f"that was computed is recorded, and a version without the defect summarises it: `{command}`"
        ) from error


def _summary_of_run(run: RunDirectory, manifest: Manifest) -> Summary:
    reader, legs = RunReader(run, manifest), Legs(run, manifest.run_key)
    data = {pair: reader.pair(pair) for pair in manifest.settings.pairs}
    routings = {name: routing_of_pair(legs, manifest, name, pair_data) for name, pair_data in data.items()}
    deviations = disagreements(manifest, data, routings)
    texts, pairs = _prompt_texts(run, manifest), []
    for name in data:
        with note_in_error(f"the pair {'/'.join(name)}"):
            pairs.append(_pair_summary(legs, manifest, name, data, routings[name], deviations, texts))
    pairs = _with_settings_contrasts(manifest.settings, pairs, data)
    contrasts = _contrasts_of_pairs(pairs)
    findings = preflight_of_run(sides_of(manifest, name, pair_data) for name, pair_data in data.items())
    findings = most_serious_findings_first([*findings, *replica_findings(manifest, pairs)])
    return Summary(
        tool_version=__version__,
        model=manifest.model.name,
        model_fingerprint=manifest.model.fingerprint,
        headline=headline(pairs, contrasts, findings),
        verdict=overall(pairs),
        preflight=findings,
        left_out=manifest.left_out,
        fp16_refused=manifest.fp16_refused,
        contrasts=contrasts,
        pairs=pairs,
    )


_BY_SIZE: Final = (Code.BEYOND_FORMAT, Code.NOT_REPEATABLE)
"""Causes that a coarse pair too is found to have by a size that is taken for more than rounding."""


def sides_to_check(summary: Summary, manifest: Manifest) -> list[str]:
    """The training sides of pairs that are called a bug by their size, where no setting is known to make it and nothing
    measured what rounding in FP32 does to the checkpoint; one side of each checkpoint.
    """
    settings = manifest.settings
    sides = [settings.pi(name) for name in manifest.rounding_checks]
    for pair in summary.pairs:
        pi = _computed_side(settings, (pair.train, pair.infer))
        is_exact = pair.train_dtype.can_be_reference and pair.infer_dtype.can_be_reference
        is_by_size = pair.verdict.kind == "bug" and (is_exact or pair.verdict.code in _BY_SIZE)
        if pi is None or not (is_by_size or pair.verdict.code == Code.OTHER_CHECKPOINT):
            continue
        is_known = any(cause.code or cause.level == "error" for cause in known_causes(pair.verdict, summary.preflight))
        if not is_known and not any(pi.has_weights_of(side) for side in sides):
            sides.append(pi)
    return [side.name for side in sides[len(manifest.rounding_checks) :]]


def _computed_side(settings: CompareSettings, name: PairName) -> Side | None:
    """The training side of a pair; where that is of a log, one that is computed for the same engine's side, if any."""
    sides = [settings.pi(train) for train, infer in settings.pairs if infer == name[1]]
    return next((pi for pi in (settings.pi(name[0]), *sides) if not pi.logged), None)


def _prompt_texts(run: RunDirectory, manifest: Manifest) -> dict[str, str]:
    """The texts of the prompts by id; empty for a run without recorded prompts."""
    if not run.prompts_path.exists():
        return {}
    prompts = read_prompts(run, manifest.run_key, ["prompt_id", "text"])
    return dict(zip(prompts["prompt_id"].to_pylist(), prompts["text"].to_pylist(), strict=True))


def _pair_summary(
    legs: Legs,
    manifest: Manifest,
    name: PairName,
    of_pairs: Mapping[PairName, PairData],
    routing: RoutingCheck | str | None,
    deviations: dict[PairName, Disagreement],
    prompt_texts: Mapping[str, str],
) -> PairSummary:
    data = of_pairs[name]
    sides, settings, pair = sides_of(manifest, name, data), manifest.settings, data.pair
    level = settings.confidence
    metrics, unavailable = ({}, {}) if pair is None else pair_metrics(pair, level=level)
    closer, not_closer, full_vocabulary = _subsample_metrics(legs, settings, name, data, routing)
    of_whole = None if pair is None else pair.of_whole_responses
    law = None if of_whole is None else length_law(of_whole, level=level)
    why_no_reference = CONTRADICTS if contradiction(sides.reference) else NO_REFERENCE
    blame_of_pair = None if pair is None else blame(pair, level=level, why_no_reference=why_no_reference)
    pi, mu = settings.pi(name[0]), settings.mu(name[1])
    is_logged = pi.logged and mu.logged
    case = Case(
        name=name,
        train_dtype=sides.train_dtype,
        infer_dtype=sides.infer_dtype,
        applied_train=sides.train.get("dtype"),
        applied_infer=sides.infer.get("dtype"),
        counts=data.counts,
        metrics=metrics,
        length=law,
        blame=blame_of_pair,
        disagreement=deviations.get(name),
        exact=exact_of(manifest, name, deviations),
        ids=data.ids,
        preflight=preflight(sides),
        legs_are_identified=data.legs_are_identified,
        takes_dtypes=RESPONSES not in manifest.content_keys,
        exact_name=settings.exact_counterpart(name),
        exact_sides=_is_in_fp32(settings, name),
        can_be_looked_into=settings.has_plain_weights(name) and not manifest.model.sees_too,
        few_tokens=few_tokens_of(data),
        is_logged=is_logged,
        is_of_server=not (mu.is_computed_here or mu.logged),
        is_of_log=manifest.log is not None,
        departures=departures(settings, name, of_pairs, deviations),
        log_faults=_log_faults(manifest) if is_logged else [],
        left_out=frozenset(manifest.left_out),
        fp16_refused=manifest.fp16_refused,
        growth=growth_over_steps(data, level),
        last_step=last_step(data),
        update_ratio=_update_ratio(manifest) if is_logged else None,
    )
    verdict = judge(case)
    measured = None if case.disagreement is None else case.disagreement.conditioning
    return PairSummary(
        train=name[0],
        infer=name[1],
        train_dtype=sides.train_dtype,
        infer_dtype=sides.infer_dtype,
        legs=data.legs,
        counts=data.counts,
        metrics=metrics | closer,
        metrics_unavailable=unavailable | not_closer,
        length=law,
        blame=blame_of_pair,
        confidence=[] if pair is None else confidence_bins(pair, level=level),
        scatter=None if pair is None else probability_scatter(pair),
        errors=[] if pair is None else error_histograms(pair),
        worst_tokens=worst_in_context(data),
        worst_responses=worst_with_tokens(data, prompt_texts),
        few_tokens=case.few_tokens,
        full_vocabulary=full_vocabulary,
        routing=routing if isinstance(routing, RoutingCheck) else None,
        is_logged=is_logged,
        update_ratio=case.update_ratio,
        steps=over_steps(data, level),
        growth=None if verdict.kind == "broken" else case.growth,
        conditioning=measured if isinstance(measured, Conditioning) else None,
        corrections=[] if of_whole is None else simulate_corrections(of_whole, level=level),
        verdict=verdict,
    )


def _log_faults(manifest: Manifest) -> list[Cause]:
    """The faults of the log that make its numbers meaningless."""
    notes = [] if manifest.log is None else manifest.log.notes
    return [Cause(code=note.code, sentence=note.sentence) for note in notes if note.level == "broken"]


def _update_ratio(manifest: Manifest) -> float | None:
    versions = None if manifest.log is None else manifest.log.versions
    return versions.times_before if versions is not None and versions.is_level_changed else None


def _subsample_metrics(
    legs: Legs, settings: CompareSettings, name: PairName, data: PairData, routing: RoutingCheck | str | None
) -> tuple[dict[str, Estimate], dict[str, str], FullVocabularyCheck | None]:
    """The metrics on a few responses, the reasons for missing ones, and the full-vocabulary check."""
    metrics: dict[str, Estimate] = {}
    unavailable: dict[str, str] = {}
    check = share = None
    if data.pair is not None:
        pi, mu = settings.pi(name[0]), settings.mu(name[1])
        check = full_vocabulary_of(legs, pi, mu, data.pair, data.row_ids, settings.confidence)
        share = share_decoded_alike(legs, mu, data.pair, data.key_of, settings.confidence)
    if isinstance(check, FullVocabularyCheck):
        metrics |= {"full_kl": check.full_kl, "full_tv": check.full_tv}
    elif check is not None:
        unavailable |= dict.fromkeys(("full_kl", "full_tv"), check)
    if share is not None:
        metrics["decoded_alike"] = share
    if isinstance(routing, RoutingCheck):
        metrics |= zip(ROUTING_METRICS, (routing.other_experts, routing.weight_distance), strict=True)
    elif routing is not None:
        unavailable |= dict.fromkeys(ROUTING_METRICS, routing)
    return metrics, unavailable, check if isinstance(check, FullVocabularyCheck) else None


def _is_in_fp32(settings: CompareSettings, name: PairName) -> tuple[str, ...]:
    flags = zip(("--train", "--infer"), settings.exact_sides(name), strict=True)
    return tuple(
        word for flag, sides in flags for side in sides for word in (flag, write_side(side.model_dump(mode="json")))
    )


def _with_settings_contrasts(
    settings: CompareSettings, pairs: list[PairSummary], data: dict[PairName, PairData]
) -> list[PairSummary]:
    by_name = {(pair.train, pair.infer): pair for pair in pairs}
    differences = [settings_contrast(settings, pair, pairs, data) for pair in pairs]
    return [
        with_settings_contrast(pair, difference, None if difference is None else by_name[difference.counterpart])
        for pair, difference in zip(pairs, differences, strict=True)
    ]


def _contrasts_of_pairs(pairs: list[PairSummary]) -> list[Contrast]:
    """The contrasts between pairs with one 16-bit dtype on both sides; none where a pair is a bug or broken."""
    of_dtypes = [pair for pair in pairs if pair.is_of_dtypes]
    if not all(measures_precision(pair.verdict) for pair in of_dtypes):
        return []
    same = {pair.train_dtype: pair for pair in of_dtypes if pair.train_dtype == pair.infer_dtype}
    contrasts = []
    for metric in CONTRASTED_METRICS:
        for of, baseline in permutations((dtype for dtype in same if dtype.rounds_coarsely), 2):
            if metric in same[of].metrics and metric in same[baseline].metrics:
                ratio = contrast(same[of].metrics[metric], same[baseline].metrics[metric])
                if ratio is not None:
                    contrasts.append(Contrast(metric=metric, of=of, over=baseline, ratio=ratio))
    return contrasts


RATIOS: Final[dict[str, Callable[[Floats], Floats]]] = {"kl_k3": k3_terms, "abs_logprob_diff": np.abs}
"""The metrics that are means over tokens, with the function of d that they average."""


def settings_contrast(
    settings: CompareSettings, pair: PairSummary, pairs: Sequence[PairSummary], data: Mapping[PairName, PairData]
) -> SettingsContrast | None:
    """The contrast of a pair with its counterpart: the nearest pair that shares one side, with the same dtypes.

    The counterpart differs from it in one setting; it is a pair of dtypes alone, or one earlier in `pairs`.

    Two training sides score the same responses, and their ratios are paired by token; two engines sample their own.
    None where there is no counterpart, or where the pair's own sides are only dtypes.
    """
    others = [other for number, other in enumerate(pairs) if other.is_of_dtypes or number < pairs.index(pair)]
    pairs_beside = [
        contrast for other in others if (contrast := _setting_contrast(settings, pair, other, data)) is not None
    ]
    return min(
        pairs_beside,
        key=lambda contrast: (settings.exact_counterpart(contrast.counterpart) is None, len(contrast.settings)),
        default=None,
    )


def _setting_contrast(
    settings: CompareSettings, pair: PairSummary, other: PairSummary, data: Mapping[PairName, PairData]
) -> SettingsContrast | None:
    if pair.train == other.train:
        ratios = {
            name: contrast(pair.metrics[name], other.metrics[name])
            for name in RATIOS
            if name in pair.metrics and name in other.metrics
        }
        return _contrast_of(other, "mu", settings.mu(pair.infer), settings.mu(other.infer), ratios)
    if pair.infer == other.infer:
        metric_ratios = _paired_ratios(
            data[pair.train, pair.infer], data[other.train, other.infer], settings.confidence
        )
        return _contrast_of(other, "pi", settings.pi(pair.train), settings.pi(other.train), metric_ratios)
    return None


def _contrast_of(
    other: PairSummary, role: Literal["pi", "mu"], side: Side, other_side: Side, ratios: Mapping[str, Estimate | None]
) -> SettingsContrast | None:
    settings = side.differs_from(other_side)
    if side.dtype != other_side.dtype or side.name == side.dtype or not settings:
        return None
    had = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return SettingsContrast(counterpart=(other.train, other.infer), side=role, settings=settings, ratios=had)


def _paired_ratios(first: PairData, second: PairData, level: float) -> dict[str, Estimate | None]:
    """The ratios on the responses that both pairs can use."""
    if first.pair is None or second.pair is None:
        return {}
    place = {row_id: row for row, row_id in enumerate(second.row_ids)}
    rows = [
        (row, place[row_id])
        for row, row_id in enumerate(first.row_ids)
        if row_id in place and first.is_complete(row) and second.is_complete(place[row_id])
    ]
    if not rows:
        return {}
    ours, theirs = (np.asarray(column) for column in zip(*rows, strict=True))
    common = first.pair.sequences
    sequences = Sequences.of_lengths(common.lengths[ours], common.clusters[ours])
    our_diff, their_diff = _diff_of_rows(first.pair, ours), _diff_of_rows(second.pair, theirs)
    return {
        name: paired_contrast(sequences, values(our_diff), values(their_diff), level) for name, values in RATIOS.items()
    }


def _diff_of_rows(pair: TokenPair, rows: Ints) -> Floats:
    """The values of d of the responses in these rows, one response after another."""
    by_response = rows_of(pair.diff, pair.sequences.offsets)
    return np.concatenate([by_response[row] for row in rows])
