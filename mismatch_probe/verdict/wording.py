"""Numbers inside sentences."""

from mismatch_probe.stats.results import Estimate


def scientific(value: float) -> str:
    """Two significant digits: 0.0012 -> 1.2e-03, 3.4 -> 3.4."""
    if value == 0:
        return "0"
    return f"{value:.2g}" if 0.01 <= abs(value) < 1e5 else f"{value:.1e}"


def nats(estimate: Estimate) -> str:
    return scientific(estimate.value)


def tokens(value: float) -> str:
    """A count of tokens with no more digits than it deserves: 343.2 -> 343, 23105 -> 23,000."""
    if value >= 10_000:
        digits = len(str(int(value))) - 2
        value = round(value, -digits)
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
