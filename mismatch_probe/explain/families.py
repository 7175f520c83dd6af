"""Every hypothesis that is tried on a side, from what is declared of it and what the log and the checkpoint offer."""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.explain.codes import LogCode
from mismatch_probe.explain.distributions import Distribution
from mismatch_probe.explain.hypotheses import Family, Option, departure
from mismatch_probe.verdict.codes import Code

_TOP_P: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
_TOP_K: Final = (1, 5, 8, 10, 20, 30, 40, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024)
_MIN_P: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)


def of_distribution(declared: Distribution) -> Iterator[Family]:
    """Other sampling settings: what the engine makes of the logits, or fails to."""
    yield Family(
        "temperature",
        "distribution",
        (Option(departure("distribution", Code.TEMPERATURE, "another temperature")),),
        free_temperature=True,
    )
    raw = Distribution(temperature=1.0)
    if declared != raw:
        yield Family(
            "raw log-probs",
            "distribution",
            (
                Option(
                    departure("distribution", LogCode.RAW_LOGPROBS, "raw log-probs (temperature 1, nothing cut)"),
                    distribution=raw,
                ),
            ),
        )
    cuts = (
        ("top-p", [(value, Distribution(declared.temperature, top_p=value)) for value in _TOP_P]),
        ("top-k", [(value, Distribution(declared.temperature, top_k=value)) for value in _TOP_K]),
        ("min-p", [(value, Distribution(declared.temperature, min_p=value)) for value in _MIN_P]),
    )
    for name, values in cuts:
        yield Family(
            name,
            "distribution",
            tuple(
                Option(
                    departure("distribution", Code.TRUNCATED_SUPPORT, f"{name} {value:g}", float(value)),
                    distribution=distribution,
                )
                for value, distribution in values
                if distribution != declared
            ),
        )
    if declared.is_cut:
        yield Family(
            "nothing cut",
            "distribution",
            (
                Option(
                    departure("distribution", Code.TRUNCATED_SUPPORT, "no top-p, top-k or min-p"),
                    distribution=declared.uncut(),
                ),
            ),
        )
