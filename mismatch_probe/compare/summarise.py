"""Records to `summary.json`: statistics and verdict of every pair, and what another dtype of the run would change."""

from collections.abc import Mapping
from itertools import permutations

from mismatch_probe import __version__
from mismatch_probe.compare.closer_measurements import full_vocabulary_of, share_decoded_alike
from mismatch_probe.compare.departures import departures
from mismatch_probe.compare.over_steps import over_steps
from mismatch_probe.compare.pair_data import PairData, RunReader
from mismatch_probe.compare.routing import routing_of_pair
from mismatch_probe.compare.told_apart import settings_told_apart
from mismatch_probe.compare.verdict_input import disagreements, exact_of, sides_of
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.side_text import write_side
from mismatch_probe.provenance.keys import RESPONSES
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Cause, Contrast, PairSummary, Summary, TokenInContext
from mismatch_probe.stats.blame import blame
from mismatch_probe.stats.confidence import confidence_bins
from mismatch_probe.stats.contrast import contrast
from mismatch_probe.stats.corrections import simulate_corrections
from mismatch_probe.stats.figures import error_histograms, probability_scatter, worst_tokens
from mismatch_probe.stats.length import length_law
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate, RoutingCheck
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.case import Case
from mismatch_probe.verdict.headline import headline, measures_precision, overall
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.preflight import preflight, preflight_of_run
from mismatch_probe.verdict.settings import with_settings_told_apart
from mismatch_probe.verdict.signatures.disagreement import Disagreement

WORST_TOKENS = 20
CONTEXT_TOKENS = 24
CONTRASTED_METRICS = ("kl_k3", "abs_logprob_diff")
ROUTING_METRICS = ("other_experts", "expert_weight_distance")


def summarise(run: RunDirectory, manifest: Manifest) -> Summary:
    """Statistics and verdict of a run whose legs are recorded; needs no accelerator.

    Raises:
        BrokenRecord: a file of the run is missing or damaged.
    """
    reader, legs = RunReader(run, manifest), Legs(run, manifest.run_key)
    data = {pair: reader.pair(pair) for pair in manifest.settings.pairs}
    level = manifest.settings.confidence
    metrics: dict[PairName, tuple[dict[str, Estimate], dict[str, str]]] = {
        name: ({}, {}) if pair_data.pair is None else pair_metrics(pair_data.pair, level=level)
        for name, pair_data in data.items()
    }
    routings = {name: routing_of_pair(legs, manifest, name, pair_data) for name, pair_data in data.items()}
    deviations = disagreements(manifest, data, routings)
    pairs = [
        _with_full_vocabulary(legs, manifest, pair_data, _pair_summary(manifest, name, data, metrics[name], deviations))
        for name, pair_data in data.items()
    ]
    pairs = [_with_decoded_alike(legs, manifest, data[pair.train, pair.infer], pair) for pair in pairs]
    pairs = [_with_routing(pair, routings[pair.train, pair.infer]) for pair in pairs]
    pairs = _with_settings(manifest.settings, pairs, data)
    contrasts = _contrasts(pairs)
    return Summary(
        tool_version=__version__,
        model=manifest.model.name,
        model_fingerprint=manifest.model.fingerprint,
        headline=headline(pairs, contrasts),
        verdict=overall(pairs),
        preflight=preflight_of_run(sides_of(manifest, name, pair_data) for name, pair_data in data.items()),
        contrasts=contrasts,
        pairs=pairs,
    )


def _pair_summary(
    manifest: Manifest,
    name: PairName,
    of_pairs: Mapping[PairName, PairData],
    measured: tuple[dict[str, Estimate], dict[str, str]],
    deviations: dict[PairName, Disagreement],
) -> PairSummary:
    data = of_pairs[name]
    sides = sides_of(manifest, name, data)
    metrics, unavailable = measured
    pair = data.pair
    law = None if pair is None else length_law(pair, level=manifest.settings.confidence)
    found_blame = None if pair is None else blame(pair, level=manifest.settings.confidence)
    pi, mu = manifest.settings.pi(name[0]), manifest.settings.mu(name[1])
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
        blame=found_blame,
        disagreement=deviations.get(name),
        exact=exact_of(manifest, name, deviations),
        ids=data.ids,
        preflight=preflight(sides),
        legs_say_whose_they_are=data.legs_say_whose_they_are,
        takes_dtypes=RESPONSES not in manifest.content_keys,
        exact_name=manifest.settings.exact_counterpart(name),
        exact_sides=_in_fp32(manifest.settings, name),
        can_be_looked_into=manifest.settings.has_plain_weights(name),
        is_logged=is_logged,
        is_of_server=not (mu.is_computed_here or mu.logged),
        is_of_log=manifest.log is not None,
        departures=departures(manifest.settings, name, of_pairs, deviations),
        log_faults=_log_faults(manifest) if is_logged else [],
    )
    return PairSummary(
        train=name[0],
        infer=name[1],
        train_dtype=sides.train_dtype,
        infer_dtype=sides.infer_dtype,
        legs=data.legs,
        counts=data.counts,
        metrics=metrics,
        metrics_unavailable=unavailable,
        length=law,
        blame=found_blame,
        confidence=[] if pair is None else confidence_bins(pair, level=manifest.settings.confidence),
        scatter=None if pair is None else probability_scatter(pair),
        errors=[] if pair is None else error_histograms(pair),
        worst_tokens=[] if pair is None else _worst(data, pair),
        is_logged=is_logged,
        steps=over_steps(data, manifest.settings.confidence),
        corrections=[] if pair is None else simulate_corrections(pair, level=manifest.settings.confidence),
        verdict=judge(case),
    )


def _log_faults(manifest: Manifest) -> list[Cause]:
    """What was seen in the log that makes its numbers mean nothing."""
    notes = [] if manifest.log is None else manifest.log.notes
    return [Cause(code=note.code, sentence=note.sentence) for note in notes if note.level == "broken"]


def _with_full_vocabulary(legs: Legs, manifest: Manifest, data: PairData, summary: PairSummary) -> PairSummary:
    if data.pair is None:
        return summary
    settings = manifest.settings
    pi, mu = settings.pi(summary.train), settings.mu(summary.infer)
    check = full_vocabulary_of(legs, pi, mu, data.pair, data.row_ids, settings.confidence)
    if isinstance(check, str):
        unavailable = summary.metrics_unavailable | dict.fromkeys(("full_kl", "full_tv"), check)
        return summary.model_copy(update={"metrics_unavailable": unavailable})
    metrics = summary.metrics | {"full_kl": check.full_kl, "full_tv": check.full_tv}
    return summary.model_copy(update={"metrics": metrics, "full_vocabulary": check})


def _with_decoded_alike(legs: Legs, manifest: Manifest, data: PairData, summary: PairSummary) -> PairSummary:
    if data.pair is None:
        return summary
    settings = manifest.settings
    share = share_decoded_alike(legs, settings.mu(summary.infer), data.pair, data.key_of, settings.confidence)
    if share is None:
        return summary
    return summary.model_copy(update={"metrics": summary.metrics | {"decoded_alike": share}})


def _with_routing(summary: PairSummary, check: RoutingCheck | str | None) -> PairSummary:
    if check is None:
        return summary
    if isinstance(check, str):
        unavailable = summary.metrics_unavailable | dict.fromkeys(ROUTING_METRICS, check)
        return summary.model_copy(update={"metrics_unavailable": unavailable})
    metrics = dict(zip(ROUTING_METRICS, (check.other_experts, check.weight_distance), strict=True))
    return summary.model_copy(update={"metrics": summary.metrics | metrics, "routing": check})


def _in_fp32(settings: CompareSettings, name: PairName) -> tuple[str, ...]:
    flags = zip(("--train", "--infer"), settings.exact_sides(name), strict=True)
    return tuple(
        word for flag, sides in flags for side in sides for word in (flag, write_side(side.model_dump(mode="json")))
    )


def _with_settings(
    settings: CompareSettings, pairs: list[PairSummary], data: dict[PairName, PairData]
) -> list[PairSummary]:
    by_name = {(pair.train, pair.infer): pair for pair in pairs}
    told_apart = [settings_told_apart(settings, pair, pairs, data) for pair in pairs]
    return [
        with_settings_told_apart(pair, told, None if told is None else by_name[told.beside])
        for pair, told in zip(pairs, told_apart, strict=True)
    ]


def _worst(data: PairData, pair: TokenPair) -> list[TokenInContext]:
    tokens = []
    for worst in worst_tokens(pair, WORST_TOKENS):
        row = int(data.rows[worst.row])
        texts = data.rollouts["token_texts"][row].as_py()
        position = data.position_in_response(worst.row, worst.position)
        tokens.append(
            TokenInContext(
                sequence_id=data.rollouts["id"][row].as_py(),
                position=position,
                before="".join(texts[max(0, position - CONTEXT_TOKENS) : position]),
                token=texts[position],
                after="".join(texts[position + 1 : position + 1 + CONTEXT_TOKENS]),
                log_pi=worst.log_pi,
                log_mu=worst.log_mu,
                log_ref=worst.log_ref,
            )
        )
    return tokens


def _contrasts(pairs: list[PairSummary]) -> list[Contrast]:
    """Every pair with the same 16-bit dtype on both sides over every other such pair; none where a pair of dtypes is a
    bug or broken.
    """
    of_dtypes = [pair for pair in pairs if pair.is_of_dtypes]
    if not all(measures_precision(pair.verdict) for pair in of_dtypes):
        return []
    same = {pair.train_dtype: pair for pair in of_dtypes if pair.train_dtype == pair.infer_dtype}
    contrasts = []
    for metric in CONTRASTED_METRICS:
        for of, over in permutations((dtype for dtype in same if dtype.is_16_bit), 2):
            if metric in same[of].metrics and metric in same[over].metrics:
                ratio = contrast(same[of].metrics[metric], same[over].metrics[metric])
                if ratio is not None:
                    contrasts.append(Contrast(metric=metric, of=of, over=over, ratio=ratio))
    return contrasts
