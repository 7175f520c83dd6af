"""What a part removed, on log-probs whose answer is known."""

import numpy as np
import pytest

from mismatch_probe.localize.jobs import ONE_AT_A_TIME, TOGETHER, judge_interventions
from mismatch_probe.localize.workspace import TrialNotes
from mismatch_probe.records.findings import Interventions
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Floats, Sequences

ESTIMATOR = Estimator(Sequences.of_lengths([50] * 40))
RANDOM = np.random.default_rng(0)
LOG_MU = -RANDOM.exponential(1.0, 2000)
NOISE = RANDOM.standard_normal((2, 2000)) * 0.02


def trial(part: str, side: str = "train", seconds: float = 1.0) -> TrialNotes:
    return TrialNotes(part=part, side=side, seconds=seconds, extra_bytes=0)


def judged(legs: dict[str, Floats], trials: list[TrialNotes]) -> Interventions:
    return judge_interventions(trials, ESTIMATOR, legs.__getitem__, {})


PI = LOG_MU + NOISE[0] + NOISE[1]
LEGS = {"train": PI, "infer": LOG_MU, "train-with-": PI, "infer-with-": LOG_MU}


def test_a_part_that_carries_half_of_the_variance_removes_half() -> None:
    interventions = judged(
        {**LEGS, "train-with-lm_head": LOG_MU + NOISE[0]}, [trial(""), trial("lm_head", seconds=1.02)]
    )
    (intervention,) = interventions.ranked
    assert intervention.removed.low is not None
    assert intervention.removed.high is not None
    assert intervention.removed.low < 0.5 < intervention.removed.high
    assert intervention.removed.high - intervention.removed.low < 0.1
    assert intervention.slower == pytest.approx(0.02)


def test_a_part_that_changes_nothing_removes_nothing() -> None:
    (intervention,) = judged({**LEGS, "train-with-rope": PI}, [trial(""), trial("rope")]).ranked
    assert (intervention.removed.value, intervention.removed.low, intervention.removed.high) == (0.0, 0.0, 0.0)


def test_no_part_removes_more_than_there_is_nor_does_its_interval() -> None:
    few = Estimator(Sequences.of_lengths([10] * 4))
    legs = {name: leg[:40] for name, leg in {**LEGS, "train-with-norms": LOG_MU + 0.3 * NOISE[0]}.items()}
    legs["train-with-norms"][:10] += 0.04
    interventions = judge_interventions([trial(""), trial("norms")], few, legs.__getitem__, {})
    removed = interventions.ranked[0].removed
    assert removed.low is not None
    assert removed.high is not None
    assert removed.low < removed.value < removed.high == 1


def test_a_part_that_makes_it_worse_removes_less_than_nothing() -> None:
    (intervention,) = judged({**LEGS, "train-with-rope": PI + NOISE[0]}, [trial(""), trial("rope")]).ranked
    assert intervention.removed.high is not None
    assert intervention.removed.high < 0


def test_a_part_of_the_engine_is_held_against_the_training_path_as_it_is() -> None:
    legs = {**LEGS, "infer-with-lm_head": LOG_MU + NOISE[0]}
    (intervention,) = judged(legs, [trial("", "infer"), trial("lm_head", "infer")]).ranked
    assert intervention.removed.value == pytest.approx(0.5, abs=0.1)


def test_parts_are_ranked_and_independent_ones_add_up() -> None:
    legs = {
        **LEGS,
        "train-with-norms": LOG_MU + NOISE[0],
        "train-with-lm_head": LOG_MU + NOISE[0] + 0.5 * NOISE[1],
        "train-with-everything": LOG_MU,
        f"train-with-{TOGETHER.replace(' ', '-')}": LOG_MU + NOISE[0],
    }
    trials = [trial(part) for part in ("", "lm_head", "norms", "everything", TOGETHER)]
    interventions = judged(legs, trials)
    assert [intervention.part for intervention in interventions.ranked] == ["everything", "norms", "lm_head"]
    assert interventions.together is not None
    assert interventions.together.removed.value == pytest.approx(0.5, abs=0.1)
    assert interventions.sum_of_removed == pytest.approx(0.5 + 0.375, abs=0.1)


def test_a_part_tried_on_both_sides_is_also_raised_on_both() -> None:
    legs = {**LEGS, "train-with-lm_head": LOG_MU + NOISE[0], "infer-with-lm_head": LOG_MU + NOISE[0]}
    trials = [trial(""), trial("lm_head"), trial("", "infer"), trial("lm_head", "infer", seconds=1.5)]
    both = next(intervention for intervention in judged(legs, trials).ranked if intervention.side == "both")
    assert both.removed.value == pytest.approx(1.0)
    assert both.slower == pytest.approx(0.25)


def test_another_cut_of_the_batch_is_no_part_of_the_sum() -> None:
    legs = {**LEGS, f"infer-with-{ONE_AT_A_TIME.replace(' ', '-')}": LOG_MU + NOISE[0]}
    assert judged(legs, [trial("", "infer"), trial(ONE_AT_A_TIME, "infer")]).sum_of_removed is None
