"""Samples whose rare large errors decide, and their exact truths, for the gate and the intervals.

d = scale of the prompt x scale of the response x noise of the token; a truth is an integral, since no sample holds the
events that decide a heavy tail.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from mismatch_probe.stats.sequences import Sequences, TokenPair

Vector = npt.NDArray[np.float64]

LOG_LENGTH, LENGTH_SPREAD, LEAST_LENGTH, MOST_LENGTH = 5.0, 0.5, 10, 2000
CLIP = 5.0
_SCALES = 81

Prompts = Literal["alike", "log-normal", "a tenth at 3x", "3 in 100 at 10x"]
OUTLIERS: dict[Prompts, tuple[float, float]] = {"a tenth at 3x": (0.1, 3.0), "3 in 100 at 10x": (0.03, 10.0)}
"""The share of the prompts that err more, and how many times as much."""


@dataclass(frozen=True)
class TailDesign:
    """degrees: of Student's t of the tokens, infinite for a normal. scale: of d, nats. within, between: sd of the log
    scale of responses, and of prompts where these are log-normal.
    """

    degrees: float
    scale: float
    prompts: Prompts = "alike"
    within: float = 0.3
    between: float = 0.5

    @property
    def name(self) -> str:
        tokens = "normal" if math.isinf(self.degrees) else f"t{self.degrees:g}"
        return f"{tokens}, scale {self.scale:g}, prompts {self.prompts}" + (
            f" {self.between}" if self.prompts == "log-normal" else ""
        )


def draw(design: TailDesign, num_prompts: int, samples: int, random: np.random.Generator) -> TokenPair:
    num_sequences = num_prompts * samples
    lengths = np.clip(random.lognormal(LOG_LENGTH, LENGTH_SPREAD, num_sequences), LEAST_LENGTH, MOST_LENGTH)
    sequences = Sequences.of_lengths(lengths.astype(np.int64), np.arange(num_sequences) // samples)
    scale = design.scale * np.exp(random.normal(0, design.within, num_sequences))
    scale *= _of_prompts(design, num_prompts, random)[sequences.clusters]
    log_mu = -CLIP - 1.0 - random.exponential(0.5, sequences.num_tokens) * (random.random(sequences.num_tokens) < 0.5)
    noise = (
        random.normal(size=sequences.num_tokens)
        if math.isinf(design.degrees)
        else random.standard_t(design.degrees, sequences.num_tokens)
    )
    return TokenPair(sequences, log_mu + np.clip(sequences.spread(scale) * noise, -CLIP, CLIP), log_mu)


def mean_length() -> float:
    """Of a response, by the quantiles of what is drawn."""
    share = (np.arange(100_000) + 0.5) / 100_000
    lengths = np.exp(LOG_LENGTH + LENGTH_SPREAD * stats.norm.ppf(share))
    return float(np.clip(lengths, LEAST_LENGTH, MOST_LENGTH).astype(np.int64).mean())


def _of_prompts(design: TailDesign, num_prompts: int, random: np.random.Generator) -> Vector:
    if design.prompts == "log-normal":
        return np.asarray(np.exp(random.normal(0, design.between, num_prompts)))
    if design.prompts == "alike":
        return np.ones(num_prompts)
    share, times = OUTLIERS[design.prompts]
    return np.where(random.random(num_prompts) < share, times, 1.0)


def expectation(design: TailDesign, of: Callable[[Vector], Vector], clip: float) -> float:
    """E of a function of d held within +-clip, over tokens, scales of responses and of prompts."""
    spread = math.hypot(design.within, design.between if design.prompts == "log-normal" else 0.0)
    share_of_outliers, times = OUTLIERS.get(design.prompts, (0.0, 1.0))
    shares = ((1.0, 1 - share_of_outliers), (times, share_of_outliers))
    deviates = np.linspace(-6, 6, _SCALES)
    weights = np.exp(-(deviates**2) / 2)
    weights /= weights.sum()
    total = 0.0
    for factor, share in shares:
        for deviate, weight in zip(deviates, weights, strict=True):
            total += (
                share * weight * _of_one_scale(design, design.scale * factor * math.exp(spread * deviate), of, clip)
            )
    return total


def _of_one_scale(design: TailDesign, scale: float, of: Callable[[Vector], Vector], clip: float) -> float:
    noise = stats.norm() if math.isinf(design.degrees) else stats.t(design.degrees)
    edge = clip / scale
    grid = np.arcsinh(edge) * np.linspace(-1, 1, 4001)
    x = np.sinh(grid)
    inside = np.trapezoid(of(scale * x) * noise.pdf(x) * np.cosh(grid), grid)
    beyond = noise.sf(edge) * (of(np.array([clip]))[0] + of(np.array([-clip]))[0])
    return float(inside + beyond)
