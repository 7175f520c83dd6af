"""What the KL of a log by its steps shows. One that grows leads the answer, and not its mean over all steps."""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.notation import write_estimate, write_fold
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
