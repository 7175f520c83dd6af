"""Responses of a policy whose two sides differ by rounding, with everything that a trainer may give of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnosis import GuardEvent
from mismatch_probe.guards.probe import Probe

RESPONSES, TOKENS, VOCABULARY = 16, 40, 32
LEARNT = {"loss": 0.3, "grad_norm": 0.5, "learning_rate": 1e-5}
REPORTED = {
    "sync/draw_surprise_mean": 0.0,
    "sync/draw_surprise_error": 0.4,
    "sync/weights_unchanged": 0.0,
    "sync/weights_other": 0.0,
    "time/reward_seconds": 0.1,
    "reward/unrepeated": 0.0,
    "reward/mispaired": 0.0,
    "reward/mispaired_error": 0.0,
    "response/unended_share": 0.0,
    "correction/rejected_share": 0.0,
    "correction/clipped_share": 0.0,
}


def batch(step: int, *, temperature: float = 1.0, noise: float = 0.01, **changed: Any) -> Batch:
    """Padded [16, 40] responses to 4 prompts, drawn from mu; both sides' logits differ by `noise`."""
    rng = np.random.default_rng(step)
    logits = 3 * rng.standard_normal((RESPONSES, TOKENS, VOCABULARY))
    log_pi, log_mu = (
        scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        for scaled in (logits, (logits + noise * rng.standard_normal(logits.shape)) / temperature)
    )
    drawn = (np.exp(log_mu).cumsum(-1) > rng.random((RESPONSES, TOKENS, 1))).argmax(-1)[..., None]
    mask = np.arange(TOKENS) < rng.integers(8, TOKENS + 1, RESPONSES)[:, None]
    batch_of_step = Batch(
        np.where(mask, np.take_along_axis(log_pi, drawn, -1)[..., 0], 0.0),
        np.where(mask, np.take_along_axis(log_mu, drawn, -1)[..., 0], 0.0),
        mask,
        entropy=np.where(mask, -(np.exp(log_pi) * log_pi).sum(-1), 0.0),
        prompt_ids=np.repeat(np.arange(4), 4),
        rewards=rng.integers(0, 2, RESPONSES).astype(float),
        truncated=mask.all(1),
    )
    return replace(batch_of_step, **changed)


def fired(events: tuple[GuardEvent, ...]) -> set[str]:
    return {event.guard for event in events}


def probe(step: int) -> Probe:
    rng = np.random.default_rng(7)
    log_pi = -rng.exponential(1, 64) - 1e-3 * step * rng.random(64)
    return Probe(log_pi, log_pi + 1e-3 * np.random.default_rng(step).standard_normal(64))
