"""What the KL of a log by its steps shows. One that grows leads the answer, and not its mean over all steps."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from mismatch_probe.notation import write_estimate, write_fold, write_number
from mismatch_probe.records.summary import StepSummary, Verdict
from mismatch_probe.stats.growth import StepLevels
from mismatch_probe.stats.results import StepGrowth

_WHAT_CAN_CHANGE: Final = (
    "weights that the engine did not get or got in part, a cache that outlived an update, another setting or version "
    "of either side, a policy that training drives apart"
)


def growth_sentence(growth: StepGrowth, size: str = "") -> str:
    """`KL per token grew 42,000-fold from step 0 (7.8e-5) to step 7 (3.26), most at step 5 (310-fold)`.

    size: how large the last KL is, in words.
    """
    first = f"{_steps(growth.first_step, growth.first_up_to)} ({write_estimate(growth.first).value})"
    last = f"{last_steps(growth)} ({write_estimate(growth.last).value}{size and f': {size}'})"
    times = "" if growth.ratio is None else f" {write_fold(growth.ratio.value)}"
    most = ""
    if growth.steepest_ratio is not None:
        most = f", most at step {growth.steepest_step} ({write_fold(growth.steepest_ratio)})"
    return f"KL per token grew{times} from {first} to {last}{most}"


def levels_of(rows: Sequence[StepSummary]) -> StepLevels | None:
    """The KL of each step in its newest weights, the last row of a step; None of fewer than two steps."""
    newest = {row.step: row.metrics["kl_k3"] for row in rows if row.step is not None and "kl_k3" in row.metrics}
    if len(newest) < 2:
        return None
    estimates = newest.values()
    return StepLevels(list(newest), [each.value for each in estimates], [each.num_tokens for each in estimates])


_FEWEST_STEPS_OF_A_TREND: Final = 3
"""Two values are never flat: whatever they are, they may as well be the beginning of a growth."""


def course_words(levels: StepLevels, texts: Mapping[int | None, str] = MappingProxyType({})) -> str:
    """Of a KL that shows no growth: `flat over 8 steps (1.63e-4 to 2.95e-4)`, or where it is low and where high; of two
    steps that they are too few. texts: how the table of the steps writes the KL of each, where there is one.
    """

    def write(value: float, step: int) -> str:
        return texts.get(step) or write_number(value)

    low_step, high_step = levels.lowest[1], levels.highest[1]
    low, high = write(*levels.lowest), write(*levels.highest)
    if len(levels.steps) < _FEWEST_STEPS_OF_A_TREND:
        pairs = zip(levels.values, levels.steps, strict=True)
        each = " and ".join(f"{write(value, step)} at step {step}" for value, step in pairs)
        return f"{each}, too few steps to show a trend"
    extent = f"over {len(levels.steps)} steps"
    if levels.is_flat:
        return f"flat {extent} ({' to '.join(dict.fromkeys((low, high)))})"
    ends = f"{low} at step {low_step}, {high} at step {high_step}"
    return f"neither flat nor growing {extent} ({ends})"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def last_steps(growth: StepGrowth) -> str:
    """`step 7`, or `steps 12 to 15`."""
    return _steps(growth.last_from, growth.last_step)


def step_to_explain(growth: StepGrowth) -> int:
    """The step whose log-probs show most of what changed."""
    return growth.last_step if growth.steepest_step is None else growth.steepest_step


def with_growth(growth: StepGrowth | None, verdict: Verdict) -> Verdict:
    """The verdict with the growth before its own evidence, and what to look at before its own advice."""
    if growth is None or verdict.kind in ("broken", "clean"):
        return verdict
    return verdict.model_copy(
        update={
            "evidence": [growth_sentence(growth), *verdict.evidence],
            "advice": [_where_to_look(growth), *verdict.advice],
        }
    )


def _where_to_look(growth: StepGrowth) -> str:
    if growth.steepest_step is None:
        between = f"between {_steps(growth.first_step, growth.first_up_to)} and {last_steps(growth)}"
    else:
        between = f"between step {growth.step_before} and step {growth.steepest_step}"
    return f"Look at what changed {between}: {_WHAT_CAN_CHANGE}."
