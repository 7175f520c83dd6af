"""What models say of the served tokens, judged: as declared, another setting that fits, or undecided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import chdtri, ndtri

from mismatch_probe.audit.asking import ServedResponses
from mismatch_probe.audit.scoring import MIXED, Drawn, InverseTemperatures, Prediction, departures, num_departures
from mismatch_probe.config.examinations import AuditSettings
from mismatch_probe.explain.fitting import Distribution, TemperatureCurve
from mismatch_probe.explain.hypotheses import Context
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.notation import write_count, write_many, write_number, write_percent
from mismatch_probe.records.examinations import Agreement, AuditCandidate, CandidateKind, LawFit
from mismatch_probe.stats.agreement import (
    LawTest,
    NoiseFit,
    Rounding,
    fit_noise,
    hold_against_law,
    tokens_to_see,
    tokens_to_see_noise,
)
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Floats, Ints

CHANCE: Final = 1e-3
"""Of an error, that a server which is as declared is called another."""
TOLERATED: Final = 3.0
"""Times more or less than its dtype rounds that a sound server's scores may be moved: other kernels round otherwise."""
_NEAR_TIE: Final = 4.0
_MOST_GAPS: Final = 64
_TEMPERATURE_STEPS: Final = 1e-3
AS_DECLARED: Final = "as declared"


@dataclass(frozen=True)
class JudgedPrediction:
    """The tokens that one candidate names, and the noise that is left."""

    kind: CandidateKind
    what: str
    prediction: Prediction
    noise: NoiseFit

    @property
    def fits(self) -> bool:
        return self.noise.low <= TOLERATED and not (self.kind == "arithmetic" and self.is_more_exact)

    @property
    def is_more_exact(self) -> bool:
        """Whether the scores are surely moved less than kernels of the dtype may move them."""
        return self.noise.high < 1 / TOLERATED


def judge_prediction(
    kind: CandidateKind, what: str, prediction: Prediction, rounding: Rounding, clusters: Ints
) -> JudgedPrediction:
    """rounding: of the claimed dtype at the positions as declared."""
    return JudgedPrediction(
        kind, what, prediction, fit_noise(rounding, prediction.margins, prediction.gaps, clusters, 1 - CHANCE)
    )


def measure_agreement(
    claim: JudgedPrediction, in_dtype: Prediction, rounding: Rounding, estimator: Estimator, clusters: Ints
) -> Agreement:
    """in_dtype: the tokens that the checkpoint's own computation in the claimed dtype names."""
    prediction = claim.prediction
    gaps = prediction.gaps[prediction.differs]
    scales = rounding.scales[prediction.differs]
    at_level = fit_noise(rounding, prediction.margins, prediction.gaps, clusters, estimator.level)
    small = prediction.margins <= np.quantile(prediction.margins, 0.1)
    return Agreement(
        equal=estimator.share(~prediction.differs, "token"),
        floor=estimator.share(in_dtype.best_ids == prediction.best_ids, "token"),
        num_differing=int(prediction.differs.sum()),
        expected_differing=at_level.expected_differing,
        noise_times=at_level.times,
        noise_low=at_level.low,
        noise_high=at_level.high,
        rounding_nats=float(np.median(rounding.scales[small])),
        gaps=np.sort(gaps)[::-1][:_MOST_GAPS].tolist(),
        near_ties=int((gaps <= _NEAR_TIE * scales).sum()),
    )


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature that makes sampled tokens likeliest, with an interval, and the gain over temperature 1's."""

    value: float
    low: float
    high: float


def fit_temperature(curve: TemperatureCurve, level: float) -> TemperatureFit:
    """Maximum likelihood; the interval is Huber's, from the scores of the tokens [Huber 1967, Berkeley Symposium]."""
    grid = np.geomspace(0.26, 3.9, 60)
    totals = [float(curve.at(temperature).sum()) for temperature in grid]
    best = int(np.argmax(totals))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    minimum = minimize_scalar(lambda value: -float(curve.at(value).sum()), bounds=bounds, method="bounded")
    value, step = float(minimum.x), _TEMPERATURE_STEPS
    below, at, above = (curve.at(value * factor) for factor in (math.exp(-step), 1.0, math.exp(step)))
    information = -float((above - 2 * at + below).sum()) / step**2
    scores = (above - below) / (2 * step)
    if information <= 0:
        return TemperatureFit(value, 0.0, math.inf)
    reach = float(ndtri((1 + level) / 2)) * math.sqrt(float((scores**2).sum())) / information
    return TemperatureFit(value, value * math.exp(-reach), value * math.exp(reach))


_LEAST_INVERSE, _MOST_INVERSE = 0.25, 10.0
_ROUNDINGS: Final = np.geomspace(1e-4, 1.0, 9)
"""Nats by which the served scores may be moved."""


def temperature_of_seeds(bounds: InverseTemperatures, level: float) -> TemperatureFit | None:
    """The temperature at which the noise names the served tokens best; None where no token bounds it.

    Maximum likelihood, with scores that rounding moves by some nats too; the interval is by profile likelihood.
    """
    is_telling = (bounds.low > _LEAST_INVERSE) | (bounds.high < _MOST_INVERSE)
    if not is_telling.any():
        return None
    telling_bounds = InverseTemperatures(*(column[is_telling] for column in vars(bounds).values()))
    coarse = np.geomspace(_LEAST_INVERSE, _MOST_INVERSE, 150)
    best = float(coarse[_profile(telling_bounds, coarse).argmax()])
    grid = np.concatenate([coarse, best * np.linspace(0.95, 1.05, 201)])
    profile = _profile(telling_bounds, grid)
    near = grid[profile >= profile.max() - chdtri(1, 1 - level) / 2]
    return TemperatureFit(1 / float(np.median(grid[profile == profile.max()])), 1 / near.max(), 1 / near.min())


def _profile(bounds: InverseTemperatures, inverse: Floats) -> Floats:
    """The log-likelihood of the tokens at these inverse temperatures, at the rounding that is likeliest for each."""
    above = np.where(bounds.low > 0, (inverse[:, None] - bounds.low) * bounds.low_slope, np.inf)
    is_bounded = np.isfinite(bounds.high)
    highs = np.where(is_bounded, bounds.high, 0.0)
    below = np.where(is_bounded, (highs - inverse[:, None]) * bounds.high_slope, np.inf)
    distances = np.minimum(above, below)
    return np.asarray(np.max([_log_chance(distances / nats).sum(axis=1) for nats in _ROUNDINGS], axis=0))


def _log_chance(distances: Floats) -> Floats:
    """That an error of Student's t with 4 degrees lies below; at least one in a million million."""
    x = np.minimum(distances, 1e6)
    divisor = 1 + x**2 / 4
    return np.asarray(np.log(np.maximum(0.5 + 0.375 * x / np.sqrt(divisor) * (1 - x**2 / 12 / divisor), 1e-12)))


def law_fit(draws: Drawn, temperature: TemperatureFit, seed: int) -> LawFit:
    test = _test_of_first(draws, seed)
    return LawFit(
        p_value=test.p_value,
        surprise_nats=test.surprise,
        surprise_score=test.surprise_score,
        temperature=temperature.value,
        temperature_low=temperature.low,
        temperature_high=temperature.high,
        num_outside=int(draws.is_outside.sum()),
        largest_mass_before=float(draws.mass_before.max()),
        largest_place=int(draws.places.max()) + 1,
    )


def law_p_value(draws: Drawn, seed: int) -> float:
    """That the tokens were drawn from the first law."""
    return _test_of_first(draws, seed).p_value


def _test_of_first(draws: Drawn, seed: int) -> LawTest:
    """Without the tokens outside of the law's cut, which rounding alone moves over its edge: where a cut leaves hardly
    any chance, one of them would refute it. That a server does not cut so is for the likelihood to show.
    """
    inside = ~draws.is_outside
    first, entropies, variances, below = (
        column[inside] for column in (draws.first, draws.entropies, draws.variances, draws.below)
    )
    return hold_against_law(first, entropies, variances, below, seed)


def law_words(law: Distribution, claim: Distribution) -> str:
    """How a law differs from what is declared."""
    words = []
    if law.temperature != claim.temperature:
        words.append(f"temperature {law.temperature or 1.0:.3g}")
    if law.top_p != claim.top_p:
        words.append(f"top-p {law.top_p:g}")
    if law.top_k != claim.top_k:
        words.append(f"top-k {law.top_k}" if law.top_k else "no top-k")
    if law.min_p != claim.min_p:
        words.append(f"min-p {law.min_p:g}")
    return " and ".join(words) or AS_DECLARED


_GRID_TEMPERATURES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
_GRID_TOP_P: Final = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.5)
_GRID_TOP_K: Final = (1, 5, 10, 20, 40, 50, 64, 100, 200)
_GRID_MIN_P: Final = (0.01, 0.02, 0.05, 0.1, 0.2)


def other_laws(claim: Distribution, vocab_size: int, fitted_temperature: float) -> list[Distribution]:
    """What a server may do instead: other temperatures, the fitted one among them, each with other cuts too."""
    temperatures = [*_GRID_TEMPERATURES, round(fitted_temperature, 3)]
    cuts = [replace(claim, top_p=top_p) for top_p in (*_GRID_TOP_P, 1.0)]
    cuts += [replace(claim, top_k=top_k) for top_k in (*_GRID_TOP_K, 0) if top_k < vocab_size]
    cuts += [replace(claim, min_p=min_p) for min_p in _GRID_MIN_P]
    both = [replace(cut, temperature=temperature) for cut in [claim, *cuts] for temperature in temperatures]
    return [law for law in dict.fromkeys([*cuts, *both]) if law != claim]


_NATS_A_DEPARTURE: Final = 6.0
"""That a second departure must gain: without, the simpler law is named."""


def best_law(laws: Sequence[Distribution], draws: Drawn) -> tuple[int, float]:
    """The number of the likeliest law, fewer departures first, and its evidence over that as declared (nats)."""
    evidence = draws.log_probs.sum(axis=1) - draws.log_probs[0].sum()
    scores = evidence - _NATS_A_DEPARTURE * np.array([num_departures(law, laws[0]) for law in laws])
    best = int(scores.argmax())
    return best, float(evidence[best])


def is_refuted(evidence: float, num_laws: int) -> bool:
    """Whether the evidence for the best of so many laws refutes what is declared."""
    return evidence > math.log(num_laws / CHANCE)


def tokens_needed_for_law(kl: float, num_laws: int) -> int | None:
    return _as_count(tokens_to_see(kl, CHANCE / num_laws))


def noise_of_change(rounding: Rounding, claim: Prediction, changed: Prediction) -> float:
    """By how many times the claimed dtype's rounding a change of the weights moves scores at these positions."""
    gaps = np.where(changed.best_ids == claim.best_ids, 0.0, np.maximum(claim.margins, 1e-9))
    return fit_noise(rounding, claim.margins, gaps, np.arange(len(gaps)), 1 - CHANCE).times


def judge_dtype(
    what: str, claim: Prediction, differences: Floats, rounding: Rounding, clusters: Ints
) -> tuple[JudgedPrediction, float]:
    """Whether the served tokens fit rounding to another dtype, and how far that moves scores in units of the claimed
    one's rounding. Which tokens it moves, each kernel decides otherwise, so that only the size of its rounding counts.
    """
    own = Rounding.of(claim.margins, differences - claim.differences)
    by = judge_prediction("arithmetic", what, claim, own, clusters)
    return by, float(np.median(own.scales / rounding.scales))


def tokens_needed_for_noise(rounding: Rounding, margins: Floats, times: float) -> int | None:
    """To tell noise of so many times the rounding from what other kernels are allowed."""
    return _as_count(tokens_to_see_noise(rounding, margins, times, TOLERATED, CHANCE))


def _as_count(number: float) -> int | None:
    return math.ceil(number) if number < 1e12 else None


def noise_words(times: float, low: float, high: float) -> str:
    return f"{write_number(times)} [{write_number(low)}, {write_number(high)}] times"


def equal_words(agreement: Agreement) -> str:
    """The share of equal tokens, with its interval and its floor."""
    equal, floor = agreement.equal, agreement.floor
    bounds = "" if equal.low is None or equal.high is None else f" [{_percent(equal.low)}, {_percent(equal.high)}]"
    return (
        f"{_percent(equal.value)}{bounds} of {write_many(equal.num_tokens, 'token')} are the ones that the checkpoint "
        f"names in FP32; its own computation in the claimed dtype names {_percent(floor.value)}"
    )


def _percent(share: float) -> str:
    """Shares near 1 with the digits that tell them from it."""
    if round(share, 6) in (0.0, 1.0):
        return write_percent(share)
    digits = max(1, min(4, 1 - math.floor(math.log10(min(share, 1 - share) * 100))))
    return f"{100 * share:.{digits}f} %"


def cannot_tell(candidates: Sequence[AuditCandidate], num_tokens: int) -> list[str]:
    """What so many tokens leave open, and how many would tell it."""
    return [
        f"{candidate.what}: "
        + (
            "no number of tokens tells it from rounding this way"
            if candidate.tokens_needed is None
            else f"takes about {write_count(_two_digits(candidate.tokens_needed))} tokens on prompts like these"
        )
        for candidate in candidates[1:]
        if candidate.kind in ("weights", "arithmetic") or (candidate.kind == "sampling" and not candidate.fits)
        if candidate.tokens_needed is None or candidate.tokens_needed > num_tokens
    ]


def _two_digits(count: int) -> int:
    digits = max(0, len(str(count)) - 2)
    return round(count, -digits)


@dataclass(frozen=True)
class ServedSample:
    """The tokens, and the sampling settings that are declared."""

    tokens: LoggedTokens
    context: Context
    clusters: Ints
    """The prompt of each token [T]."""
    estimator: Estimator
    law: Distribution | None
    """None of greedy decoding."""
    seeds: list[int] | None
    """Of each token's noise; None where it is not known."""


@dataclass(frozen=True)
class SeededTemperature:
    """Another temperature than declared, at which the seeds' noise names more of the served tokens."""

    law: Distribution
    fit: TemperatureFit
    prediction: Prediction


@dataclass(frozen=True)
class CheckpointView:
    """What the checkpoint in FP32 says."""

    claim: Prediction | None
    """None where no token is named."""
    laws: list[Distribution]
    """That as declared, then others; of greedy tokens the one law that they may have been sampled from."""
    draws: Drawn | None
    """Under these laws; None of greedy tokens that show no sampling."""
    temperature: TemperatureFit
    fitted: Prediction | None = None
    """By the law that is likeliest, where tokens are predicted and that law refutes what is declared."""
    by_seeds: "SeededTemperature | None" = None
    fitted_p_value: float | None = None
    """That the tokens were drawn from that law; None where no law refutes what is declared."""


@dataclass(frozen=True)
class Changed:
    """The checkpoint with weights of fewer bits, with other prompts, or computed in another dtype."""

    kind: Literal["weights", "prompt", "arithmetic"]
    what: str
    prediction: Prediction | None
    draws: Drawn | None
    """Under the law as declared."""
    differences: Floats | None = None
    """Of another dtype, as those of the claimed one in `AuditFindings`."""


@dataclass(frozen=True)
class AuditFindings:
    """Everything that an answer rests on."""

    settings: AuditSettings
    sample: ServedSample
    look: CheckpointView
    in_dtype: Prediction | None
    """The tokens that the checkpoint's own computation in the claimed dtype names."""
    differences: Floats | None
    """Between the scaled logits of the best two tokens in that dtype [T]."""
    changed: list[Changed]
    responses: ServedResponses


_ALIKE_NATS: Final = -2 * math.log(MIXED)
"""What two tokens cost that rounding moves over the edge of a cut."""


def alike_words(look: CheckpointView, cause: str) -> list[str]:
    """Of each other sampling setting that alone explains the tokens about as well as the cause, the likeliest
    value; none where the cause is not the likeliest law.
    """
    if look.draws is None or len(look.laws) < 2:
        return []
    claim, (best, _) = look.laws[0], best_law(look.laws, look.draws)
    if law_words(look.laws[best], claim) != cause:
        return []
    evidence = look.draws.log_probs.sum(axis=1)
    likeliest: dict[str, int] = {}
    for number in np.argsort(-evidence).tolist():
        settings = departures(look.laws[number], claim)
        is_alike = evidence[number] >= evidence[best] - _ALIKE_NATS
        if len(settings) == 1 and is_alike and is_refuted(evidence[number] - evidence[0], len(look.laws)):
            likeliest.setdefault(settings[0], number)
    others = likeliest.keys() - set(departures(look.laws[best], claim))
    return [law_words(look.laws[likeliest[setting]], claim) for setting in likeliest if setting in others]
