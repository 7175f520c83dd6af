"""The sanity test [arXiv 2510.26788]: problems that are solved sometimes; training must solve nearly all.

Every kept problem can be solved and none is trivial, so a sound run drives training accuracy towards 100 %; one that
stays below 95 % shows a fault of the algorithm or of its numbers, not of the data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch_probe.config.model import SanitySettings
from mismatch_probe.config.train import DEFAULT_NUM_PROBLEMS, TrainSettings
from mismatch_probe.errors import TrainingStopped, UsageError
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.notation import write_estimate, write_many, write_percent
from mismatch_probe.provenance.environment import content_key, sequence_seed
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest
from mismatch_probe.records.training_run import (
    PASS_ACCURACY,
    SOLVED_FROM,
    TOO_FEW_STEPS,
    SanityDirectory,
    SanityRecord,
    Solved,
)
from mismatch_probe.stats.intervals import jackknife, ratio, share_interval
from mismatch_probe.stats.results import LEVEL, Estimate
from mismatch_probe.tasks import Asking
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.parts import TrainingParts
from mismatch_probe.train.preparation import TrainingPreparation, prepare_training
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.run import execute_training
from mismatch_probe.train.trainer import StepListener

Teller = Callable[[str], None]


def prepare_sanity(
    settings: TrainSettings, sanity: SanitySettings, guards: tuple[GuardSettings, ...] | None = None
) -> TrainingPreparation:
    """A training run ready to start whose problems are the candidates; `guards` as in `prepare_training`.

    Its content key `sanity` stands for what decides which of them are kept. Raises as `prepare_training`, and:

    Raises:
        UsageError: fewer problems are asked for than a step samples.
    """
    least, most = settings.rollout.prompts, settings.task.num_problems or DEFAULT_NUM_PROBLEMS
    for flag, number in (("--candidates", sanity.candidates), ("--num-problems", most)):
        if number < least:
            raise UsageError(f"{flag} {number} is fewer than the {least} problems of a step; lower --prompts-per-step")
    asking = Asking("--task", "--candidates", default_made=sanity.candidates, default_held=sanity.candidates)
    preparation = prepare_training(_with_num_problems(settings, None), guards, asking)
    settings = _with_num_problems(preparation.settings, most)
    keys = preparation.manifest.content_keys | {"sanity": content_key([sanity.model_dump(mode="json"), most])}
    manifest = preparation.manifest.model_copy(update={"settings": settings, "content_keys": keys})
    return replace(preparation, settings=settings, manifest=manifest)


def _with_num_problems(settings: TrainSettings, number: int | None) -> TrainSettings:
    return settings.model_copy(update={"task": settings.task.model_copy(update={"num_problems": number})})


def within_rates(rates: Mapping[str, float], settings: SanitySettings, most: int) -> list[str]:
    """The first `most` problems, in the order of `rates`, whose solve rate lies within the settings' bounds."""
    keys = [key for key, rate in rates.items() if settings.keep_low <= rate <= settings.keep_high]
    return keys[:most]


def solved_by_problem(step: int, rollouts: Sequence[Rollout]) -> dict[str, Solved]:
    """What the responses of a step solved; one that earned less than 1, or no number, is wrong."""
    by_problem: dict[str, Solved] = {}
    for rollout in rollouts:
        old = by_problem.get(rollout.prompt_id, Solved(step=step, responses=0, solved=0, tokens=0))
        by_problem[rollout.prompt_id] = Solved(
            step=step,
            responses=old.responses + 1,
            solved=old.solved + (rollout.reward >= SOLVED_FROM),
            tokens=old.tokens + rollout.length,
        )
    return by_problem


def accuracy_of(latest: Mapping[str, Solved]) -> Estimate:
    """Share of responses solved, its interval clustered by problem."""
    solved = np.array([problem.solved for problem in latest.values()], dtype=np.float64)
    responses = np.array([problem.responses for problem in latest.values()], dtype=np.float64)
    estimate = jackknife(ratio, np.stack([solved, responses]), responses)
    assert estimate is not None, "a share always exists"
    share = share_interval(estimate, int(responses.sum()), LEVEL)
    return Estimate(
        value=share.value,
        low=share.low,
        high=share.high,
        level=LEVEL,
        num_sequences=int(responses.sum()),
        num_tokens=sum(problem.tokens for problem in latest.values()),
        by="sequence",
        num_prompts=len(latest),
    )


def at_step(record: SanityRecord, step: int) -> dict[str, Any]:
    """What of a record is another where training goes on after `step`: later responses will be sampled again."""
    latest = {key: solved for key, solved in record.latest.items() if solved.step <= step}
    accuracy = _accuracy_once_all_sampled(latest, record.kept or ())
    return {"step": step, "latest": latest, "accuracy": accuracy, "passed": None, "verdict": "unfinished"}


@dataclass
class SanityTest:
    """The goal of a sanity run: chooses the problems before the first step, judges after every one.

    `tell` is given sentences for people.
    """

    directory: SanityDirectory
    preparation: TrainingPreparation
    record: SanityRecord
    tell: Teller

    def begin(self, parts: TrainingParts, step: int) -> None:
        """Choose the problems, or take those chosen before."""
        if self.record.kept is None:
            self._sample_candidates(parts)
        kept_problems = set(self.record.kept or ())
        parts.rollouts.restrict(
            [problem for problem in self.preparation.problems if problem.prompt_id in kept_problems]
        )
        self._write_record(**at_step(self.record, step))

    def reached(self, step: int, rollouts: Sequence[Rollout]) -> bool:
        """Whether the latest responses to every kept problem are right often enough."""
        assert self.record.kept is not None, "chosen at the beginning"
        seen_all_before = self.record.accuracy is not None
        latest = {**self.record.latest, **solved_by_problem(step, rollouts)}
        accuracy = _accuracy_once_all_sampled(latest, self.record.kept)
        has_passed = accuracy is not None and accuracy.value > PASS_ACCURACY
        self._write_record(step=step, latest=latest, accuracy=accuracy, passed=has_passed or None)
        if has_passed:
            self._write_record(verdict=f"passed at step {step}")
        elif accuracy is not None and not seen_all_before:
            self.tell(f"all {len(latest)} problems seen once: {write_estimate(accuracy)} of their responses solved")
        return has_passed

    def end(self, reason: str) -> None:
        """Training is over; `reason` says why it did not pass, where it did not."""
        if not self.record.passed:
            self._write_record(passed=False, verdict=f"not passed: {reason}")

    def _sample_candidates(self, parts: TrainingParts) -> None:
        """Sample every candidate in batches of a step's size, until enough are kept; whole batches are recorded."""
        settings, train = self.record.settings, self.preparation.settings
        most = train.task.num_problems
        assert most is not None, "resolved when the run was prepared"
        candidates = self.preparation.problems
        size = max(1, train.rollout.prompts * train.rollout.samples // settings.solve_samples)
        rates = dict(self.record.rates)
        while len(within_rates(rates, settings, most)) < most:
            batch = candidates[len(rates) : len(rates) + size]
            if not batch:
                break
            rates |= self._solve_rates(parts, batch)
            self._write_record(rates=rates)
            num_kept = len(within_rates(rates, settings, most))
            self.tell(f"{len(rates)} of {len(candidates)} candidates tried, {num_kept} kept")
        keys = within_rates(rates, settings, most)
        require_enough(keys, rates, settings, train.rollout.prompts)
        at_start = np.mean([rates[key] for key in keys])
        problems, solved = write_many(len(keys), "problem"), write_percent(float(at_start))
        self.tell(f"{problems} to train on, {solved} solved before training")
        self._write_record(kept=keys)

    def _solve_rates(self, parts: TrainingParts, batch: Sequence[EncodedPrompt]) -> dict[str, float]:
        seed = self.preparation.settings.seed
        groups = [
            [
                SampleRequest(
                    f"try/{problem.prompt_id}/{sample}", problem, sequence_seed(seed, problem.prompt_id, sample)
                )
                for sample in range(self.record.settings.solve_samples)
            ]
            for problem in batch
        ]
        solved = solved_by_problem(0, parts.rollouts.respond(groups))
        return {problem.prompt_id: _share_text(solved[problem.prompt_id]) for problem in batch}

    def _write_record(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        if is_main():
            self.directory.write_sanity(self.record)


def execute_sanity(
    directory: SanityDirectory,
    preparation: TrainingPreparation,
    record: SanityRecord,
    watch: StepListener,
    tell: Teller,
) -> SanityRecord:
    """Choose the problems, train until the test is passed or training ends, and say what came of it."""
    test = SanityTest(directory, preparation, record, tell)
    try:
        execute_training(directory, preparation, watch, test)
        test.end(f"{_steps_text(preparation.settings.steps)} {TOO_FEW_STEPS}")
    except TrainingStopped as stop:
        test.end(f"a guard stopped training: {stop}")
    return test.record


def _steps_text(number: int) -> str:
    return f"{write_many(number, 'step')} {'was' if number == 1 else 'were'}"


def require_enough(keys: Sequence[str], rates: Mapping[str, float], settings: SanitySettings, least: int) -> None:
    """
    Raises:
        UsageError: fewer problems are kept than a step samples.
    """
    if len(keys) >= least:
        return
    easy = sum(rate > settings.keep_high for rate in rates.values())
    hard = sum(rate < settings.keep_low for rate in rates.values())
    advice = "an easier --task" if hard > easy else "a harder --task"
    raise UsageError(
        f"{len(keys)} of {len(rates)} candidates are solved {write_percent(settings.keep_low)} to "
        f"{write_percent(settings.keep_high)} of the time ({easy} more often, {hard} less), fewer than the {least} "
        f"problems of a step; give more --candidates, {advice}, or fewer --prompts-per-step"
    )


def _accuracy_once_all_sampled(latest: Mapping[str, Solved], keys: Sequence[str]) -> Estimate | None:
    """Accuracy once every kept problem has been seen."""
    return accuracy_of(latest) if latest and len(latest) == len(keys) else None


def _share_text(counts: Solved) -> float:
    return counts.solved / counts.responses
