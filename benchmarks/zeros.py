"""How often zeros of a log-prob are taken for what they are: drawn logs, some of whose responses are filled with zeros.

    python -m benchmarks.zeros [--responses 200]

A policy draws tokens from distributions over 24 tokens; the sampler's log-probs are those of its nucleus, or of a
log-softmax whose results are multiples of an eighth, and so have honest zeros. The trainer's side differs by rounding,
or as other weights do.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from mismatch_probe.stats.sequences import Floats
from mismatch_probe.stats.zeros import zeros_for_missing

_VOCABULARY = 24
_ROUNDING = 0.03
"""Of a logit, nats."""
_OTHER_WEIGHTS = (0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Drawn:
    """log_mu, log_pi: [responses, tokens]; entropy: mean of the policy's, nats."""

    log_mu: Floats
    log_pi: Floats
    entropy: float


def draw(
    random: np.random.Generator, shape: tuple[int, int], sureness: float, top_p: float | None, error: float = 0.0
) -> Drawn:
    """Responses of a policy whose logits have a scale of about e^sureness; without `top_p` of a coarse log-softmax.

    error: of each of the trainer's logits, nats; 0 for rounding, which is small where a token is likely.
    """
    count = shape[0] * shape[1]
    logits = np.exp(random.normal(sureness, 1.0, count))[:, None] * random.standard_normal((count, _VOCABULARY))
    log_p = _log_softmax(logits)
    log_q = log_p if top_p is None else _in_nucleus(log_p, top_p)
    tokens = (np.exp(log_q).cumsum(axis=1) > random.random((count, 1))).argmax(axis=1)
    of_tokens = np.arange(count), tokens
    log_mu = np.round(log_q[of_tokens] * 8) / 8 if top_p is None else log_q[of_tokens]
    if error:
        log_pi = _log_softmax(logits + error * random.standard_normal(logits.shape))[of_tokens]
    else:
        rounding = _ROUNDING * random.standard_normal(count) * -np.expm1(log_p[of_tokens])
        log_pi = np.minimum(log_p[of_tokens] + rounding, 0.0)
    entropy = -float((np.exp(log_p) * log_p).sum(axis=1).mean())
    return Drawn(np.where(np.abs(log_mu) < 1e-12, 0.0, log_mu).reshape(shape), log_pi.reshape(shape), entropy)


def shares(drawn: Drawn, num_filled: int, run: int | None = None) -> tuple[float, float]:
    """Share of the filled zeros that are caught, where so many responses are filled (or the first `run` tokens of
    each), and of the other zeros that are lost.
    """
    log_mu, filled = drawn.log_mu.copy(), np.zeros(drawn.log_mu.shape, dtype=np.bool_)
    filled[:num_filled, :run] = True
    log_mu[filled] = 0.0
    offsets = np.arange(log_mu.shape[0] + 1) * log_mu.shape[1]
    caught = zeros_for_missing(log_mu.ravel(), drawn.log_pi.ravel(), offsets).reshape(log_mu.shape)
    honest = (log_mu == 0) & ~filled
    return float(caught[filled].mean()), float(caught[honest].mean()) if honest.any() else 0.0


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _in_nucleus(log_p: Floats, top_p: float) -> Floats:
    order = np.argsort(-log_p, axis=1)
    sorted_p = np.exp(np.take_along_axis(log_p, order, axis=1))
    kept = np.zeros(log_p.shape, dtype=np.bool_)
    np.put_along_axis(kept, order, sorted_p.cumsum(axis=1) - sorted_p < top_p, axis=1)
    log_q = np.where(kept, log_p, -np.inf)
    return np.asarray(log_q - np.log(np.exp(log_q).sum(axis=1, keepdims=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=200)
    number = parser.parse_args().responses
    print("Sides that differ by rounding:\n")
    print("| entropy, nats | sampler | tokens | zeros | filled responses caught | filled halves caught | others lost |")
    print("|---|---|---|---|---|---|---|")
    for sureness in (0.5, 2.5, 3.3, 4.0):
        for top_p in (0.98, 0.9, 0.5, None):
            for length in (30, 100, 400):
                print(f"| {_row(number, length, sureness, top_p)} |")
    print("\nSides of other weights, responses of 100 tokens:\n")
    print("| error of a logit, nats | entropy, nats | sampler | tokens | zeros | filled responses caught ", end="")
    print("| filled halves caught | others lost |\n|---|---|---|---|---|---|---|---|")
    for error in _OTHER_WEIGHTS:
        for sureness in (0.5, 2.5, 3.3, 4.0):
            for top_p in (0.98, 0.9, 0.5, None):
                print(f"| {error:g} | {_row(number, 100, sureness, top_p, error)} |")


def _row(number: int, length: int, sureness: float, top_p: float | None, error: float = 0.0) -> str:
    drawn = draw(np.random.default_rng(0), (number, length), sureness, top_p, error)
    share, lost = shares(drawn, max(1, number // 20))
    half, _ = shares(drawn, max(1, number // 20), length // 2)
    sampler = "coarse log-softmax" if top_p is None else f"top-p {top_p:g}"
    zeros = (drawn.log_mu == 0).mean()
    return (
        f"{drawn.entropy:.2f} | {sampler} | {length} | {100 * zeros:.0f} % | {100 * share:.0f} % | {100 * half:.0f} % "
        f"| {100 * lost:.2g} %"
    )


if __name__ == "__main__":
    main()
