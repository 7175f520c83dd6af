"""How often the two policies agree outright."""

from mismatch_probe.stats.estimator import Estimator, Metrics
from mismatch_probe.stats.sequences import TokenPair

DIFFERS_NATS = 1e-6


def agreement(pair: TokenPair, estimator: Estimator) -> Metrics:
    """Shares of tokens whose log-probs differ by more than 1e-6 nats, or not at all, and of arg-max tokens that differ.

    torchtitan's batch-invariant mode asks for `bitwise_equal` of exactly 1.
    """
    metrics: Metrics = {
        "differs": estimator.share(pair.abs_diff > DIFFERS_NATS, "token"),
        "bitwise_equal": estimator.share(pair.diff == 0, "token"),
        "top1_flip": "the arg-max tokens of both sides were not recorded",
    }
    if pair.top1_pi is not None and pair.top1_mu is not None:
        metrics["top1_flip"] = estimator.share(pair.top1_pi != pair.top1_mu, "token")
    return metrics
