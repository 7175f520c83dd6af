"""What came of an ablation, from the files of its cells: each cell, each variant over its seeds, and their ratios."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.ablate.run import DONE, states
from mismatch_probe.config.ablate import Ablation, GridCell, variant_label
from mismatch_probe.records.ablation import (
    COLLAPSED_BELOW,
    GROWN_ABOVE,
    AblationDirectory,
    AblationResult,
    CellResult,
    CellState,
    OverSeeds,
    VariantRatio,
    VariantResult,
)
from mismatch_probe.records.files import write_text
from mismatch_probe.records.training_run import PASS_ACCURACY, SanityRecord
from mismatch_probe.report.answers.ablate import ablation_answer
from mismatch_probe.report.rendering import PlotlyJs, render_page
from mismatch_probe.report.training.course import Course, read_courses
from mismatch_probe.report.training.headline import MISMATCH, REWARD, finite_mean, summarise_course
from mismatch_probe.stats.intervals import Scale, interval, jackknife, ratio
from mismatch_probe.stats.results import LEVEL
from mismatch_probe.stats.sequences import Floats

_FEW_STEPS: Final = 3
"""By which a step is placed: so few that what comes first can be told, and enough that a single leap is none."""
_ACCURACY: Final = "reward/solved_share"
_MEANS: Final = (
    *("reward_first", "reward_last", "reward_best", "reward_pi_last", "accuracy_last", "accuracy_pi_last"),
    *("reward_gap", "accuracy_gap", "kl_first", "kl_last", "kl_all", "prob_diff_lowest", "prob_diff_highest"),
    *(
        "pass_step",
        "collapse_step",
        "growth_step",
        "lead_steps",
        "step_seconds",
        "score_seconds",
        "learn_seconds",
        "score_over_learn",
    ),
    *("sampled_tokens_per_second", "scored_tokens_per_second", "learned_tokens_per_second"),
    *("clipped_share", "rejected_share", "effective_share"),
)
"""Numbers of a cell that have a mean over seeds."""
_WITHIN_0_AND_1: Final = ("_share", "accuracy_last", "accuracy_pi_last")
_MEDIANS: Final = {
    "step_seconds": "time/step_seconds",
    "score_seconds": "time/score_seconds",
    "learn_seconds": "time/learn_seconds",
    "sampled_tokens_per_second": "time/sampled_tokens_per_second",
    "scored_tokens_per_second": "time/scored_tokens_per_second",
    "learned_tokens_per_second": "time/learned_tokens_per_second",
}
_SHARES: Final = {
    "clipped_share": "correction/clipped_share",
    "rejected_share": "correction/rejected_share",
    "effective_share": "correction/ess",
}


def summarise_ablation(directory: AblationDirectory) -> AblationResult:
    """The record of an ablation, finished or not, from its own files and those of its cells.

    Raises:
        RunDirectoryError: the folder holds no ablation.
        BrokenRecord: a file cannot be read by this version.
    """
    manifest = directory.read_ablation_manifest()
    ablation = Ablation.of(manifest.settings)
    varying = ablation.varying_axes()
    cells = [
        _cell_result(directory, cell, variant_label(cell.axes, varying), state, reason, manifest.seconds.get(cell.name))
        for cell, state, reason in states(directory, ablation)
    ]
    groups: dict[str, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(cell.variant, []).append(cell)
    return AblationResult(
        tool_version=__version__,
        models=list(dict.fromkeys(cell.settings.model.path for cell in ablation.cells)),
        task=", ".join(dict.fromkeys(cell.settings.task.source for cell in ablation.cells)),
        command=manifest.command,
        is_sanity=ablation.sanity is not None,
        level=LEVEL,
        most_at_once=manifest.most_at_once,
        cells=cells,
        variants=[_variant(label, group) for label, group in groups.items()],
        ratios=list(_ratios(groups)),
    )


def publish_ablation(directory: AblationDirectory, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> AblationResult:
    """Write the record of an ablation and its page, and return the record. Raises as `summarise_ablation`, and:

    Raises:
        StorageError: the disk refused the write.
    """
    result = summarise_ablation(directory)
    directory.write_result(result)
    runs = [(cell.variant, directory.cell(cell.name)) for cell in result.cells if cell.steps]
    courses = [(variant, read_courses([run])[0]) for variant, run in runs]
    page = render_page(
        ablation_answer(result, directory.read_ablation_manifest(), courses),
        plotly_js,
        tool_version=result.tool_version,
        sources=["manifest.json", "ablation.json", "cells/*/metrics.jsonl", "cells/*/events.jsonl"],
        document=result.model_dump(mode="json"),
    )
    write_text(directory.report_path, page)
    return result


def _cell_result(
    directory: AblationDirectory,
    cell: GridCell,
    variant: str,
    state: CellState,
    reason: str | None,
    seconds: float | None,
) -> CellResult:
    run = directory.cell(cell.name)
    [course] = read_courses([run]) if run.is_run else [None]
    numbers = {} if course is None or not len(course.steps) else _numbers(course)
    return CellResult(
        name=cell.name,
        variant=variant,
        axes=cell.axes,
        seed=cell.settings.seed,
        state=state,
        reason=reason,
        steps_asked=cell.settings.steps,
        seconds=seconds,
        **numbers,
    )


def _numbers(course: Course) -> dict[str, Any]:
    """What the steps of a cell say; a number that no step has is left out."""
    summary = summarise_course(course, "")
    window, metrics = summary.window, summary.metrics
    collapse = collapse_step(course.steps, course.metric(REWARD), window)
    growth = growth_step(course.steps, course.metric(MISMATCH), window)
    low, high = (metrics.get(f"mismatch/prob_diff_{end}") for end in ("min", "max"))
    last = {name: finite_mean(course.metric(f"reward/{name}")[-window:]) for name in _REWARDS}
    numbers = {
        "steps": summary.steps,
        "window": window,
        "reward_first": None if REWARD not in metrics else metrics[REWARD].first,
        "reward_last": last["mean"],
        "reward_best": summary.best_reward,
        "reward_best_step": summary.best_reward_step,
        "reward_pi_last": last["mean_pi"],
        "accuracy_last": last["solved_share"],
        "accuracy_pi_last": last["solved_share_pi"],
        "reward_gap": _less(last["mean"], last["mean_pi"]),
        "accuracy_gap": _less(last["solved_share"], last["solved_share_pi"]),
        "kl_first": None if MISMATCH not in metrics else metrics[MISMATCH].first,
        "kl_last": None if MISMATCH not in metrics else metrics[MISMATCH].last,
        "kl_all": finite_mean(course.metric(MISMATCH)),
        "prob_diff_lowest": None if low is None else low.lowest,
        "prob_diff_lowest_step": None if low is None else low.lowest_step,
        "prob_diff_highest": None if high is None else high.highest,
        "prob_diff_highest_step": None if high is None else high.highest_step,
        "pass_step": _pass_step(course, window),
        "collapse_step": collapse,
        "growth_step": growth,
        "lead_steps": None if collapse is None or growth is None else collapse - growth,
        "skipped_updates": summary.skipped_updates,
        "guards": summary.guards,
        "score_over_learn": _median(course.metric("time/score_seconds") / course.metric("time/learn_seconds")),
        **{name: _median(course.metric(metric)) for name, metric in _MEDIANS.items()},
        **{name: finite_mean(course.metric(metric)) for name, metric in _SHARES.items()},
    }
    return {name: value for name, value in numbers.items() if value is not None}


_REWARDS: Final = ("mean", "mean_pi", "solved_share", "solved_share_pi")


def _less(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _median(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _windows(values: Floats, window: int) -> Floats:
    """[steps - window + 1, window]"""
    return np.lib.stride_tricks.sliding_window_view(values, window)


def collapse_step(steps: Floats, rewards: Floats, window: int) -> int | None:
    """The first step at which the mean reward of three steps is below half of the best such mean before.

    steps, rewards: [steps]; a reward that is no number counts as 0. None where the mean of the last `window` steps is
    not so low, or where the window is shorter than three steps: then the noise of a step would look like a collapse.
    """
    if window < _FEW_STEPS:
        return None
    numbers = np.where(np.isfinite(rewards), rewards, 0.0)
    means = _windows(numbers, _FEW_STEPS).mean(axis=1)
    best = np.maximum.accumulate(means)
    is_low = (means < COLLAPSED_BELOW * best) & (best > 0)
    if not is_low[-1] or numbers[-window:].mean() >= COLLAPSED_BELOW * best[-1]:
        return None
    return int(steps[np.flatnonzero(is_low)[0] + _FEW_STEPS - 1])


def growth_step(steps: Floats, mismatch: Floats, window: int) -> int | None:
    """The first step whose median KL over three steps is above three times that of the first ones.

    What is not finite counts as infinite. None where no step is, or where the window is shorter than three steps.
    """
    if window < _FEW_STEPS:
        return None
    medians = np.median(_windows(np.where(np.isfinite(mismatch), mismatch, np.inf), _FEW_STEPS), axis=1)
    above = np.flatnonzero(medians > GROWN_ABOVE * medians[0])
    return int(steps[above[0] + _FEW_STEPS - 1]) if len(above) and np.isfinite(medians[0]) else None


def _pass_step(course: Course, window: int) -> int | None:
    if course.sanity is not None:
        return _step_of_test(course.sanity)
    accuracies = course.metric(_ACCURACY)
    if len(accuracies) < window:
        return None
    passed = np.flatnonzero(_windows(accuracies, window).mean(axis=1) > PASS_ACCURACY)
    return int(course.steps[passed[0] + window - 1]) if len(passed) else None


def _step_of_test(record: SanityRecord) -> int | None:
    return record.step if record.passed else None


def over_seeds(values: Sequence[float], scale: Scale = Scale.SIGNED) -> OverSeeds | None:
    """The mean of one value a seed, with Student's t interval, of a positive number on the log scale (Scale.RATIO);
    None without a value.
    """
    if not values:
        return None
    estimate = jackknife(ratio, np.stack([np.array(values, dtype=np.float64), np.ones(len(values))]))
    assert estimate is not None, "a mean always exists"
    bounds = interval(estimate, scale, LEVEL)
    return OverSeeds(value=bounds.value, low=bounds.low, high=bounds.high, num_seeds=len(values))


def _variant(label: str, cells: Sequence[CellResult]) -> VariantResult:
    done = [cell for cell in cells if cell.state in DONE]
    with_collapse = [cell for cell in done if cell.collapse_step is not None]
    means = {name: _mean_over_seeds(done, name) for name in _MEANS}
    return VariantResult(
        label=label,
        axes={name: words for name, words in cells[0].axes.items() if name != "seed"},
        num_cells=len(cells),
        num_done=len(done),
        num_broken=sum(cell.state == "broken" for cell in cells),
        num_stopped=sum(cell.state == "stopped" for cell in cells),
        num_passed=sum(cell.pass_step is not None for cell in done),
        num_collapsed=len(with_collapse),
        num_grown_first=sum(cell.lead_steps is not None and cell.lead_steps > 0 for cell in with_collapse),
        means={name: mean for name, mean in means.items() if mean is not None},
    )


def _mean_over_seeds(cells: Sequence[CellResult], name: str) -> OverSeeds | None:
    """The bounds of an accuracy or a share lie within 0 and 1."""
    values = [float(value) for cell in cells if (value := getattr(cell, name)) is not None]
    is_positive = name.startswith("kl_") or name.endswith(("_seconds", "_per_second"))
    mean = over_seeds(values, Scale.RATIO if is_positive and min(values, default=0) > 0 else Scale.SIGNED)
    if mean is None or mean.low is None or mean.high is None or not name.endswith(_WITHIN_0_AND_1):
        return mean
    return mean.model_copy(update={"low": max(mean.low, 0.0), "high": min(mean.high, 1.0)})


def _ratios(groups: Mapping[str, Sequence[CellResult]]) -> Iterator[VariantRatio]:
    """Of each variant's counterpart over it: the first one that differs in its dtypes alone, or else the first."""
    labels = list(groups)
    for number, other in enumerate(labels[1:], 1):
        alike = [label for label in labels[:number] if _rule(groups[label][0]) == _rule(groups[other][0])]
        label = (alike or labels)[0]
        first, second = groups[label], groups[other]
        axes = {**first[0].axes, **second[0].axes}
        differing = [name for name in axes if first[0].axes.get(name) != second[0].axes.get(name)]
        yield VariantRatio(
            of=label,
            over=other,
            first=_ratio(first, second, "kl_first"),
            last=_ratio(first, second, "kl_last"),
            differs_in=[name for name in differing if name not in ("precision", "seed")],
        )


def _rule(cell: CellResult) -> dict[str, str]:
    """What a variant learns by: its axes but the dtypes."""
    return {name: words for name, words in cell.axes.items() if name not in ("precision", "seed")}


def _ratio(cells: Sequence[CellResult], others: Sequence[CellResult], name: str) -> OverSeeds | None:
    """Seed by seed: both then sample the same problems."""
    by_seed = {cell.seed: getattr(cell, name) for cell in others if cell.state in DONE}
    pairs = [(getattr(cell, name), by_seed.get(cell.seed)) for cell in cells if cell.state in DONE]
    logs = over_seeds([float(np.log(value / other)) for value, other in pairs if value and other])
    if logs is None:
        return None
    value, low, high = (None if bound is None else float(np.exp(bound)) for bound in (logs.value, logs.low, logs.high))
    assert value is not None
    return OverSeeds(value=value, low=low, high=high, num_seeds=logs.num_seeds)
