"""What the metrics of a trainer show alone, without a token.

The shape of each curve, its level compared with published numbers, which numbers contradict each other, the causes that
fit, what they cannot answer, what to log next. Published numbers, causes and columns are data, in `curves.toml`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.notation import write_count, write_fold, write_number
from mismatch_probe.records.lines import Contradiction, CurveReading, MetricCurve, NextColumn, PublishedBand
from mismatch_probe.records.summary import Verdict
from mismatch_probe.stats.catalogue import metric_meaning
from mismatch_probe.stats.curves import CurveShape, levels_at_ends, shape_of
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.verdict.curve_laws import contradictions_in, is_grave

_FOREMOST: Final = (
    *("kl_k3", "abs_logprob_diff", "abs_logprob_diff_seq", "logprob_diff_rms", "token_mult_prob_error"),
    *("kl_k2", "prob_abs_diff"),
    *("chi2_token", "ratio_abs_error", "log_ppl_abs_diff", "prob_pearson", "kl_entropy_ratio"),
)
"""Metrics whose shape is judged; the headline is about the first that is there."""
_BEST: Final = {"token_mult_prob_error": 1.0, "prob_pearson": 1.0}
"""Where agreement is at another number than 0."""
_NEAR: Final = 0.1
"""Published numbers are rounded: what lies so near to a bound, as a share of its distance from agreement, is within it.
A limit is none of these."""
_LIMIT: Final = "any"
"""The kind of a band that is a limit, of models of any kind."""
_LIMIT_WORDS: Final = ("limit", "alert")
"""With which the words of a limit begin, of one kind of model too."""
_NO_SHAPE: Final = "other"
_MOST_POINTS: Final = 2000
_NUM_COLUMNS: Final = 3
_MOST_UNKNOWN: Final = 40


@dataclass(frozen=True)
class NamedCurve:
    """A curve as it was logged, with what its name means; steps [n] rise, values [n] may be NaN or infinite."""

    name: str
    trainer: str
    metric: str
    words: str
    note: str
    source: str
    steps: npt.NDArray[np.int64]
    values: Floats


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("mismatch_probe.verdict").joinpath("curves.toml").read_text(encoding="utf-8"))


def read_curves(
    curves: Sequence[NamedCurve],
    *,
    tool_version: str,
    created_at: str,
    source: str,
    kind: str,
    file_names: Sequence[str],
    unknown: Sequence[str],
    notes: Sequence[str],
) -> CurveReading:
    """The reading of the curves of one file, at least one; `unknown` are names that were not read."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    columns, names = _columns(curves, steps)
    ages = columns.get("staleness", columns.get("staleness_max"))
    read = [_metric_curve(curve, _at(steps, ages, curve.steps)) for curve in curves]
    read.sort(key=lambda curve: _FOREMOST.index(curve.metric) if curve.metric in _FOREMOST else len(_FOREMOST))
    contradictions = contradictions_in(columns, steps, names)
    foremost = read[0]
    fitting = _fitting(foremost)
    return CurveReading(
        tool_version=tool_version,
        created_at=created_at,
        source=source,
        kind=kind,
        files=list(file_names),
        trainers=list(dict.fromkeys(curve.trainer for curve in curves)),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        num_steps=len(steps),
        verdict=_verdict(foremost, contradictions),
        headline_curve=foremost.name,
        curves=read,
        contradictions=contradictions,
        causes=_causes(foremost, fitting, contradictions, read),
        open_questions=[
            entry["words"] for entry in _data()["open_questions"] if columns.keys().isdisjoint(entry["unless"])
        ],
        next_columns=_next_columns(fitting, columns, [curve.trainer for curve in curves]),
        num_unknown=len(unknown),
        unknown=sorted(unknown)[:_MOST_UNKNOWN],
        notes=list(notes),
    )


def contradictions_of(curves: Sequence[NamedCurve]) -> list[Contradiction]:
    """The laws that the numbers of these curves break; none of no curve."""
    if not curves:
        return []
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    columns, names = _columns(curves, steps)
    return contradictions_in(columns, steps, names)


def _columns(curves: Sequence[NamedCurve], steps: npt.NDArray[np.int64]) -> tuple[dict[str, Floats], dict[str, str]]:
    """Values [steps] of each metric, NaN where a step lacks one, and the trainer's name of each; the first of several
    curves of a metric counts.
    """
    columns: dict[str, Floats] = {}
    names: dict[str, str] = {}
    for curve in curves:
        if curve.metric not in columns:
            column = np.full(len(steps), np.nan)
            column[np.searchsorted(steps, curve.steps)] = curve.values
            columns[curve.metric], names[curve.metric] = column, curve.name
    if "logprob_diff_rms" not in columns and columns.keys() >= {"abs_logprob_diff", "abs_logprob_diff_std"}:
        columns["logprob_diff_rms"] = np.hypot(columns["abs_logprob_diff"], columns["abs_logprob_diff_std"])
        names["logprob_diff_rms"] = f"{names['abs_logprob_diff']}, {names['abs_logprob_diff_std']}"
    return columns, names


def _at(steps: npt.NDArray[np.int64], column: Floats | None, of_curve: npt.NDArray[np.int64]) -> Floats | None:
    return None if column is None else column[np.searchsorted(steps, of_curve)]


def _metric_curve(curve: NamedCurve, ages: Floats | None) -> MetricCurve:
    is_finite = np.isfinite(curve.values)
    values, steps = curve.values[is_finite], curve.steps[is_finite]
    shape, levels = None, (float("nan"), float("nan"))
    if curve.metric in _FOREMOST and len(values):
        best = _BEST.get(curve.metric, 0.0)
        shape = shape_of(np.abs(values - best), None if ages is None else ages[is_finite])
        sign = -1.0 if curve.metric == "prob_pearson" else 1.0
        levels = best + sign * shape.first_level, best + sign * shape.last_level
    elif len(values):
        levels = levels_at_ends(values)
    stride = max(1, -(-len(curve.steps) // _MOST_POINTS))
    at_step = None if shape is None or shape.place is None else int(steps[shape.place])
    level = levels[1] if len(values) else 0.0
    return MetricCurve(
        name=curve.name,
        trainer=curve.trainer,
        metric=curve.metric,
        words=curve.words,
        meaning=metric_meaning(curve.metric),
        note=curve.note,
        source=curve.source,
        num_steps=len(curve.steps),
        num_nonfinite=int((~is_finite).sum()),
        steps=curve.steps[::stride].tolist(),
        values=[value if np.isfinite(value) else None for value in curve.values[::stride].tolist()],
        shape=_NO_SHAPE if shape is None else shape.kind,
        shape_words="" if shape is None else _shape_words(shape, at_step, curve.metric),
        first_level=levels[0] if len(values) else 0.0,
        last_level=level,
        p_value=None if shape is None else shape.p_value,
        at_step=at_step,
        bands=published_bands(curve.metric, level) if len(values) else [],
    )


def _shape_words(shape: CurveShape, at_step: int | None, metric: str) -> str:
    what = f"distance from {_BEST[metric]:g} " if metric in _BEST else ""
    fold = write_fold(max(shape.fold, 1 / shape.fold)) if shape.kind not in ("flat", "too_short", "sawtooth") else ""
    match shape.kind:
        case "sawtooth":
            tooth = write_fold(shape.tooth or 1.0)
            if shape.period is None:
                return f"{what}sawtooth: {tooth} from the newest weights to the oldest"
            return f"{what}sawtooth: {tooth}, every {write_count(shape.period)} steps"
        case "growing" | "falling":
            return f"{what}{'grows' if shape.kind == 'growing' else 'falls'} {fold} from step {at_step}"
        case "step_up" | "step_down":
            return f"{what}steps {shape.kind.removeprefix('step_')} {fold} at step {at_step}"
        case "unsure":
            return f"{what}{fold}, no sure trend"
        case "too_short":
            return "too few values"
    return "flat"


def published_bands(metric: str, level: float) -> list[PublishedBand]:
    bands = []
    for entry in _data()["band"]:
        if entry["metric"] == metric:
            low, high = entry.get("low"), entry.get("high")
            near, best = 0.0 if entry["kind"] == _LIMIT else _NEAR, _BEST.get(metric, 0.0)
            is_below = low is not None and level < low - near * abs(low - best)
            is_above = high is not None and level > high + near * abs(high - best)
            bands.append(
                PublishedBand(
                    kind=entry["kind"],
                    low=low,
                    high=high,
                    words=entry["words"],
                    source=entry["source"],
                    relation="below" if is_below else "above" if is_above else "within",
                )
            )
    return bands


def _verdict(curve: MetricCurve, contradictions: Sequence[Contradiction]) -> Verdict:
    grave = [contradiction for contradiction in contradictions if is_grave(contradiction)]
    evidence, sentence = [contradiction.sentence for contradiction in contradictions], f"{curve_sentence(curve)}."
    if grave:
        more = f" So do {write_count(len(grave) - 1)} more." if len(grave) > 1 else ""
        sentence = f"Numbers of this log contradict each other: {grave[0].sentence}.{more} {sentence}"
    code = "contradiction" if grave else curve.shape
    return Verdict(code=code, kind="broken" if grave else "undecided", sentence=sentence, evidence=evidence)


def rises(curve: MetricCurve) -> bool:
    """Whether the deviation that the curve measures gets larger."""
    return curve.shape in ("growing", "step_up")


def curve_sentence(curve: MetricCurve) -> str:
    """`KL (k3) grew 4.1-fold from a level of 0.001 at step 12 to 0.0041 at step 30`, and what is published of that."""
    words = f"{curve.words[0].upper()}{curve.words[1:]}"
    first, last = write_number(curve.first_level), write_number(curve.last_level)
    levels = f"; {where}" if (where := _relation_to_bands(curve)) else ""
    match curve.shape:
        case "growing" | "falling":
            fold = write_fold(_fold(curve))
            verb = "grew" if curve.shape == "growing" else "fell"
            steps = f"from a level of {first} at step {curve.at_step} to {last} at step {curve.steps[-1]}"
            return f"{words} {verb} {fold} {steps}{levels}"
        case "step_up" | "step_down":
            way = curve.shape.removeprefix("step_")
            fold = write_fold(_fold(curve))
            return f"{words} steps {way} {fold} at step {curve.at_step}, from a level of {first} to {last}{levels}"
        case "sawtooth":
            how = curve.shape_words.partition(": ")[2]
            return f"{words} is a sawtooth around {last}, {how}{levels}"
        case "unsure":
            return f"{words} went from a level of {first} to {last}, which slow noise can do too{levels}"
        case "flat":
            return f"{words} is flat at {last} over {write_count(curve.num_steps)} steps{levels}"
        case "too_short":
            few = f"the median of {write_count(curve.num_steps)} steps, too few for a shape"
            return f"{words} is {last} at {few}{levels}"
    return f"No curve of this log measures the mismatch; {curve.words} is {last} at the median"


def _fold(curve: MetricCurve) -> float:
    best = _BEST.get(curve.metric, 0.0)
    fold = abs(curve.last_level - best) / abs(curve.first_level - best)
    return max(fold, 1 / fold)


def _relation_to_bands(curve: MetricCurve) -> str:
    """`above what is published of dense models and of mixtures of experts, 4.1 times the limit of NeMo-RL (0.001)`."""
    relations: dict[str, list[str]] = {}
    for kind, words in (("dense", "dense models"), ("mixture", "mixtures of experts")):
        of_kind = [band for band in curve.bands if band.kind == kind and not band.words.startswith(_LIMIT_WORDS)]
        if relation := _relation_to([band.relation for band in of_kind]):
            relations.setdefault(relation, []).append(words)
    parts = [f"{relation} what is published of {' and of '.join(kinds)}" for relation, kinds in relations.items()]
    limits = [band for band in curve.bands if band.kind == _LIMIT and band.relation != "within"]
    parts += [_beyond(curve, band) for band in limits if band.words.startswith(_LIMIT_WORDS)]
    return ", ".join(parts)


def _beyond(curve: MetricCurve, band: PublishedBand) -> str:
    """`4.1 times the limit of NeMo-RL (0.001)`; where agreement is at another number than 0, `above the limit`."""
    bound = band.high if band.relation == "above" else band.low
    times = curve.last_level / bound if bound and curve.metric not in _BEST else 0.0
    how_far = f"{ratio:,.15g} times" if (ratio := float(f"{times:.3g}")) > 1 else band.relation
    return f"{how_far} the {band.words} ({bound:g})"


def _relation_to(relations: Sequence[str]) -> str:
    """To all that is published of a kind of model: within any of it, or on the same side of all of it."""
    if not relations or "within" in relations:
        return "within" if relations else ""
    return relations[0] if len(set(relations)) == 1 else "between"


def _fitting(curve: MetricCurve) -> str:
    """The key of the causes that fit the curve."""
    if curve.shape in ("flat", "too_short"):
        if curve.last_level == _BEST.get(curve.metric, 0.0):
            return "zero"
        dense = {band.relation for band in curve.bands if band.kind == "dense"}
        limits = {band.relation for band in curve.bands if band.kind == _LIMIT}
        return "flat_high" if (dense or limits) == {"above"} else "flat"
    if curve.shape == "unsure":
        first, last = (abs(level - _BEST.get(curve.metric, 0.0)) for level in (curve.first_level, curve.last_level))
        return "growing" if last > first else "falling"
    return curve.shape


def _causes(
    curve: MetricCurve, fitting: str, contradictions: Sequence[Contradiction], curves: Sequence[MetricCurve]
) -> list[str]:
    causes: list[str] = list(_data()["causes"].get(fitting, []))
    if any(contradiction.law in ("mean_weight", "chi2_token_below_zero") for contradiction in contradictions):
        causes.insert(0, _data()["causes"]["weights"][0])
    if fitting == "flat_high" and any(band.kind == "mixture" and band.relation == "within" for band in curve.bands):
        causes.insert(0, _data()["causes"]["mixture"][0])
    entropy = next((each for each in curves if each.metric == "entropy"), None)
    if entropy is None:
        return causes
    if entropy.last_level < entropy.first_level:
        return [f"{cause} (the entropy that is logged fell)" if "entropy" in cause else cause for cause in causes]
    refuted = [cause for cause in causes if "entropy" in cause]
    others = [cause for cause in causes if cause not in refuted]
    return [*others, *(f"{cause} (the entropy that is logged did not fall)" for cause in refuted)]


def _next_columns(fitting: str, columns: Mapping[str, Floats], trainers: Sequence[str]) -> list[NextColumn]:
    """The three columns to log next."""
    data = _data()
    first = data["first"].get(fitting, [])
    useful = [entry for entry in data["column"] if columns.keys().isdisjoint(entry["unless"])]
    useful.sort(key=lambda entry: first.index(entry["name"]) if entry["name"] in first else len(first))
    hows = [data["tokens"][trainer] for trainer in dict.fromkeys(trainers) if trainer in data["tokens"]]
    return [
        NextColumn(
            name=entry["name"],
            shows=entry["shows"],
            how=" or ".join(hows) if "token by token" in entry["name"] else "",
        )
        for entry in useful[:_NUM_COLUMNS]
    ]
