"""The sentence of a check."""

from dataclasses import dataclass
from typing import Final

from mismatch_probe.dtypes import sides_label
from mismatch_probe.gate.claims import Bounds, Claim
from mismatch_probe.gate.config import Check
from mismatch_probe.gate.measure import CheckMeasurement
from mismatch_probe.notation import round_outwards, write_change, write_many, write_number
from mismatch_probe.records.gate_result import CheckAnswer, Look
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS

MOST_TIMES: Final = 2**10


@dataclass(frozen=True)
class OpenTail:
    """A limit that cannot be passed because of values that are too rare for the sample to show."""

    tokens: int | None
    """About so many tokens like these would pass; None where a thousand times as many would not."""


def open_tail(claim: Claim, check: Check, num_tokens: int, alpha: float) -> OpenTail | None:
    """The open tail that alone prevents a pass; None where something else does, or nothing."""
    if not claim.is_held_back_by_tail(check.limit, alpha, upper=check.upper):
        return None
    times = 2
    while times <= MOST_TIMES:
        if claim.within(check.limit, alpha, upper=check.upper, times=times):
            return OpenTail(round_number(times * num_tokens))
        times *= 2
    return OpenTail(None)


def round_number(number: int) -> int:
    return int(float(f"{number:.1e}"))


@dataclass(frozen=True)
class Prompts:
    """The number of prompts of a check, and the fewest that a pass needs."""

    number: int
    least: int

    @property
    def are_enough(self) -> bool:
        return self.number >= self.least

    def __str__(self) -> str:
        is_one = self.number == 1
        return f"{self.number} prompt{'' if is_one else 's'} {'is' if is_one else 'are'} fewer than the {self.least}"


def check_sentence(
    measurement: CheckMeasurement, answer: CheckAnswer, waits_for: str, bounds: Bounds, passing: float | None
) -> str:
    """The measured value, its interval, the answer, what it waits for, and the limit that would pass."""
    value = f"{_measured_sentence(measurement)}{_range_text(measurement, *bounds)}"
    limit = measurement.check.bound
    judgement = {"pass": f"{limit} is kept", "fail": f"{limit} is broken"}.get(
        answer, f"{limit} is neither kept nor broken for sure: {waits_for}"
    )
    return f"{value}; {judgement}{_passing_limit_advice(measurement, passing)}"


def _pair_label(pair: str) -> str:
    """`bf16/bf16` as the report calls it."""
    return sides_label(*pair.split("/"))


def _measured_sentence(measurement: CheckMeasurement) -> str:
    check = measurement.check
    what = f"{check.words} of {_pair_label(measurement.pair)}"
    if measurement.baseline is None:
        return f"{what} is {write_number(measurement.claim.value)}"
    baseline = f"the baseline's {write_number(measurement.baseline.value)}"
    return f"{what} is {write_number(measurement.run.value)}, {write_change(measurement.claim.value)} than {baseline}"


def _range_text(measurement: CheckMeasurement, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    if measurement.baseline is not None:
        return f" (from {write_change(low)} to {write_change(high)})"
    return f" (from {write_number(low)} to {write_number(high)})"


def reason_to_wait(measurement: CheckMeasurement, open_tail: OpenTail | None, look: Look, prompts: Prompts) -> str:
    """What an undecided check waits for: the same words for every check that waits for the same thing."""
    if not look.number:
        return f"the first look takes {write_many(look.declared[0], 'sequence')}, and there are {look.num_sequences}"
    if not prompts.are_enough:
        return f"{prompts} that a pass needs"
    if not measurement.can_pass:
        left_out, most = (f"{100 * share:.3g} %" for share in (measurement.left_out, MOST_LEFT_OUT_OF_A_PASS))
        return (
            f"tokens without a log-prob are {left_out} of its part (by number, or by surprisal, where one that both "
            f"sides lack counts as the rarest), and a pass tolerates {most}"
        )
    if open_tail is not None:
        return _too_rare_to_judge(measurement, open_tail)
    return f"{write_many(measurement.run.num_sequences, 'sequence')} do not decide it"


def _too_rare_to_judge(measurement: CheckMeasurement, open_tail: OpenTail) -> str:
    decides = [] if open_tail.tokens is None else [f"about {open_tail.tokens:,} tokens decide"]
    if measurement.check.clip is not None:
        decides.append(f"a clip below {measurement.check.clip:g} may")
    decided_by = ", ".join(decides) or "no sample of a size that is near decides"
    return f"values too rare for this sample may break it ({decided_by})"


def _passing_limit_advice(measurement: CheckMeasurement, passing: float | None) -> str:
    if passing is None or (measurement.baseline is not None and passing <= 0):
        return ""
    tightest = round_outwards(passing, is_up=measurement.check.upper)
    which = "smallest" if measurement.check.upper else "largest"
    return f"; the {which} {measurement.check.kind} that would pass is {tightest:g}"
