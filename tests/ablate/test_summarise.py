"""What is read off the courses of cells: collapse, growth, means over seeds; each with its inverse."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mismatch_probe.ablate.run import resume_ablation, start_ablation
from mismatch_probe.ablate.summarise import collapse_step, growth_step, over_seeds, publish_ablation, summarise_ablation
from mismatch_probe.config.ablate import Ablation
from mismatch_probe.errors import ExitCode, RunDirectoryError
from mismatch_probe.records.ablation import FIRST_STEP_OF_GROWTH, AblationDirectory, AblationResult
from mismatch_probe.records.training_run import GuardFirings
from mismatch_probe.report.answers.ablate import ablation_answer
from mismatch_probe.report.sections.ablation import ablation_sections, collapse_summary
from mismatch_probe.report.view import Table
from mismatch_probe.stats.intervals import Scale
from tests.report.training.training_runs import TrainingSample, firing, training_run

STEPS = np.arange(1.0, 41.0)
STEADY = np.full(40, 0.6)


def values(**grid: Any) -> dict[str, Any]:
    return {
        "model": {"path": "demo"},
        "steps": 60,
        "grid": {"precision": ["bf16", "fp16"], "seed": [0, 1], **grid},
    }


def ablation_run(path: Path, samples: dict[str, TrainingSample]) -> AblationDirectory:
    """An ablation whose cells of these names have been run so."""
    directory = start_ablation(path, Ablation.of(values()))
    for name, sample in samples.items():
        training_run(directory.cell(name).path, sample)
    return directory


def all_cells() -> dict[str, TrainingSample]:
    return {
        f"{dtype}-{dtype}.seed-{seed}": TrainingSample(dtype=dtype, seed=seed)  # type: ignore[arg-type]
        for dtype in ("bf16", "fp16")
        for seed in (0, 1)
    }


def with_reward(sample: TrainingSample, reward: float, since: int) -> TrainingSample:
    changes = {step: {"reward/mean": reward} for step in range(since, sample.steps + 1)}
    return replace(sample, changes=changes)


def test_a_reward_that_falls_for_good_is_a_collapse_at_the_step_where_it_is_low() -> None:
    rewards = np.where(STEPS > 20, 0.1, STEADY)
    assert collapse_step(STEPS, rewards, 4) == 22


@pytest.mark.parametrize(
    "rewards",
    [STEADY, np.linspace(0.1, 0.9, 40), np.where((STEPS > 10) & (STEPS < 20), 0.05, STEADY), np.zeros(40)],
    ids=["steady", "rising", "recovered", "never any"],
)
def test_no_other_reward_is_a_collapse(rewards: np.ndarray) -> None:
    assert collapse_step(STEPS, rewards, 4) is None


def test_rewards_that_are_no_numbers_to_the_end_are_a_collapse() -> None:
    assert collapse_step(STEPS, np.where(STEPS > 30, np.nan, STEADY), 4) is not None


def test_so_few_steps_that_noise_looks_like_a_collapse_show_none() -> None:
    rewards = np.array([0.6, 0.5, 0.2, 0.6, 0.1, 0.1])
    assert collapse_step(STEPS[:6], rewards, 1) is None
    assert growth_step(STEPS[:6], 10 ** (rewards * 10), 1) is None


def test_a_mismatch_that_climbs_has_grown_where_its_median_is_three_times_the_first() -> None:
    mismatch = np.where(STEPS > 12, 4e-5, 1e-5)
    assert growth_step(STEPS, mismatch, 4) == 14


def test_a_single_leap_of_the_mismatch_is_no_growth() -> None:
    mismatch = np.where(STEPS == 12, 1e-2, 1e-5)
    assert growth_step(STEPS, mismatch, 4) is None
    assert growth_step(STEPS, np.full(40, 1e-5), 4) is None


def test_the_interval_of_a_mean_is_students() -> None:
    mean = over_seeds([0.5, 0.6, 0.9])
    assert mean is not None
    low, high = stats.t.interval(0.95, 2, np.mean([0.5, 0.6, 0.9]), stats.sem([0.5, 0.6, 0.9]))
    assert (mean.value, mean.low, mean.high) == pytest.approx((2 / 3, low, high))
    positive = over_seeds([1e-5, 2e-5, 6e-5], Scale.RATIO)
    assert positive is not None
    assert positive.low is not None
    assert 0 < positive.low < positive.value


def test_one_seed_has_no_interval_and_none_has_no_mean() -> None:
    single = over_seeds([0.5])
    assert single is not None
    assert (single.value, single.low, single.high, single.num_seeds) == (0.5, None, None, 1)
    assert over_seeds([]) is None


def result_of(directory: AblationDirectory) -> AblationResult:
    return publish_ablation(directory)


def test_a_planted_collapse_is_shown_with_what_came_first(tmp_path: Path) -> None:
    cells = all_cells()
    cells["bf16-bf16.seed-0"] = with_reward(replace(cells["bf16-bf16.seed-0"], grows_at=5), 0.05, since=45)
    result = result_of(ablation_run(tmp_path / "run", cells))
    collapsed, *others = result.cells
    assert collapsed.collapse_step is not None
    assert collapsed.growth_step is not None
    assert collapsed.lead_steps == collapsed.collapse_step - collapsed.growth_step > 0
    assert [cell.collapse_step for cell in others] == [None, None, None]
    (variant,) = [variant for variant in result.variants if variant.num_collapsed]
    assert (variant.label, variant.num_collapsed, variant.num_grown_first) == ("BF16/BF16", 1, 1)
    sentence = f"BF16/BF16, seed 0 collapsed at step {collapsed.collapse_step}: its KL had grown "
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert sentence in page
    assert "1 collapsed" in str(ablation_answer(result).headline)


def _screen_text(result: AblationResult) -> str:
    return " ".join(collapse_summary(result).split())


def test_a_collapse_before_growth_can_be_seen_is_said_to_be_one(tmp_path: Path) -> None:
    result = result_of(ablation_run(tmp_path / "run", all_cells()))
    for step, is_said in ((FIRST_STEP_OF_GROWTH, True), (FIRST_STEP_OF_GROWTH + 1, False)):
        first, *others = result.cells
        collapsed = result.model_copy(update={"cells": [first.model_copy(update={"collapse_step": step}), *others]})
        assert ("1 cell collapsed by step 4" in _screen_text(collapsed)) is is_said


def test_cells_in_which_a_guard_rolled_back_are_counted_and_those_with_a_warning_are_not(tmp_path: Path) -> None:
    result = result_of(ablation_run(tmp_path / "run", all_cells()))
    assert _screen_text(result) == ""
    firing = {"guard": "g", "metric": "m", "firings": 1, "first_step": 5, "last_step": 5, "sentence": "it is high"}
    for actions, is_said in ((["warn", "rollback"], True), (["warn"], False)):
        guard = GuardFirings(actions=actions, **firing)
        first, *others = result.cells
        acted = result.model_copy(update={"cells": [first.model_copy(update={"guards": [guard]}), *others]})
        assert ("A guard rolled back in 1 of 4 cells" in _screen_text(acted)) is is_said


def test_runs_too_short_to_tell_a_collapse_are_counted_and_longer_ones_are_not(tmp_path: Path) -> None:
    result = result_of(ablation_run(tmp_path / "run", all_cells()))
    for window, is_said in ((2, True), (3, False)):
        short = result.model_copy(
            update={"cells": [cell.model_copy(update={"window": window}) for cell in result.cells]}
        )
        assert ("in 4 cells: 15 steps are needed" in _screen_text(short)) is is_said


def test_tasks_in_which_cells_differ_are_all_named(tmp_path: Path) -> None:
    tasks = ["sums:terms=3", "sums:terms=8"]
    directory = start_ablation(tmp_path / "run", Ablation.of(values(further={"task.source": tasks})))
    assert summarise_ablation(directory).task == "sums:terms=3, sums:terms=8"


def test_where_nothing_collapses_the_page_says_so(tmp_path: Path) -> None:
    result = result_of(ablation_run(tmp_path / "run", all_cells()))
    assert "none collapsed" in str(ablation_answer(result).headline)
    assert "No cell collapsed." in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert result.exit_code == ExitCode.PASS


def test_a_ratio_is_taken_seed_by_seed_and_has_an_interval(tmp_path: Path) -> None:
    (ratio,) = result_of(ablation_run(tmp_path / "run", all_cells())).ratios
    assert (ratio.of, ratio.over, ratio.differs_in) == ("BF16/BF16", "FP16/FP16", [])
    assert ratio.last is not None
    assert ratio.last.low is not None
    assert ratio.last.num_seeds == 2
    assert ratio.last.low < ratio.last.value
    assert 5 < ratio.last.value < 500


def test_a_ratio_of_variants_that_learn_otherwise_is_explained(tmp_path: Path) -> None:
    grid = {"precision": ["bf16"], "objective": ["grpo", "gspo"]}
    directory = start_ablation(tmp_path / "run", Ablation.of(values(**grid)))
    for name in ("grpo.seed-0", "gspo.seed-0"):
        training_run(directory.cell(name).path, TrainingSample())
    result = result_of(directory)
    assert result.ratios[0].differs_in == ["objective"]
    (sentence,) = ablation_answer(result).remarks
    assert "they differ in objective, so the ratio at the end also compares what each has learnt" in sentence
    assert re.search(r" is \S+ times \(one seed\) that of ", sentence)


def test_a_cell_that_broke_is_shown_with_its_reason_and_ends_with_4(tmp_path: Path) -> None:
    cells = all_cells()
    del cells["fp16-fp16.seed-1"]
    directory = ablation_run(tmp_path / "run", cells)
    manifest = directory.read_ablation_manifest()
    directory.write_ablation_manifest(manifest.model_copy(update={"failures": {"fp16-fp16.seed-1": "no memory left"}}))
    result = result_of(directory)
    assert [(cell.state, cell.reason) for cell in result.cells][-1] == ("broken", "no memory left")
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "no memory left" in directory.report_path.read_text(encoding="utf-8")
    assert (result.variants[1].num_cells, result.variants[1].num_done, result.variants[1].num_broken) == (2, 1, 1)


def test_a_cell_that_a_guard_stopped_is_done_and_the_guard_is_named(tmp_path: Path) -> None:
    cells = all_cells()
    stop = firing(9, ["stop"])
    cells["bf16-bf16.seed-0"] = replace(
        cells["bf16-bf16.seed-0"], steps=9, outcome="stopped: the mismatch is too large", firings=(stop,)
    )
    result = result_of(ablation_run(tmp_path / "run", cells))
    assert (result.cells[0].state, result.cells[0].reason) == ("stopped", "the mismatch is too large")
    assert result.cells[0].guards[0].guard == "mismatch-limit"
    assert result.variants[0].num_done == 2
    assert result.exit_code == ExitCode.PASS


def test_cells_that_were_not_run_are_on_the_page_as_such(tmp_path: Path) -> None:
    directory = ablation_run(tmp_path / "run", {})
    result = result_of(directory)
    assert {cell.state for cell in result.cells} == {"pending"}
    assert "4 cells: 4 not run" in str(ablation_answer(result).headline)
    assert _rows_of_early_warning(directory) == 0


def test_only_cells_that_ran_have_a_mismatch_that_may_grow(tmp_path: Path) -> None:
    cells = all_cells()
    del cells["fp16-fp16.seed-1"]
    assert _rows_of_early_warning(ablation_run(tmp_path / "run", cells)) == 3


def _rows_of_early_warning(directory: AblationDirectory) -> int:
    sections = ablation_sections(result_of(directory), directory.read_ablation_manifest())
    (section,) = [each for each in sections if each.anchor == "early-warning"]
    return sum(len(block.rows) for block in section.blocks if isinstance(block, Table))


def test_a_resume_may_add_cells_and_lose_none(tmp_path: Path) -> None:
    ablation_run(tmp_path / "run", all_cells())
    more = resume_ablation(tmp_path / "run", Ablation.of(values(seed=[0, 1, 2])))
    assert len(summarise_ablation(more).cells) == 6
    with pytest.raises(RunDirectoryError, match=r"has cells that the grid has not now \(bf16-bf16.seed-1"):
        resume_ablation(tmp_path / "run", Ablation.of(values(seed=[0])))
